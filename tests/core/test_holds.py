"""Holds: an operator stops all ranks at one step, and nothing runs until the operator lets it."""

import pytest

from wavekeeper.coordinator.core import Answer, Wished
from wavekeeper.coordinator.core.holds import HoldWish, Operation, Refusal, ResumeWish
from wavekeeper.proto import messages as m
from wavekeeper.proto.messages import HoldMode, Mode, Phase
from wavekeeper.worker_agent.events import Hook

from .cluster import Cluster, formed_cluster
from .stories import Stage, dense


def wishes(cluster: Cluster, wish: HoldWish | ResumeWish) -> Operation | Refusal:
    """An operator asks; nothing is delivered yet."""
    assert cluster.fleet is not None
    answer = None
    for effect in cluster.fleet.handle(Wished(1, "moe", wish), cluster.now_ms):
        if isinstance(effect, Answer):
            answer = effect.answer
        else:
            cluster.do(effect)
    assert isinstance(answer, Operation | Refusal)
    return answer


def held(cluster: Cluster) -> bool:
    """Everybody is held, and the coordinator says so."""
    return cluster.is_in(Phase.HELD) and {engine.core.mode for engine in cluster.engines} == {Mode.HELD}


def test_an_idle_deployment_is_held_when_every_device_is_idle_and_not_before() -> None:
    cluster = formed_cluster(2)
    cluster.engines[1].device_idle = False
    assert wishes(cluster, HoldWish()) == Operation(1, HoldWish(), cluster.now_ms)
    cluster.settle()
    assert cluster.is_in(Phase.HOLDING)
    assert "rank 1 to be held" in cluster.lockstep.waits_for(cluster.now_ms)

    cluster.engines[1].device_idle = True
    cluster.settle()
    assert held(cluster)
    assert [engine.hooks for engine in cluster.engines] == [[Hook.HOLD, Hook.DEVICE_IDLE]] * 2


@pytest.mark.parametrize("mode", [HoldMode.NOW, HoldMode.KEEP])
def test_a_running_wave_is_left_by_all_ranks_at_the_same_step(mode: HoldMode) -> None:
    """Case B25: the first step at which all rows carry the wish, whoever hears of it first."""
    cluster = formed_cluster(3)
    cluster.request(0, steps=50)
    cluster.flow()
    cluster.post(0)  # the wave is under way
    wishes(cluster, HoldWish(mode))
    cluster.obey(1)  # rank 1 hears of it one step before the others
    for rank in (1, 2):
        cluster.post(rank)
    for rank in range(3):
        cluster.read(rank)
    cluster.settle()

    assert held(cluster)
    operations = [engine.operations for engine in cluster.engines]
    assert operations[0] == operations[1] == operations[2]
    assert cluster.engines[0].work > 0, "its work waits for the next wave"


def test_in_wait_mode_the_running_wave_ends_first() -> None:
    """Case B25, second variant: a rank without work keeps serving dummies until the others are done."""
    cluster = formed_cluster(2)
    cluster.request(0, steps=50)
    cluster.flow()
    cluster.post(0)
    wishes(cluster, HoldWish(HoldMode.WAIT))
    cluster.settle()

    assert held(cluster)
    assert cluster.engines[0].work == 0 and cluster.lockstep.wave == 1


def test_nothing_runs_while_held_and_what_came_meanwhile_runs_after_resume() -> None:
    cluster = formed_cluster(2)
    wishes(cluster, HoldWish())
    cluster.settle()
    cluster.request(1, steps=3)
    cluster.coordinator_hears_first_request(0)
    cluster.pass_time(3_000)
    assert held(cluster) and cluster.engines[1].done == 0
    assert all(engine.operations == [] for engine in cluster.engines)

    assert isinstance(wishes(cluster, ResumeWish()), Operation)
    cluster.settle()
    assert cluster.engines[1].done == 3 and cluster.is_in(Phase.IDLE)
    assert all(engine.hooks[-1] is Hook.RESUME for engine in cluster.engines)


def test_a_start_that_was_on_its_way_when_the_hold_came_is_served_first_by_all_or_by_nobody() -> None:
    """Case B25: A0 has its start, A1's is delayed; the hold cannot overtake it, because commands have numbers."""
    cluster = formed_cluster(2)
    cluster.request(0, steps=2)
    cluster.hear(0)  # the coordinator starts wave 0
    cluster.obey(0)
    wishes(cluster, HoldWish(HoldMode.WAIT))
    cluster.obey(0)
    assert cluster.engines[1].core.mode is Mode.IDLE
    cluster.settle()

    assert held(cluster) and cluster.engines[0].done == 2
    assert cluster.engines[0].operations == cluster.engines[1].operations


