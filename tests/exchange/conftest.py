"""The ranks of a group as threads of the test, and one rank as a process that can be killed."""

import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from wavekeeper.worker_agent.exchange import Exchange, GroupSpec, Listener, make_exchange

T = TypeVar("T")

PATIENCE_S = 60.0
"""Longest wait of a test for anything; only a broken build reaches it."""

FORM_MS = 30_000


def until(true: Callable[[], bool], what: str) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.005)


def together(call: Callable[[int], T], ranks: Sequence[int]) -> list[T | Exception]:
    """Call it for each rank in a thread of its own; what each one returned or raised, in the order of `ranks`."""
    results: dict[int, T | Exception] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = call(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return [results[rank] for rank in ranks]


CHILD = """
import sys
from wavekeeper.worker_agent.exchange import GroupSpec, make_exchange

backend, deployment, group, rank, dp_size, rendezvous = sys.argv[1:]
spec = GroupSpec(
    deployment=deployment, epoch=1, group=group, rank=int(rank), dp_size=int(dp_size), rendezvous=rendezvous
)
exchange = make_exchange(backend, spec, timeout_ms=30_000)
print("connected", flush=True)
for line in sys.stdin:
    print(exchange.gather(bytes([spec.rank]) * 64, timeout_ms=int(line))[::64].hex(), flush=True)
"""


class RankProcess:
    """One rank in a process of its own. `gather` begins an exchange; `kill` is SIGKILL."""

    def __init__(self, backend: str, deployment: str, group: str, rank: int, dp_size: int, rendezvous: str) -> None:
        arguments = [backend, deployment, group, str(rank), str(dp_size), rendezvous]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-W", "ignore", "-c", CHILD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def gather(self, timeout_ms: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{timeout_ms}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Fleet:
    """Makes groups of one deployment, and takes everything down after the test."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.deployment = f"test-{os.getpid()}-{time.monotonic_ns()}"
        self.listener = Listener() if backend == "gloo" else None
        self._exchanges: list[Exchange] = []
        self._processes: list[RankProcess] = []

    @property
    def rendezvous(self) -> str:
        return self.listener.endpoint if self.listener else ""

    def spec(self, rank: int, dp_size: int, group: str = "g1", epoch: int = 1, channel: str = "step") -> GroupSpec:
        return GroupSpec(
            deployment=self.deployment,
            epoch=epoch,
            group=group,
            rank=rank,
            dp_size=dp_size,
            rendezvous=self.rendezvous,
            channel=channel,
        )

    def connect(self, spec: GroupSpec, timeout_ms: int = FORM_MS) -> Exchange:
        listener = self.listener if spec.rank == 0 else None
        exchange = make_exchange(self.backend, spec, timeout_ms=timeout_ms, listener=listener)
        self._exchanges.append(exchange)
        return exchange

    def form(self, dp_size: int, group: str = "g1", epoch: int = 1, channel: str = "step") -> list[Exchange]:
        """Connect all ranks."""
        made = together(lambda rank: self.connect(self.spec(rank, dp_size, group, epoch, channel)), range(dp_size))
        exchanges = [exchange for exchange in made if not isinstance(exchange, Exception)]
        assert len(exchanges) == dp_size, made
        return exchanges

    def process(self, rank: int, dp_size: int, group: str = "g1") -> RankProcess:
        child = RankProcess(self.backend, self.deployment, group, rank, dp_size, self.rendezvous)
        self._processes.append(child)
        return child

    def segments(self) -> list[Path]:
        """What this deployment has under /dev/shm."""
        return sorted(Path("/dev/shm").glob(f"wavekeeper.{os.geteuid()}.{self.deployment}.*"))

    def close(self) -> None:
        for child in self._processes:
            child.close()
        for exchange in self._exchanges:
            exchange.close()
        if self.listener is not None:
            self.listener.close()
        for path in self.segments():
            path.unlink()


@pytest.fixture(params=["shm", "gloo"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A fleet of each backend."""
    if request.param == "gloo":
        import_torch()
    made = Fleet(request.param)
    yield made
    made.close()


@pytest.fixture
def shm_fleet() -> Iterator[Fleet]:
    made = Fleet("shm")
    yield made
    made.close()


@pytest.fixture
def gloo_fleet() -> Iterator[Fleet]:
    import_torch()
    made = Fleet("gloo")
    yield made
    made.close()


def import_torch() -> None:
    """torch without numpy warns when it is imported, and warnings are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torch")
