"""What `wavekeeper status` and `wavekeeper healthcheck` do: ask the coordinator, print, and tell an exit code.

Data goes to stdout, what went wrong to stderr in one sentence. Loads no HTTP library, so that a container's health
check stays cheap. Every text that comes from elsewhere loses its control characters before a terminal sees it.
"""

import http.client
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable

import msgspec

from ...proto.messages import Activity, Phase
from ..core.view import DeploymentView, RankView
from .report import Status, coordination_cost, degradation, duration, exchange_words, last_share, percent, readiness

ANSWER_S_MAX = 5.0
ANSWER_BYTES_MAX = 64 << 20
"""A fleet of 4,096 ranks takes about 2 MB."""
CHUNK_BYTES = 1 << 16

_COLOURS = {
    **dict.fromkeys((Phase.SERVING, Phase.IDLE, Phase.RUNNING), "32"),
    **dict.fromkeys((Phase.GATHERING, Phase.FORMING, Phase.STARTING), "33"),
    **dict.fromkeys((Phase.HOLDING, Phase.HELD, Phase.RESUMING), "33"),
    Phase.FAULTED: "31",
}


class AskError(Exception):
    """There was no usable answer; `detail` is the sentence for people."""

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(detail)

    def __str__(self) -> str:
        return self.detail


class _Problem(msgspec.Struct):
    """As much of a problem+json as people need."""

    detail: str = ""


def print_status(url: str, as_json: bool, why: bool = False) -> int:
    """Print where every deployment stands: as text, as the JSON of /v1/status, or, with `why`, in a sentence each.

    Returns 0, or 1 without an answer.
    """
    try:
        body = ask(url, "/v1/status")
        try:
            status = msgspec.json.decode(body, type=Status)
        except msgspec.DecodeError as error:
            raise AskError(f"what answers at {url} is not a coordinator of this version: {error}") from None
    except AskError as error:
        print(_plain(str(error)), file=sys.stderr)
        return 1
    if as_json:
        print(msgspec.json.format(body, indent=2).decode())
    elif why:
        for deployment in status.deployments:
            print(_plain(f"{deployment.name}: {deployment.waits_for or f'{deployment.phase}, waits for nobody'}"))
    else:
        print("\n".join(_lines(status, _Paint(_colours_wanted()))))
    return 0


def healthcheck(url: str) -> int:
    """Return 0 if the coordinator at `url` is alive, 1 and a sentence if not."""
    try:
        ask(url, "/livez")
    except AskError as error:
        print(_plain(str(error)), file=sys.stderr)
        return 1
    return 0


# --- asking ----------------------------------------------------------------------------------------------------------


def ask(url: str, path: str, wish: msgspec.Struct | None = None) -> bytes:
    """Return the body of a good answer to a GET, or, with a wish, to its POST. Raises AskError for everything else."""
    if not url.startswith(("http://", "https://")):
        raise AskError(f"{url!r} is not the URL of a coordinator; write one such as http://127.0.0.1:9257")
    # Without proxies: a coordinator is a neighbour, and http_proxy would send a loopback address to another machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline_s = time.monotonic() + ANSWER_S_MAX
    try:
        request = urllib.request.Request(url.rstrip("/") + path)
        if wish is not None:
            request.data = msgspec.json.encode(wish)
            request.add_header("Content-Type", "application/json")
        with opener.open(request, timeout=ANSWER_S_MAX) as answer:
            body = bytearray()
            while chunk := answer.read1(CHUNK_BYTES):
                body += chunk
                # The timeout above is for each read; a drop of data now and then would outwit it.
                if time.monotonic() > deadline_s or len(body) > ANSWER_BYTES_MAX:
                    raise AskError(f"the answer of {url}{path} is too long or too slow: gave up at {len(body)} bytes")
            return bytes(body)
    except urllib.error.HTTPError as error:
        with error:
            raise AskError(f"{url}{path} answers {error.code} {error.reason}{_detail(error)}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        told = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise AskError(
            f"cannot reach a coordinator at {url}: {told.lower()}; is it running, and is this its coordinator.http?"
        ) from None


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        detail = msgspec.json.decode(error.read(CHUNK_BYTES), type=_Problem).detail
    except (OSError, msgspec.DecodeError):
        return ""
    return f": {detail}" if detail else ""


