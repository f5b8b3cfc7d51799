"""A rank is lost while another one waits for it in a collective of its own engine, not in our exchange."""

import threading

from wavekeeper.proto.messages import Kind
from wavekeeper.worker_agent import EngineHooks, FrontEnd
from wavekeeper.worker_agent.errors import RankLostError

from .engines import CountingEngine
from .house import Coordinator, eventually

HANGS_S = 60.0


class Aborts(EngineHooks):
    """Aborts the engine's collective when a rank is lost, as an NCCL group is aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.lost: list[tuple[int | None, str]] = []

    def rank_lost(self, rank: int | None, reason: str) -> None:
        self.lost.append((rank, reason))
        self.aborted.set()
        raise RuntimeError("an engine's mistake here must not end the agent's control thread")


class WaitingEngine(CountingEngine):
    """Its model waits for a lost rank until it is aborted or, much later, its own deadline comes."""

    hooks: Aborts
    in_model = False

    def model(self) -> None:
        self.in_model = True
        self.hooks.aborted.wait(HANGS_S)


def test_an_engine_that_waits_in_its_own_collective_is_called_out_of_it_at_once(coordinator: Coordinator) -> None:
    control = coordinator.facts["control"]
    hooks = Aborts()
    waiting = WaitingEngine(control, "moe", Kind.MOE, 0, 3, hooks=hooks)
    waiting.hooks = hooks
    others = [CountingEngine(control, "moe", Kind.MOE, rank, 3, 0.001) for rank in (1, 2)]
    front_end = FrontEnd.connect(control, deployment="moe")
    try:
        front_end.wait_ready(20)
        others[0].submit(1_000)
        eventually(lambda: waiting.in_model, "rank 0 to be in its model")
        others[1].close()
        eventually(lambda: waiting.errors, "rank 0 to be told", 20)

        assert [rank for rank, _ in hooks.lost] == [2]
        assert "left" in hooks.lost[0][1]
        assert isinstance(waiting.errors[0], RankLostError) and waiting.errors[0].rank == 2
        eventually(lambda: coordinator.deployment("moe")["phase"] == "faulted", "the control thread to say so")
    finally:
        others[0].work = 0
        front_end.close()
        for engine in (waiting, *others):
            engine.close()
