"""Owns the demo's processes: one coordinator and every rank of every deployment in its configuration.

The laws of this file:

- Every child is started by the main thread, in a session of its own: Ctrl-C at the terminal reaches only the demo,
  which then stops the children in order (ranks, then the coordinator).
- No child outlives the demo. Leaving the `with` block sends SIGTERM, waits a bounded time, then sends SIGKILL. If the
  demo itself is killed, the kernel sends SIGTERM to each child (PR_SET_PDEATHSIG): a rank asks for that by itself
  (`--parent`), for the coordinator it is asked between fork and exec.
- No wait is unbounded, each looks at the children and at the user's wish to stop in between, and says who is missing.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import yaml

from ...proto.messages import Kind
from ..exchange.segment import reclaim
from .report import RankFinal

COORDINATOR_START_S = 30.0
RANKS_START_S = 120.0
"""Each rank loads torch first, on a small machine one after the other."""
STOP_S = 5.0
"""A rank needs at most `rank.STOP_WAIT_S`, the coordinator about as long."""
POLL_S = 0.05
TAIL_LINES = 8
TAIL_BYTES = 4_096

EXCHANGES = {"shm": "shm", "gloo": "gloo", "auto": "shm"}
"""What a deployment may ask for, and what its ranks then offer."""

_PR_SET_PDEATHSIG = 1


class FleetError(Exception):
    """The demo's processes are not as they must be; the text is for the user."""


class ChildEndedError(FleetError):
    """A process ended that should have gone on. `tail` is the end of its log."""

    def __init__(self, name: str, status: int, tail: str) -> None:
        self.name = name
        self.status = status
        self.tail = tail
        super().__init__(name, status, tail)  # keeps the error picklable

    def __str__(self) -> str:
        how = f"was killed by {signal.Signals(-self.status).name}" if self.status < 0 else f"ended with {self.status}"
        return f"{self.name} {how}" + (f"; the end of its log:\n{self.tail}" if self.tail else "")


class StartTimeoutError(FleetError):
    """Some of the processes were not ready in time; `missing` names them."""

    def __init__(self, missing: tuple[str, ...], waited_s: float) -> None:
        self.missing = missing
        self.waited_s = waited_s
        super().__init__(missing, waited_s)

    def __str__(self) -> str:
        return f"not ready after {self.waited_s:g} s: {', '.join(self.missing)}"


class Addresses(msgspec.Struct, frozen=True):
    """Where the coordinator can be reached, as its ready file tells."""

    control: str
    feed: str
    http: str


class DemoDeployment(msgspec.Struct, frozen=True):
    """As much of a deployment's configuration as its ranks must be told."""

    name: str
    kind: Kind
    dp_size: int
    exchange: str | None = None


class _Configuration(msgspec.Struct, frozen=True):
    deployments: list[DemoDeployment]


class Child:
    """One process, with its log in a file and the events that it tells on its standard output."""

    def __init__(
        self,
        name: str,
        arguments: Iterable[str],
        log: Path,
        *,
        pass_fds: tuple[int, ...] = (),
        before_exec: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.events: dict[str, dict[str, Any]] = {}
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-P", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                pass_fds=pass_fds,
                start_new_session=True,
                preexec_fn=before_exec,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},  # all ranks are here; a host name may lead elsewhere
            )
        self._reader = threading.Thread(target=self._read, name=f"demo-events-{name}", daemon=True)
        self._reader.start()

    def raise_if_ended(self) -> None:
        """Raise `ChildEndedError` if this process has ended."""
        status = self.process.poll()
        if status is not None:
            raise ChildEndedError(self.name, status, self._told() or tail(self.log))

    def stop(self) -> None:
        """Ask it to end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, by SIGKILL."""
        self.process.kill()
        self.process.wait()
        self._reader.join(STOP_S)  # its end of the pipe is closed, so nothing more can come

    def end(self, until_s: float, hurry: Callable[[], bool]) -> None:
        """Wait until it has ended, but only until `until_s` (monotonic) or `hurry`; then kill it."""
        while self.process.poll() is None and time.monotonic() < until_s and not hurry():
            time.sleep(POLL_S)
        self.kill()

    def _told(self) -> str:
        """The rank's own word for why it ended; better than the end of its log."""
        self._reader.join(STOP_S)
        return next((str(self.events[name]["error"]) for name in ("refused", "failed") if name in self.events), "")

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a library's print is no event
                    event = json.loads(line)
                    self.events[event["event"]] = event


