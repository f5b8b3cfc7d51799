"""What the user sees while the demo runs, and the thread that asks the coordinator for it.

On a terminal a table that is drawn again in place (rich, which honours NO_COLOR); elsewhere one line a second on
standard error. Both show the same `Progress`. The status is read over HTTP as any operator would; when it does not
answer, the last one stays and its age is shown: the display never decides anything.
"""

import http.client
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Protocol, Self

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...proto.messages import Kind, Mode, Phase
from .replay import Tally
from .report import DeploymentSeen, RankSeen

STATUS_EVERY_S = 0.2
STATUS_TIMEOUT_S = 1.0
STATUS_BYTES_MAX = 8 << 20
STALE_S = 2.0
"""A status older than that is shown with its age."""

DRAW_EVERY_S = 0.2
LINE_EVERY_S = 1.0

_COLOURS = {
    Phase.SERVING: "green",
    Phase.RUNNING: "green",
    Phase.IDLE: "cyan",
    Phase.FAULTED: "bold red",
    Mode.SERVING: "green",
    Mode.RUNNING: "green",
    Mode.IDLE: "cyan",
    Mode.HALTED: "bold red",
}


class Progress(msgspec.Struct, frozen=True):
    """How far the demo is."""

    stage: str
    elapsed_s: float
    tallies: Mapping[str, Tally]
    seen: Mapping[str, DeploymentSeen]
    status_age_s: float | None
    """None: there never was one."""


class Display(Protocol):
    """Where progress is shown."""

    def __enter__(self) -> Self:
        """Begin."""
        ...

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was."""
        ...

    def say(self, text: str) -> None:
        """Show a line that stays."""
        ...

    def update(self, progress: Progress) -> None:
        """Show the present state, if it is time to."""
        ...


class _StatusBody(msgspec.Struct, frozen=True):
    deployments: list[DeploymentSeen]


class StatusWatch:
    """Reads `/v1/status` again and again, in a thread of its own."""

    def __init__(self, url: str) -> None:
        self.seen: dict[str, DeploymentSeen] = {}
        self._url = f"{url}/v1/status"
        # No proxy of the environment may stand between us and our own child.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._read_s: float | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-status", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(2 * STATUS_TIMEOUT_S)

    @property
    def age_s(self) -> float | None:
        """How old `seen` is; None before the first answer."""
        return None if self._read_s is None else time.monotonic() - self._read_s

    def read(self) -> dict[str, DeploymentSeen] | None:
        """Ask now; None if there is no good answer within `STATUS_TIMEOUT_S`."""
        asked_s = time.monotonic()
        try:
            with self._opener.open(self._url, timeout=STATUS_TIMEOUT_S) as answer:
                body = msgspec.json.decode(answer.read(STATUS_BYTES_MAX), type=_StatusBody)
        except (urllib.error.URLError, http.client.HTTPException, OSError, msgspec.DecodeError):
            return None
        self.seen = {deployment.name: deployment for deployment in body.deployments}
        self._read_s = asked_s
        return self.seen

    def _run(self) -> None:
        while not self._ending.wait(STATUS_EVERY_S):
            self.read()


class LineDisplay:
    """For a pipe or a log: one line a second, on standard error."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        """Show a line that stays."""
        print(text, file=sys.stderr, flush=True)

    def update(self, progress: Progress) -> None:
        """Show the present state, once a second."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LINE_EVERY_S
            self.say(progress_line(progress))


class LiveDisplay:
    """For a terminal: a table that goes when the demo ends."""

    def __init__(self, console: Console) -> None:
        # Drawn by the main thread alone: rich's own thread would draw between two lines of ours.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._next_s = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Show a line above the table."""
        self._live.console.print(Text(text))

    def update(self, progress: Progress) -> None:
        """Draw the present state, a few times a second."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + DRAW_EVERY_S
            self._live.update(progress_view(progress), refresh=True)


def make_display(console: Console) -> Display:
    """Return the display that fits where standard output leads."""
    return LiveDisplay(console) if console.is_terminal else LineDisplay()


def progress_line(progress: Progress) -> str:
    """Return the whole progress in one line."""
    parts = [f"{progress.elapsed_s:5.1f} s  {progress.stage}{_stale(progress)}"]
    for name, tally in progress.tallies.items():
        seen = progress.seen.get(name)
        where = "" if seen is None else f" {seen.phase}" + (f" in wave {seen.wave}" if seen.kind.lockstep else "")
        lost = f", {tally.lost} lost" if tally.lost else ""
        lost += f", {tally.failed_with_rank} failed with their rank" if tally.failed_with_rank else ""
        parts.append(f"{name}{where}: {tally.done}/{tally.total} done, {_open(tally)} open{lost}")
    return " | ".join(parts)


def progress_view(progress: Progress) -> RenderableType:
    """Return the whole progress as tables."""
    head = Text(f"{progress.stage}{_stale(progress)}  {progress.elapsed_s:.1f} s", style="bold", no_wrap=True)
    return Group(head, _deployments(progress), _ranks(progress))


def _stale(progress: Progress) -> str:
    age_s = progress.status_age_s
    return f" (no status for {age_s:.1f} s)" if age_s is not None and age_s > STALE_S else ""


def _deployments(progress: Progress) -> Table:
    table = _table("deployment", "kind", "phase")
    for column in ("epoch", "wave", "sent", "done", "open", "lost"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, seen in progress.seen.items():
        tally = progress.tallies.get(name, Tally())
        position = (str(seen.epoch), str(seen.wave)) if seen.kind.lockstep else ("-", "-")
        counts = (f"{tally.sent}/{tally.total}", str(tally.done), str(_open(tally)))
        lost = Text(str(tally.lost), style="bold red" if tally.lost else "")
        table.add_row(name, seen.kind, _coloured(seen.phase), *position, *counts, lost)
    return table


def _ranks(progress: Progress) -> Table:
    table = _table("deployment", "rank", "mode")
    for column in ("wave", "step", "running", "waiting"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("activity", no_wrap=True)
    for name, seen in progress.seen.items():
        for rank in seen.ranks:
            table.add_row(name if rank.rank == 0 else "", *_rank(seen.kind, rank))
    return table


def _rank(kind: Kind, rank: RankSeen) -> tuple[str | Text, ...]:
    if rank.mode is None:
        return (str(rank.rank), Text("not there", style="dim"))
    position = (str(rank.wave), str(rank.step)) if kind.lockstep else ("-", "-")
    activity = rank.activity.value if rank.activity is not None else ""
    return (
        str(rank.rank),
        _coloured(rank.mode),
        *position,
        str(rank.load.running),
        str(rank.load.waiting),
        activity,
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _coloured(state: Phase | Mode) -> Text:
    return Text(state.value, style=_COLOURS.get(state, "yellow"))


def _open(tally: Tally) -> int:
    return tally.sent - tally.ended
