"""The device exchange on one real GPU, as far as one GPU can tell: a group of one rank over NCCL.

Not collected by default (no GPU in CI). On a machine with one: `python -m pytest -s tests/device/nccl_one_gpu.py`.
"""

import statistics
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from wavekeeper.proto.rows import Operation, Position, Row, pack, unpack
from wavekeeper.worker_agent.errors import ExchangeInterruptedError
from wavekeeper.worker_agent.exchange.base import GroupSpec
from wavekeeper.worker_agent.exchange.rendezvous import Listener
from wavekeeper.worker_agent.exchange.torch_dist import TorchExchange


@pytest.fixture
def exchange() -> Iterator[TorchExchange]:
    listener = Listener("127.0.0.1")
    group = GroupSpec(
        deployment="device", epoch=1, group="one-gpu", rank=0, dp_size=1, rendezvous=listener.endpoint, device="cuda:0"
    )
    made = TorchExchange("nccl", group, timeout_ms=60_000, listener=listener)
    yield made
    made.close()
    listener.close()


def gather_us(exchange: TorchExchange, times: int, before: object = None) -> list[float]:
    took = []
    for step in range(1, times + 1):
        position = Position(Operation.STEP, 1, 0, step)
        mine = pack(Row(num_tokens=step, has_work=True), position, 0)
        if callable(before):
            before()
        began_ns = time.perf_counter_ns()
        rows = exchange.gather(mine, timeout_ms=30_000)
        took.append((time.perf_counter_ns() - began_ns) / 1000)
        assert unpack(rows, 1, mine, 0)[0].num_tokens == step
    return sorted(took)


def test_rows_come_back_through_the_device_and_no_default_group_is_made(exchange: TorchExchange) -> None:
    took = gather_us(exchange, 1_000)

    assert not torch.distributed.is_initialized()
    print(f"\nidle: p50 {statistics.median(took):.1f} us, p99 {took[989]:.1f} us on {torch.cuda.get_device_name(0)}")


def test_it_does_not_wait_behind_kernels_that_are_already_queued(exchange: TorchExchange) -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def queue_work() -> None:
        torch.cuda.synchronize()
        for _ in range(24):  # well over 20 ms in the compute stream
            torch.mm(a, a)

    began_ns = time.perf_counter_ns()
    queue_work()
    torch.cuda.synchronize()
    queued_ms = (time.perf_counter_ns() - began_ns) / 1e6
    took = gather_us(exchange, 30, before=queue_work)

    print(f"\nbehind {queued_ms:.1f} ms of queued work: p50 {statistics.median(took):.0f} us, max {took[-1]:.0f} us")
    assert statistics.median(took) / 1000 < queued_ms / 2, "it waited for the compute stream"


def test_an_interrupt_is_obeyed(exchange: TorchExchange) -> None:
    threading.Timer(0.0, exchange.interrupt).start()

    with pytest.raises(ExchangeInterruptedError):
        gather_us(exchange, 1_000_000)