def test_one_operation_at_a_time_and_the_same_one_again_is_the_same_one() -> None:
    """Case B27: a second hold is refused with the number of the first, whose caller keeps its answer."""
    cluster = formed_cluster(2)
    first = wishes(cluster, HoldWish(key="weights-42"))
    assert wishes(cluster, HoldWish(key="weights-42")) == first
    refused = wishes(cluster, HoldWish(key="other"))
    assert isinstance(refused, Refusal) and refused.reason == "busy" and "operation 1" in refused.detail
    assert wishes(cluster, ResumeWish(operation=9)) == Refusal("other_operation", "hold operation 1 is in force, not 9")
    cluster.settle()
    assert held(cluster)


def test_requests_are_turned_away_visibly_when_the_operator_wants_it_so() -> None:
    """Case B27: admission is closed from the moment of the hold until resume."""
    cluster = formed_cluster(2)
    wishes(cluster, HoldWish(refuse=True))
    assert cluster.lockstep.state(cluster.now_ms).refuses
    cluster.coordinator_hears_first_request(0)
    cluster.settle()

    operation = cluster.lockstep.operation
    assert operation is not None and operation.refused == 1 and not cluster.lockstep.asks
    wishes(cluster, ResumeWish())
    cluster.settle()
    assert not cluster.lockstep.state(cluster.now_ms).refuses and cluster.lockstep.waves_run == 0


def test_a_hold_that_is_resumed_before_it_was_complete_leaves_nobody_behind() -> None:
    cluster = formed_cluster(3)
    wishes(cluster, HoldWish())
    cluster.obey(0)
    wishes(cluster, ResumeWish())
    cluster.settle()

    assert cluster.is_in(Phase.IDLE) and {engine.core.mode for engine in cluster.engines} == {Mode.IDLE}
    cluster.request(2)
    cluster.settle()
    assert cluster.engines[2].done == 1


def test_a_hold_outlives_the_coordinator() -> None:
    cluster = formed_cluster(2)
    wishes(cluster, HoldWish(HoldMode.KEEP))
    cluster.settle()
    cluster.crash()
    cluster.request(0, steps=2)
    cluster.restart()
    cluster.pass_time(3_000)
    assert held(cluster) and cluster.engines[0].done == 0

    wishes(cluster, ResumeWish())
    cluster.settle()
    assert cluster.engines[0].done == 2


def test_a_hold_outlives_a_fault() -> None:
    cluster = formed_cluster(2)
    wishes(cluster, HoldWish())
    cluster.settle()
    cluster.replace(1)
    cluster.pass_time(10_000)

    assert held(cluster) and cluster.lockstep.epoch == 2


def test_a_rank_that_says_it_is_not_held_after_all_is_told_again() -> None:
    cluster = formed_cluster(2)
    wishes(cluster, HoldWish())
    cluster.settle()
    cluster.engines[0].core.mode = Mode.IDLE  # whatever went wrong there
    cluster.pass_time(2_000)

    assert held(cluster)


def test_a_dense_deployment_has_nothing_to_hold_together() -> None:
    stage = Stage(dense(2))
    (answer,) = [e for e in stage.fleet.handle(Wished(7, "dense", HoldWish()), stage.now_ms) if isinstance(e, Answer)]

    assert isinstance(answer.answer, Refusal) and answer.answer.reason == "dense" and answer.token == 7


def test_what_cannot_be_held_or_resumed_says_why() -> None:
    cluster = Cluster(2)
    refused = wishes(cluster, HoldWish())
    assert isinstance(refused, Refusal) and refused.reason == "not_formed" and "rank 0 and 1" in refused.detail
    assert isinstance(wishes(cluster, ResumeWish()), Refusal)


def test_a_stalled_rank_is_named_and_the_deployment_is_not_ready() -> None:
    """Case B40: health follows progress. Case B21: whoever waits inside the exchange is not the one to blame."""
    cluster = formed_cluster(2)
    cluster.request(0, steps=2)
    cluster.flow()
    for engine, activity in zip(cluster.engines, (m.Activity.EXCHANGING, m.Activity.STEPPING), strict=True):
        engine.core.activity, engine.core.activity_since_ms = activity, cluster.now_ms
    for _ in range(60):
        cluster.now_ms += 100
        cluster.coordinator_ticks()

    assert cluster.is_in(Phase.RUNNING) and not cluster.lockstep.ready(cluster.now_ms)
    assert "waits for rank 1: stepping since" in cluster.lockstep.waits_for(cluster.now_ms)
