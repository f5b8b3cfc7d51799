"""A network that loses things between one rank and the coordinator (case B06)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from wavekeeper.proto.messages import Kind

from .engines import CountingEngine
from .house import Coordinator, eventually
from .proxy import Proxy, Way

CONFIG = """
coordinator:
  control: tcp://127.0.0.1:0
  feed: tcp://127.0.0.1:0
  http: {port: 0}
  timing: {heartbeat_ms: 100, stall_after_ms: 1000, dead_after_ms: DEAD, start_ack_timeout_ms: ACK}
deployments:
  - {name: moe, kind: moe, dp_size: 3, exchange: shm}
"""
PATIENT_MS = 60_000
ACK_MS = 10_000
"""Longer than it takes to notice a dead connection and make another."""
FAR = 1
"""The rank behind the proxy."""


class Group:
    """Three ranks, one of them behind a proxy."""

    def __init__(self, coordinator: Coordinator, proxy: Proxy, engines: list[CountingEngine]) -> None:
        self.coordinator = coordinator
        self.proxy = proxy
        self.engines = engines

    def view(self) -> dict[str, object]:
        return self.coordinator.deployment("moe")

    def serve_all(self) -> None:
        for rank, engine in enumerate(self.engines):
            goal = engine.done + 2
            engine.submit(2)
            eventually(lambda engine=engine, goal=goal: engine.has_done(goal), f"rank {rank} to serve: {self.view()}")  # type: ignore[misc]


@contextmanager
def group(folder: Path, *, dead_ms: int = PATIENT_MS, ack_ms: int = ACK_MS) -> Iterator[Group]:
    config = CONFIG.replace("DEAD", str(dead_ms)).replace("ACK", str(ack_ms))
    coordinator = Coordinator(folder, config).start()
    engines: list[CountingEngine] = []
    try:
        with Proxy(coordinator.facts["control"]) as proxy:
            try:
                for rank in range(3):
                    control = proxy.endpoint if rank == FAR else coordinator.facts["control"]
                    engines.append(CountingEngine(control, "moe", Kind.MOE, rank, 3))
                for engine in engines:
                    engine.agent.wait_ready(20)
                yield Group(coordinator, proxy, engines)
            finally:
                for engine in engines:
                    engine.close()
    finally:
        coordinator.kill()


def test_a_start_that_is_lost_on_the_way_is_acknowledged_late_over_a_fresh_connection(tmp_path: Path) -> None:
    with group(tmp_path) as it:
        before = it.proxy.connections
        it.proxy.silence(Way.BACK)
        it.engines[0].submit(5)
        waits_for = "waits for rank 1 to acknowledge the start"
        eventually(lambda: waits_for in str(it.view()["waits_for"]), "only rank 1 to be waited for")
        assert it.view()["phase"] == "starting"
        assert it.engines[0].done == 0, "no rank steps before all have the start"

        it.proxy.heal()

        eventually(lambda: it.engines[0].done == 5, "the start to arrive in the end")
        assert it.proxy.connections > before
        it.serve_all()
        assert (it.view()["epoch"], it.view()["lost_ranks"]) == (1, 0)
        assert not any(engine.errors for engine in it.engines)


def test_a_rank_that_hears_no_start_is_named_and_faulted_and_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case B06: one direction is silently dropped after a quiet time; the fault comes in seconds and says who."""
    with group(tmp_path, ack_ms=1_500) as it:
        it.proxy.silence(Way.BACK)
        it.engines[0].submit(5)
        began_s = time.monotonic()

        eventually(lambda: it.view()["phase"] == "faulted", "the fault")
        took_s = time.monotonic() - began_s
        assert "rank 1 did not acknowledge the start of wave 0" in str(it.view()["fault"])
        assert it.coordinator.get("/readyz")[0] == 503
        eventually(lambda: it.engines[0].errors, "a rank that waits in the exchange to be told")
        assert "rank 1" in str(it.engines[0].errors[0])
        assert not it.engines[FAR].operations, "it ran nothing that it was not told to"

        it.proxy.heal()

        eventually(lambda: it.engines[0].done == 5, "the work to be served in the next epoch")
        it.serve_all()
        assert it.view()["epoch"] == 2
    with capsys.disabled():
        print(f"\n  measured: a start lost in silence -> fault that names the rank: {took_s:.2f} s (limit 1.5 s)")


def test_a_rank_that_is_not_heard_is_given_up_and_comes_back(tmp_path: Path) -> None:
    with group(tmp_path, dead_ms=2_000) as it:
        it.proxy.silence(Way.THERE)

        eventually(lambda: it.view()["lost_ranks"], "the silent rank to be given up")
        assert "rank 1" in str(it.view()["waits_for"])

        it.proxy.heal()
        it.serve_all()
        assert it.view()["epoch"] == 2


def test_connections_that_are_cut_again_and_again_lose_nothing(tmp_path: Path) -> None:
    with group(tmp_path, ack_ms=4_000) as it:
        for turn in range(8):
            engine = it.engines[turn % 3]
            goal = engine.done + 3
            engine.submit(3)
            it.proxy.cut()
            eventually(lambda engine=engine, goal=goal: engine.has_done(goal), f"the work of turn {turn}")  # type: ignore[misc]
        view = it.view()
        assert (view["epoch"], view["lost_ranks"]) == (1, 0)
        assert it.proxy.connections > 1
        assert not any(engine.errors for engine in it.engines)


def test_a_coordinator_behind_a_dead_network_breaks_no_running_wave(tmp_path: Path) -> None:
    with group(tmp_path) as it:
        it.engines[0].submit(3_000)
        eventually(lambda: it.engines[0].done > 5, "the wave to be under way")
        it.proxy.silence(Way.THERE)
        it.proxy.silence(Way.BACK)

        eventually(lambda: it.engines[0].done == 3_000, "the wave to end from rank to rank")
        it.proxy.heal()
        it.serve_all()
        assert (it.view()["epoch"], it.view()["lost_ranks"]) == (1, 0)
