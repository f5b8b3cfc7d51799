"""One rank of a benchmark: a process that measures one way after the other, in step with the others.

    python -m wavekeeper.worker_agent.bench.rank TASK

`TASK` is a `Task` in JSON. Rank 0 first says where the ranks of a torch exchange meet; every rank is told so on its
standard input, and says on its standard output, one JSON object a line, what it has measured.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...proto.messages import Kind
from ...proto.rows import Operation, Position, Row, pack, unpack
from ..agent import RankAgent
from ..exchange import GroupSpec, Listener, make_exchange
from ..exchange.base import Exchange
from ..plan import PlanSettings, decide

FORM_MS = 120_000
STEP_MS = 60_000
WARM_UP = 0.1
"""Share of the steps that is made before anything is measured."""
TORCH = ("gloo", "nccl", "hccl")
PEERS = {"gloo": "gloo all_reduce", "nccl": "nccl all_reduce, in stream"}
"""What engines do today for the same: by the backend of torch that they use."""


class Task(msgspec.Struct, frozen=True):
    """What one rank is to measure."""

    run: str
    """Tells this run from any other on the machine."""
    rank: int
    ranks: int
    steps: int
    measures: list[str]
    """In this order: `shm`, `gloo`, `nccl`, `hccl` (an exchange), `agent.step` (all of `RankAgent.step` over shm),
    `peer gloo`, `peer nccl`."""
    device: str = "cpu"
    skew_us: float = 0.0
    busy_ms: float = 0.0


class Measured(msgspec.Struct, frozen=True):
    """One rank's figures of one measure, in microseconds."""

    measure: str
    p50_us: float
    p99_us: float
    max_us: float


class Ready(msgspec.Struct, frozen=True):
    """Where the ranks of a torch exchange meet."""

    rendezvous: str


Step = Callable[[int], object]
"""One step, by its number from 1."""


class Bench:
    """Measures what its task says."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._random = random.Random(task.rank)
        self._busy = Queue(task.device, task.busy_ms) if task.busy_ms else None
        self._row = Row(num_tokens=100 + task.rank, num_reqs=3, max_query_len=50, has_work=True)

    def run(self) -> None:
        """Measure everything."""
        task = self._task
        listener = Listener() if task.rank == 0 else None
        if listener is not None:
            tell(Ready(listener.endpoint))
        rendezvous = sys.stdin.readline().strip()
        for number, measure in enumerate(task.measures, 1):
            if measure.startswith("peer "):
                step, close = self._peer(measure.removeprefix("peer "))
            elif measure == "agent.step":
                step, close = self._agent()
            else:
                step, close = self._exchange(measure, number, rendezvous, listener)
            tell(self._measure(measure, step))
            close()

    def _measure(self, measure: str, step: Step) -> Measured:
        task = self._task
        warm_up = max(10, round(task.steps * WARM_UP))
        times = []
        for number in range(1, warm_up + task.steps + 1):
            if task.skew_us:
                _spin(self._random.uniform(0, task.skew_us) / 1e6)
            if self._busy is not None:
                self._busy.fill()
            began_ns = time.perf_counter_ns()
            step(number)
            times.append(time.perf_counter_ns() - began_ns)
            if self._busy is not None:
                self._busy.drain()
        times = sorted(times[warm_up:])
        at = [times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)], times[-1]]
        return Measured(measure, *(round(each / 1000, 2) for each in at))

    def _exchange(
        self, backend: str, number: int, rendezvous: str, listener: Listener | None
    ) -> tuple[Step, Callable[[], None]]:
        """From the engine's row to the plan, as `RankAgent.step` does it, and nothing around it."""
        task = self._task
        group = GroupSpec(
            deployment=f"bench-{task.run}",
            epoch=number,
            group=backend,
            rank=task.rank,
            dp_size=task.ranks,
            rendezvous=rendezvous if backend in TORCH else "",
            device=task.device,
        )
        exchange = _connect(backend, group, listener)
        settings, row = PlanSettings(), self._row

        def step(number: int) -> object:
            position = Position(Operation.STEP, 1, 1, number)
            mine = pack(row, position, task.rank)
            data = exchange.gather(mine, timeout_ms=STEP_MS)
            return decide(unpack(data, task.ranks, mine, task.rank), position, settings)

        return step, exchange.close

    def _agent(self) -> tuple[Step, Callable[[], None]]:
        task = self._task
        agent = RankAgent.offline(
            deployment=f"bench-{task.run}", rank=task.rank, dp_size=task.ranks, kind=Kind.MOE, form_timeout_s=120
        )

        def close() -> None:
            agent.step(Row())  # nobody has work any more: the wave ends on all ranks
            agent.close()

        return lambda number: agent.step(self._row), close

    def _peer(self, backend: str) -> tuple[Step, Callable[[], None]]:
        """What vLLM does: an all_reduce of int32 `[4, dp_size]` in which each rank fills its own column. The tensor is
        kept, which is kinder to it than the real thing.
        """
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import FileStore  # re-exported, but not for type checkers

        task = self._task
        store = FileStore(str(Path(tempfile.gettempdir()) / f"wavekeeper-bench-{task.run}-{backend}"), task.ranks)
        dist.init_process_group(backend, store=store, rank=task.rank, world_size=task.ranks)
        tensor = torch.zeros(4, task.ranks, dtype=torch.int32, device=task.device)

        def step(number: int) -> object:
            dist.all_reduce(tensor)
            return tensor.tolist() if task.device != "cpu" else None

        return step, dist.destroy_process_group


class Queue:
    """Work on the device's compute stream, so that whatever comes after it in that stream waits."""

    def __init__(self, device: str, busy_ms: float) -> None:
        import torch

        self._torch = torch
        self._size = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
        self._many = 1
        self.fill()
        self.drain()
        while True:  # how many make so many milliseconds
            began = time.perf_counter()
            self.fill()
            self.drain()
            if (time.perf_counter() - began) * 1000 >= busy_ms:
                break
            self._many *= 2

    def fill(self) -> None:
        """Queue it."""
        for _ in range(self._many):
            self._torch.mm(self._size, self._size)

    def drain(self) -> None:
        """Wait until the device is idle."""
        self._torch.accelerator.synchronize()


def _connect(backend: str, group: GroupSpec, listener: Listener | None) -> Exchange:
    if backend in TORCH and group.dp_size == 1:  # a group of one exchanges with nobody, but here the device is meant
        from ..exchange.torch_dist import TorchExchange

        return TorchExchange(backend, group, timeout_ms=FORM_MS, listener=listener)
    return make_exchange(backend, group, timeout_ms=FORM_MS, listener=listener)


def _spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def tell(what: Ready | Measured) -> None:
    """One line for the program that started us."""
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    """Measure what the task says."""
    task = msgspec.json.decode(arguments[0], type=Task)
    if any(measure.removeprefix("peer ") in TORCH for measure in task.measures):
        import torch

        torch.set_num_threads(1)  # the other ranks are here as well
        if task.device != "cpu":
            torch.accelerator.set_device_index(int(task.device.partition(":")[2] or 0))
    Bench(task).run()


if __name__ == "__main__":
    main(sys.argv[1:])
