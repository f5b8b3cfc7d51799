"""Which processes measure, and what comes of it: one set of processes for each number of ranks, so that every backend
and its peer are measured by the same ones, one after the other.
"""

import contextlib
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, Queue
from statistics import median

import msgspec

from .rank import PEERS, TORCH, Measured, Ready, Task
from .report import Report, Result, compared, machine

SILENCE_S_MAX = 300.0
"""So long at most between two words of the ranks; importing torch in 64 processes on a few cores takes minutes."""


class BenchFailedError(Exception):
    """A rank has failed or has fallen silent; the text says which, and what it said last."""


class Options(msgspec.Struct, frozen=True):
    """What is to be measured."""

    backends: tuple[str, ...] = ("shm", "gloo")
    ranks: tuple[int, ...] = (2, 4, 8)
    steps: int = 2_000
    agent: bool = True
    """Also all of `RankAgent.step` over shared memory."""
    peer: bool = True
    device: str = "cpu"
    skew_us: float = 0.0
    busy_ms: float = 0.0


class Ranks:
    """The processes of one group."""

    def __init__(self, options: Options, ranks: int, measures: list[str]) -> None:
        self._measures = measures
        self._run = secrets.token_hex(4)
        self._said: Queue[tuple[int, str]] = Queue()
        self._processes: list[subprocess.Popen[str]] = []
        self._errors = [tempfile.TemporaryFile("w+") for _ in range(ranks)]
        for rank in range(ranks):
            task = Task(
                run=self._run,
                rank=rank,
                ranks=ranks,
                steps=options.steps,
                measures=measures,
                device=options.device if options.device == "cpu" else f"{options.device}:{rank}",
                skew_us=options.skew_us,
                busy_ms=options.busy_ms,
            )
            command = [sys.executable, "-P", "-m", f"{__package__}.rank", msgspec.json.encode(task).decode()]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors[rank], text=True
            )
            self._processes.append(process)
            threading.Thread(target=self._listen, args=(rank, process), daemon=True).start()

    def results(self) -> Iterator[tuple[str, list[Measured]]]:
        """What all ranks have measured, one measure after the other.

        Raises:
            BenchFailedError: A rank has failed or has fallen silent.
        """
        ready = msgspec.json.decode(self._next(), type=Ready)
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, and its end is heard of below
                process.stdin.write(ready.rendezvous + "\n")
                process.stdin.flush()
        waiting: dict[str, list[Measured]] = {measure: [] for measure in self._measures}
        for measure in self._measures:
            while len(waiting[measure]) < len(self._processes):
                measured = msgspec.json.decode(self._next(), type=Measured)
                waiting[measured.measure].append(measured)
            yield measure, waiting[measure]

    def close(self) -> None:
        """End whoever has not ended by itself, and clear up."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        for file in self._errors:
            file.close()
        for path in Path(tempfile.gettempdir()).glob(f"wavekeeper-bench-{self._run}-*"):
            path.unlink(missing_ok=True)

    def _listen(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._said.put((rank, line))
        if process.wait() != 0:
            self._said.put((rank, ""))

    def _next(self) -> str:
        try:
            rank, line = self._said.get(timeout=SILENCE_S_MAX)
        except Empty:
            raise BenchFailedError(f"no rank has said anything for {SILENCE_S_MAX:g} s") from None
        if not line:
            status = self._processes[rank].wait()
            self._errors[rank].seek(0)
            last = (self._errors[rank].read().strip().splitlines() or ["nothing"])[-1]
            raise BenchFailedError(f"rank {rank} has ended with status {status}; its last words: {last}")
        return line


def run(options: Options, progress: Callable[[str], None]) -> Report:
    """Measure everything.

    Raises:
        BenchFailedError: See `Ranks.results`.
    """
    found: list[Result] = []
    peers: dict[int, tuple[str, float]] = {}
    for ranks in options.ranks:
        measures = _measures(options, ranks)
        group = Ranks(options, ranks, measures)
        try:
            for measure, measured in group.results():
                p50 = round(median(each.p50_us for each in measured), 2)
                progress(f"{ranks} ranks, {measure}: p50 {p50:,.1f} us")
                if measure.startswith("peer "):
                    peers[ranks] = PEERS[measure.removeprefix("peer ")], p50
                    continue
                worst = max(each.p99_us for each in measured), max(each.max_us for each in measured)
                found.append(Result(measure, ranks, options.steps, p50, *worst))
        finally:
            group.close()
    told = {
        "steps": str(options.steps),
        "skew": f"up to {options.skew_us:g} us" if options.skew_us else "",
        "queued before each step": f"{options.busy_ms:g} ms" if options.busy_ms else "",
        "device": options.device if options.device != "cpu" else "",
    }
    return Report(machine(), told, compared(found, peers))


def _measures(options: Options, ranks: int) -> list[str]:
    measures = list(options.backends)
    if options.agent and "shm" in options.backends and ranks > 1:
        measures.insert(measures.index("shm") + 1, "agent.step")
    if options.peer:
        device = next((backend for backend in options.backends if backend in TORCH and backend != "gloo"), "gloo")
        measures.append(f"peer {device if device in PEERS else 'gloo'}")
    return measures
