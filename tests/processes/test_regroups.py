"""Scaling and shrinking on real processes, by command, while requests are served."""

from wavekeeper.proto.messages import Kind
from wavekeeper.worker_agent import EngineHooks, FrontEnd

from .engines import CountingEngine
from .house import Coordinator, eventually
from .test_holds import wavekeeper


class GivesBack(EngineHooks):
    """An engine that hands its requests back when it is a spare."""

    engine: CountingEngine

    def spare(self) -> None:
        with self.engine.lock:
            self.engine.work = 0


def test_a_deployment_is_scaled_down_and_up_and_shrunk_after_a_death(coordinator: Coordinator) -> None:
    control = coordinator.facts["control"]
    hooks = [GivesBack() for _ in range(3)]
    engines = [CountingEngine(control, "moe", Kind.MOE, rank, 3, 0.001, hooks[rank]) for rank in range(3)]
    for hook, engine in zip(hooks, engines, strict=True):
        hook.engine = engine
    front_end = FrontEnd.connect(control, deployment="moe")
    try:
        front_end.wait_ready(20)
        engines[2].submit(200)
        eventually(lambda: engines[2].done > 3, "the wave to be under way")

        down = wavekeeper(coordinator, "scale", "moe", "--to", "2")
        assert down.returncode == 0 and "moe: done: epoch 2 is rank 0 and 1" in down.stdout, down
        assert engines[2].done == 200, "running work was finished first"
        assert [engine.agent.group_ranks for engine in engines] == [(0, 1), (0, 1), ()]
        front_end.wait_for(lambda state: [r.rank for r in state.ranks if r.up] == [0, 1], 10, "routing to follow")
        engines[1].submit(20)
        eventually(lambda: engines[1].done == 20, "the smaller group to serve")
        engines[2].submit(3)  # by somebody who does not know
        eventually(lambda: engines[2].work == 0, "the spare to give its requests back")
        assert engines[2].done == 200

        up = wavekeeper(coordinator, "scale", "moe", "--to", "3")
        assert up.returncode == 0, up
        engines[0].submit(20)
        eventually(lambda: engines[0].done == 20, "the larger group to serve")

        engines[1].submit(100_000)
        eventually(lambda: engines[1].done > 30, "the wave to be under way")
        engines[0].close()
        eventually(lambda: engines[1].errors and engines[2].errors, "the survivors to be told")
        assert "rank 0" in str(engines[1].errors[0])
        shrunk = wavekeeper(coordinator, "recover", "moe", "--shrink")
        assert shrunk.returncode == 0 and "rank 1 and 2" in shrunk.stdout, shrunk
        before = engines[1].done
        eventually(lambda: engines[1].done > before + 10, "the survivors to go on")
        assert [engine.agent.group_rank for engine in engines[1:]] == [0, 1]
        view = coordinator.deployment("moe")
        assert view["group_ranks"] == [1, 2] and view["regroup"]["state"] == "done" and view["ready"]
        missing = wavekeeper(coordinator, "scale", "moe", "--to", "3", "--deadline", "0.5")
        assert missing.returncode == 1 and "rolled_back: rank 0 did not register in time" in missing.stdout, missing
    finally:
        engines[1].work = 0
        front_end.close()
        for engine in engines:
            engine.close()