class DemoFleet:
    """The processes of one demo. Nothing runs before `start` and nothing after the `with` block.

    Args:
        config: The coordinator's YAML.
        folder: Gets the logs, one file for each process, and the coordinator's ready file.
        check: Called in every wait; raises when the user wants to stop.
        hurry: Whether the user wants it at once: children are then killed without waiting.
        exchange: Replaces that of every lockstep deployment in the configuration.
    """

    def __init__(
        self,
        config: Path,
        folder: Path,
        *,
        check: Callable[[], None],
        hurry: Callable[[], bool],
        exchange: str | None = None,
    ) -> None:
        self.deployments: list[DemoDeployment] = []
        self.ranks: dict[tuple[str, int], Child] = {}
        self._config = config
        self._folder = folder
        self._check = check
        self._hurry = hurry
        self._exchange = exchange
        self._coordinator: Child | None = None
        self._ready_file = folder / "coordinator.ready.json"
        self._addresses = Addresses("", "", "")
        self._lives: Counter[str] = Counter()
        """How many processes of each name have been started: each has a log of its own."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self.ranks.values())
        if self._coordinator is not None:
            self._end([self._coordinator])
        for deployment in self.deployments:
            if deployment.kind.lockstep:  # ranks that were killed while they met have left a segment
                reclaim(deployment.name, keep="")

    def start(self, say: Callable[[str], None]) -> Addresses:
        """Start everything and wait until all ranks serve. `say` is told how far it is.

        Raises:
            ChildEndedError: A process ended instead of getting ready.
            StartTimeoutError: Names who was not ready in time.
            FleetError: A deployment asks for an exchange that the demo's ranks do not have.
        """
        self._addresses = addresses = self._start_coordinator()
        self.deployments = self._read_deployments()
        for deployment in self.deployments:
            self._start_ranks(deployment, addresses.control)
        say(f"the coordinator answers at {addresses.http}; starting {len(self.ranks)} ranks")
        self._wait(self._not_ready, RANKS_START_S)
        return addresses

    def raise_if_ended(self) -> None:
        """Raise `ChildEndedError` for the first process that has ended."""
        for child in self._children():
            child.raise_if_ended()

    def restart_coordinator(self) -> None:
        """Kill it with SIGKILL and start another one on the same ports; `coordinator_is_back` tells when it has them.

        The main thread must call this: the kernel ends a child with the thread that has started it.
        """
        assert self._coordinator is not None
        self._coordinator.kill()
        addresses = self._addresses
        self._launch_coordinator(
            f"--set=coordinator.control={addresses.control}",
            f"--set=coordinator.feed={addresses.feed}",
            f"--set=coordinator.http.port={addresses.http.rpartition(':')[2]}",
        )

    def coordinator_is_back(self) -> bool:
        """Whether the coordinator has bound its ports."""
        return self._ready_file.exists()

    def replace_rank(self, deployment: str, rank: int) -> None:
        """Kill a rank of an independent deployment with SIGKILL and start its replacement, in the main thread.
        `rank_is_back` tells when that serves.
        """
        (of,) = (each for each in self.deployments if each.name == deployment)
        assert not of.kind.lockstep, "a lockstep rank would need the store of its group"
        self.ranks[deployment, rank].kill()
        self._start_rank(of, rank, _rank_arguments(of, rank, self._addresses.control), ())

    def rank_is_back(self, deployment: str, rank: int) -> bool:
        """Whether this rank serves."""
        return "ready" in self.ranks[deployment, rank].events

    def serve_address(self, deployment: str, rank: int) -> str:
        """Where this rank takes requests, as it has told."""
        return str(self.ranks[deployment, rank].events["ready"]["serve"])

    def stop_ranks(self) -> dict[str, list[RankFinal]]:
        """Stop all ranks and return their last words by deployment; those of a rank that was killed are missing."""
        self._end(self.ranks.values())
        finals: dict[str, list[RankFinal]] = {deployment.name: [] for deployment in self.deployments}
        for (name, _), child in self.ranks.items():
            if "counters" in child.events:
                finals[name].append(msgspec.convert(child.events["counters"], RankFinal))
        return finals

    def _start_coordinator(self) -> Addresses:
        self._launch_coordinator()
        self._wait(lambda: () if self.coordinator_is_back() else ("coordinator",), COORDINATOR_START_S)
        return msgspec.json.decode(self._ready_file.read_bytes(), type=Addresses)

    def _launch_coordinator(self, *flags: str) -> None:
        self._ready_file.unlink(missing_ok=True)  # of an earlier one: that is gone
        config = self._config if self._exchange is None else self._with_exchange()
        arguments = ["--config", str(config), "--ready-file", str(self._ready_file), "--log-format", "text"]
        self._coordinator = Child(
            "coordinator",
            ["-m", "wavekeeper.coordinator", "serve", *arguments, *flags],
            self._log("coordinator"),
            before_exec=_die_with_parent(),
        )

    def _log(self, name: str) -> Path:
        """The file for a process's log: a replacement does not overwrite that of the one before it."""
        self._lives[name] += 1
        life = self._lives[name]
        return self._folder / (f"{name}.log" if life == 1 else f"{name}.{life}.log")

    def _start_ranks(self, deployment: DemoDeployment, control: str) -> None:
        # Bound before anybody is told: a port that is only known to be free may be taken by another program.
        with socket.create_server(("127.0.0.1", 0), backlog=deployment.dp_size) as store:
            for rank in range(deployment.dp_size):
                arguments = _rank_arguments(deployment, rank, control)
                fds: tuple[int, ...] = ()
                if deployment.kind.lockstep:
                    arguments += ["--store", f"tcp://127.0.0.1:{store.getsockname()[1]}"]
                if deployment.kind.lockstep and rank == 0:
                    fds = (store.fileno(),)
                    arguments += ["--store-fd", str(store.fileno())]
                self._start_rank(deployment, rank, arguments, fds)

    def _start_rank(self, deployment: DemoDeployment, rank: int, arguments: list[str], fds: tuple[int, ...]) -> None:
        name, log = f"rank {rank} of {deployment.name}", self._log(f"{deployment.name}-{rank}")
        self.ranks[deployment.name, rank] = Child(name, arguments, log, pass_fds=fds)

    def _with_exchange(self) -> Path:
        """Write the configuration again, with the user's exchange. What is wrong with it, the coordinator will say."""
        path = self._folder / "coordinator.yaml"
        try:
            data = yaml.safe_load(self._config.read_text())
            for deployment in data["deployments"]:
                if deployment["kind"] == Kind.MOE:
                    deployment["exchange"] = self._exchange
        except (OSError, UnicodeDecodeError, yaml.YAMLError, LookupError, TypeError):
            return self._config
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    def _read_deployments(self) -> list[DemoDeployment]:
        """The deployments of a file that the coordinator has accepted."""
        data = yaml.safe_load(self._config.read_text())
        deployments = msgspec.convert(data, _Configuration).deployments
        if self._exchange is not None:
            deployments = [
                msgspec.structs.replace(d, exchange=self._exchange) if d.kind.lockstep else d for d in deployments
            ]
        for deployment in deployments:
            if deployment.kind.lockstep and (deployment.exchange or "auto") not in EXCHANGES:
                raise FleetError(
                    f"{deployment.name} asks for the exchange {deployment.exchange}, but the demo's ranks have "
                    f"{', '.join(EXCHANGES)}: add --exchange shm"
                )
        return deployments

    def _not_ready(self) -> tuple[str, ...]:
        return tuple(child.name for child in self.ranks.values() if "ready" not in child.events)

    def _wait(self, missing: Callable[[], tuple[str, ...]], timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while names := missing():
            self._check()
            self.raise_if_ended()
            if time.monotonic() > until_s:
                raise StartTimeoutError(names, timeout_s)
            time.sleep(POLL_S)

    def _end(self, children: Iterable[Child]) -> None:
        children = list(children)
        for child in children:
            child.stop()
        until_s = time.monotonic() + STOP_S
        for child in children:
            child.end(until_s, self._hurry)

    def _children(self) -> list[Child]:
        return [*([self._coordinator] if self._coordinator is not None else []), *self.ranks.values()]


def tail(log: Path) -> str:
    """Return the last lines of a log, fit for a terminal."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join("  " + "".join(c if c.isprintable() else " " for c in line) for line in lines)
    return ""


def _rank_arguments(deployment: DemoDeployment, rank: int, control: str) -> list[str]:
    facts: Mapping[str, object] = {
        "--control": control,
        "--deployment": deployment.name,
        "--kind": deployment.kind.value,
        "--rank": rank,
        "--dp-size": deployment.dp_size,
        "--parent": os.getpid(),
        "--exchange": EXCHANGES[deployment.exchange or "auto"],
    }
    options = [str(text) for pair in facts.items() for text in pair]
    return ["-m", "wavekeeper.worker_agent.demo.rank", *options]


def _die_with_parent() -> Callable[[], None]:
    """Return what a child runs between fork and exec, so that the kernel ends it with us."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up here: a forked child should do as little as possible
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # we ended before the child could ask
            os._exit(1)

    return ask
