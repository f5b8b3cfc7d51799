"""Chaos strikes in order, one blow at a time, and never waits in the main thread."""

import time

import pytest

from wavekeeper.proto.messages import Kind, Phase
from wavekeeper.worker_agent.demo.chaos import Chaos
from wavekeeper.worker_agent.demo.display import StatusWatch
from wavekeeper.worker_agent.demo.fleet import DemoDeployment, FleetError, StartTimeoutError
from wavekeeper.worker_agent.demo.replay import Replay, Tally
from wavekeeper.worker_agent.demo.report import DeploymentSeen, RankSeen
from wavekeeper.worker_agent.front_end_core import Choice

MOE = DemoDeployment("moe", Kind.MOE, 2)
DENSE = DemoDeployment("dense", Kind.DENSE, 2)


class RecordingFleet:
    """Writes down what is done to it; nothing is back before the test says so."""

    def __init__(self, *deployments: DemoDeployment) -> None:
        self.deployments = list(deployments)
        self.blows: list[str] = []
        self.back = False

    def restart_coordinator(self) -> None:
        self.blows.append("coordinator")

    def coordinator_is_back(self) -> bool:
        return self.back

    def replace_rank(self, deployment: str, rank: int) -> None:
        self.blows.append(f"{deployment} {rank}")

    def rank_is_back(self, deployment: str, rank: int) -> bool:
        return self.back

    def serve_address(self, deployment: str, rank: int) -> str:
        return f"tcp://{deployment}:{rank}"


class SlowReplay(Replay):
    """Has ended as many requests as the test says, of ten, and one is out to rank 1 of the dense deployment."""

    def __init__(self) -> None:
        super().__init__([], {})
        self.tallies = {"dense": Tally(total=10)}
        self.lost: list[str] = []

    def out(self) -> list[tuple[str, Choice]]:
        return [("dense", Choice(1, "0123456789abcdef", "tcp://dense:1", 0))]

    def lose_rank(self, serve: str, reason: str) -> int:
        self.lost.append(serve)
        return 1


class FreshWatch(StatusWatch):
    """Sees what the test says, as of just now."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.show(up=True)

    def show(self, *, up: bool) -> None:
        ranks = [RankSeen(0, up=True), RankSeen(1, up=up)]
        self.seen = {"dense": DeploymentSeen("dense", Kind.DENSE, Phase.SERVING, ready=True, ranks=ranks)}

    @property
    def age_s(self) -> float | None:
        return 0.0


def test_the_blows_come_in_order_each_after_the_last_one_is_made_up_for() -> None:
    fleet, replay, watch = RecordingFleet(MOE, DENSE), SlowReplay(), FreshWatch()
    said: list[str] = []
    chaos = Chaos(fleet, replay, watch, said.append)

    def turn(done: int) -> list[str]:
        replay.tallies["dense"].done = done
        for _ in range(5):
            chaos.turn()
        return fleet.blows

    assert turn(1) == []
    assert turn(2) == ["coordinator"]
    assert turn(10) == ["coordinator"], "it is not back yet"
    watch.show(up=False)
    fleet.back = True
    assert turn(10) == ["coordinator"], "a rank has not come to it yet"
    fleet.back = True
    watch.show(up=True)
    assert turn(10) == ["coordinator", "dense 1", "coordinator"]

    assert chaos.finished
    assert replay.lost == ["tcp://dense:1"]
    assert [d.what for d in chaos.done] == ["the coordinator", "rank 1 of dense", "the coordinator"]
    assert [d.requests_out for d in chaos.done] == [1, 1, 1]
    assert "chaos: rank 1 of dense is killed with 1 requests out; its replacement starts" in said


def test_what_does_not_come_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavekeeper.worker_agent.demo.chaos.BACK_S_MAX", 0.01)
    fleet, replay = RecordingFleet(DENSE), SlowReplay()
    replay.tallies["dense"].done = 10
    chaos = Chaos(fleet, replay, FreshWatch(), lambda text: None)
    until_s = time.monotonic() + 10

    with pytest.raises(StartTimeoutError, match="the coordinator"):
        while time.monotonic() < until_s:
            chaos.turn()


def test_a_configuration_without_a_dense_rank_is_refused() -> None:
    with pytest.raises(FleetError, match="has none"):
        Chaos(RecordingFleet(MOE), SlowReplay(), FreshWatch(), lambda text: None)
