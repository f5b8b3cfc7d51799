"""Holds on real processes: HTTP and the command line on one side, engines with their hooks on the other."""

import subprocess
import sys
import threading

from wavekeeper.proto.messages import HoldMode, Kind
from wavekeeper.worker_agent import EngineHooks, FrontEnd
from wavekeeper.worker_agent.front_end import DeploymentHeldError

from .engines import CountingEngine
from .house import Coordinator, eventually


class Recording(EngineHooks):
    """Writes down what it is told; its device comes to rest when the test lets it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.rest = threading.Event()

    def hold(self, mode: HoldMode) -> None:
        self.told.append(f"hold {mode}")

    def device_idle(self) -> None:
        assert self.rest.wait(30)
        self.told.append("device idle")

    def resume(self) -> None:
        self.told.append("resume")


def wavekeeper(coordinator: Coordinator, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "wavekeeper.coordinator", *words, "--url", coordinator.facts["http"]]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_an_operator_holds_a_running_deployment_by_command_and_lets_it_go_on(coordinator: Coordinator) -> None:
    control = coordinator.facts["control"]
    hooks = [Recording() for _ in range(3)]
    engines = [CountingEngine(control, "moe", Kind.MOE, rank, 3, 0.002, hooks=hooks[rank]) for rank in range(3)]
    front_end = FrontEnd.connect(control, deployment="moe")
    try:
        front_end.wait_ready(20)
        engines[0].submit(1_000)
        eventually(lambda: engines[0].done > 3, "the wave to be under way")
        for rank in (0, 1):
            hooks[rank].rest.set()

        early = wavekeeper(coordinator, "hold", "moe", "--mode", "keep", "--refuse", "--key", "w1", "--wait", "0.5")
        assert early.returncode == 1 and "rank 2 to be held" in early.stdout, early
        again = wavekeeper(coordinator, "hold", "moe", "--key", "w2", "--wait", "0")
        assert again.returncode == 1 and "busy: hold operation 1 is in progress" in again.stderr, again
        assert coordinator.get("/readyz")[0] == 503
        front_end.wait_for(lambda state: state.refuses, 10, "the hold to be heard of")
        try:
            front_end.pick()
        except DeploymentHeldError as error:
            assert "try again" in str(error)
        else:
            raise AssertionError("a request was sent to a held deployment")

        hooks[2].rest.set()
        same = wavekeeper(coordinator, "hold", "moe", "--mode", "keep", "--key", "w1")
        assert same.returncode == 0 and "moe is held" in same.stdout, same
        done, operations = engines[0].done, [len(engine.operations) for engine in engines]
        assert 3 < done < 1_000 and len(set(operations)) == 1
        assert "is held by operation 1" in wavekeeper(coordinator, "status", "--why").stdout

        resumed = wavekeeper(coordinator, "resume", "moe")
        assert resumed.returncode == 0, resumed
        eventually(lambda: engines[0].done == 1_000, "the kept work to be finished")
        assert [len(engine.operations) for engine in engines] > operations
        assert all(each.told == ["hold keep", "device idle", "resume"] for each in hooks)
        nothing = wavekeeper(coordinator, "resume", "moe")
        assert nothing.returncode == 1 and "not_held" in nothing.stderr
        dense = wavekeeper(coordinator, "hold", "dense")
        assert dense.returncode == 1 and "share nothing that could be held" in dense.stderr
    finally:
        for each in hooks:
            each.rest.set()
        front_end.close()
        for engine in engines:
            engine.close()