# --- printing --------------------------------------------------------------------------------------------------------


class _Paint:
    """Colours for a terminal, or none."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted

    def __call__(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._wanted else text


def _colours_wanted() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _lines(status: Status, paint: _Paint) -> Iterable[str]:
    own = status.coordinator
    judged = readiness(status)
    verdict = paint("ready", "32") if judged.ready else paint("not ready", "31")
    yield f"wavekeeper {_plain(own.version)}, term {status.term}, up {duration(own.uptime_s)}: {verdict}"
    yield f"control {_plain(own.control)}, feed {_plain(own.feed)}, configuration {_plain(own.config_hash)}"
    for reason in judged.reasons:
        yield paint(f"! {_plain(reason)}", "31")
    for deployment in status.deployments:
        yield ""
        yield from _block(deployment, paint)


def _block(d: DeploymentView, paint: _Paint) -> Iterable[str]:
    phase = paint(f"{d.phase} for {duration(d.phase_s)}", _COLOURS[d.phase])
    life = "lockstep" if d.lockstep else "independent"
    yield f"{paint(_plain(d.name), '1')} ({d.kind}, {life}): {phase}"
    if d.lockstep:
        waves = f"{d.waves} waves run ({d.empty_waves} empty), {d.dummy_steps} dummy steps"
        yield f"  wave {d.wave}, epoch {d.epoch}, {waves}, exchange {_plain(exchange_words(d))}"
    yield f"  {d.load.running} running, {d.load.waiting} waiting, fullest KV cache {percent(d.load.kv_cache_usage)}"
    yield f"  coordination cost: {coordination_cost(d)}"
    for text in _troubles(d):
        yield paint(f"  ! {_plain(text)}", "33")
    rows = [_HEAD, *(_cells(rank) for rank in d.ranks)]
    if not d.lockstep:
        rows = [row[:3] + row[6:] for row in rows]  # a dense rank has no wave, and nobody waits for it
    yield from _table(rows)


def _troubles(d: DeploymentView) -> Iterable[str]:
    if degraded := degradation(d):
        yield degraded
    if d.waits_for:
        yield d.waits_for
    if d.fault and d.fault not in d.waits_for:
        yield d.fault
    for start in d.waiting_starts:
        yield f"a start waits for {duration(start.waiting_s)}, asked for by {start.asked_by}"


_HEAD = ["rank", "mode", "activity", "wave", "step", "last", "running", "waiting", "KV", "heard", "host", "serves at"]
_LEFT = {"mode", "activity", "host", "serves at"}


def _cells(rank: RankView) -> list[str]:
    if not rank.up or rank.mode is None:
        return [str(rank.rank), "not there", *["-"] * (len(_HEAD) - 2)]
    load = rank.load
    return [
        str(rank.rank),
        rank.mode,
        f"{rank.activity or Activity.IDLE} {duration(rank.activity_s)}",
        *map(str, (rank.wave, rank.step)),
        last_share(rank),
        *map(str, (load.running, load.waiting)),
        percent(load.kv_cache_usage),
        duration(rank.heard_s),
        _plain(rank.host) or "-",
        _plain(rank.serve) or "-",
    ]


def _table(rows: list[list[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(rows[0], row, widths, strict=True)
        line = "  ".join(cell.ljust(width) if name in _LEFT else cell.rjust(width) for name, cell, width in cells)
        yield f"  {line}".rstrip()


def _plain(text: str) -> str:
    """One line without control characters: an attribute must not move the cursor of whoever looks."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
