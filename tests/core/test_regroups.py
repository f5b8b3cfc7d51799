"""Changing the ranks of a deployment: prepare, everybody stops, commit; or back, naming who did not."""

from wavekeeper.coordinator.core import Answer, Wished
from wavekeeper.coordinator.core.events import Wish
from wavekeeper.coordinator.core.holds import HoldWish, Operation, Refusal, ResumeWish
from wavekeeper.coordinator.core.regroups import RecoverWish, Regroup, RegroupState, ScaleWish
from wavekeeper.proto.messages import Mode, Phase

from .cluster import Cluster, formed_cluster


def wishes(cluster: Cluster, wish: Wish) -> Operation | Regroup | Refusal:
    assert cluster.fleet is not None
    answer = None
    for effect in cluster.fleet.handle(Wished(1, "moe", wish), cluster.now_ms):
        if isinstance(effect, Answer):
            answer = effect.answer
        else:
            cluster.do(effect)
    assert answer is not None
    return answer


def state(cluster: Cluster) -> tuple[RegroupState, str]:
    regroup = cluster.lockstep.regroup
    assert regroup is not None
    return regroup.state, regroup.detail


def up(cluster: Cluster) -> list[int]:
    """Ranks that front-ends may send to."""
    return [rank.rank for rank in cluster.lockstep.state(cluster.now_ms).ranks if rank.up]


def serves(cluster: Cluster, rank: int) -> None:
    done = cluster.engines[rank].done
    cluster.request(rank, steps=2)
    cluster.settle()
    assert cluster.engines[rank].done == done + 2


def test_scaling_down_lets_the_wave_end_and_leaves_the_others_as_spares() -> None:
    cluster = formed_cluster(4)
    cluster.request(3, steps=5)
    cluster.flow()
    cluster.post(3)  # rank 3, which will be a spare, has work under way
    assert isinstance(wishes(cluster, ScaleWish(2)), Regroup)
    cluster.settle()

    assert state(cluster) == (RegroupState.DONE, "epoch 2 is rank 0 and 1")
    assert cluster.engines[3].done == 5, "running work was finished first"
    assert [engine.core.mode for engine in cluster.engines] == [Mode.IDLE, Mode.IDLE, Mode.JOINING, Mode.JOINING]
    assert up(cluster) == [0, 1] and cluster.engines[1].core.group_ranks == (0, 1)
    serves(cluster, 1)
    assert cluster.engines[2].core.stepper.counters().steps == cluster.engines[3].core.stepper.counters().steps


def test_those_who_leave_get_no_more_requests_while_they_finish_what_they_have() -> None:
    cluster = formed_cluster(3)
    cluster.request(2, steps=5)
    cluster.flow()
    wishes(cluster, ScaleWish(2))
    cluster.flow()

    assert state(cluster)[0] is RegroupState.DRAINING and up(cluster) == [0, 1]
    assert cluster.is_in(Phase.RUNNING), "the old group serves"
    waits = "regroup 1 waits for rank 2 to finish all work, since 0.0 s"
    assert cluster.lockstep.waits_for(cluster.now_ms) == waits
    assert cluster.lockstep.ready(cluster.now_ms)
    cluster.settle()
    assert cluster.engines[2].done == 5 and state(cluster)[0] is RegroupState.DONE


def test_a_rank_that_does_not_finish_in_time_is_named_and_is_sent_to_again() -> None:
    cluster = formed_cluster(3)
    cluster.request(2, steps=10_000)
    cluster.flow()
    wishes(cluster, ScaleWish(2, deadline_s=1.0))
    cluster.flow()
    cluster.now_ms += 1_000
    cluster.coordinator_ticks()

    assert state(cluster) == (RegroupState.ROLLED_BACK, "rank 2 still had work at the deadline")
    assert up(cluster) == [0, 1, 2] and cluster.is_in(Phase.RUNNING)


def test_a_request_that_comes_to_a_spare_is_given_back_and_every_further_one_too() -> None:
    cluster = formed_cluster(2)
    wishes(cluster, ScaleWish(1))
    cluster.settle()
    for steps in (3, 4):
        cluster.request(1, steps)
        cluster.settle()
        assert (cluster.engines[1].given_back, cluster.engines[1].work) == (steps, 0)
    cluster.pass_time(200)

    assert cluster.engines[1].done == 0 and not cluster.engines[1].core.at().has_work
    assert cluster.engines[1].core.waits_for(cluster.now_ms).endswith("this rank is a spare")


def test_scaling_up_again_takes_the_spares_back_in() -> None:
    cluster = formed_cluster(3)
    wishes(cluster, ScaleWish(1))
    cluster.settle()
    assert up(cluster) == [0]
    serves(cluster, 0)  # starts of a group that the spares are no part of
    serves(cluster, 0)
    wishes(cluster, ScaleWish(3))
    cluster.settle()

    assert state(cluster)[0] is RegroupState.DONE and up(cluster) == [0, 1, 2]
    for rank in range(3):
        serves(cluster, rank)


def test_ranks_that_do_not_come_in_time_are_named_and_the_old_group_never_stopped() -> None:
    """Case B44: grow 2 -> 4, rank 3 never acknowledges; all are back on the old version, waves go on."""
    cluster = formed_cluster(4)
    wishes(cluster, ScaleWish(2))
    cluster.settle()
    cluster.kill(3)
    epoch = cluster.lockstep.epoch
    wishes(cluster, ScaleWish(4, deadline_s=2.0))
    cluster.settle()
    assert state(cluster) == (RegroupState.PREPARING, "")
    serves(cluster, 1)
    cluster.pass_time(2_500)

    assert state(cluster) == (RegroupState.ROLLED_BACK, "rank 3 did not register in time")
    assert cluster.lockstep.epoch == epoch and up(cluster) == [0, 1]
    serves(cluster, 0)


def test_a_rank_that_does_not_stop_in_time_is_named_and_everybody_goes_on() -> None:
    cluster = formed_cluster(3)
    cluster.engines[1].device_idle = False
    wishes(cluster, ScaleWish(2, deadline_s=1.0))
    cluster.settle()
    cluster.pass_time(1_500)
    cluster.engines[1].device_idle = True
    cluster.settle()

    assert state(cluster) == (RegroupState.ROLLED_BACK, "rank 1 did not stop in time")
    assert cluster.is_in(Phase.IDLE) and cluster.lockstep.epoch == 1
    serves(cluster, 2)


def test_a_new_group_that_does_not_form_in_time_gives_way_to_the_old_one() -> None:
    cluster = formed_cluster(3)
    cluster.refuses_to_build = {1}
    wishes(cluster, ScaleWish(2, deadline_s=1.0))
    cluster.settle()
    assert cluster.is_in(Phase.FORMING)
    cluster.refuses_to_build = set()
    cluster.engines[1].building = None  # whatever hindered it has passed
    cluster.pass_time(1_500)

    assert state(cluster)[0] is RegroupState.ROLLED_BACK and "rank" in state(cluster)[1]
    assert up(cluster) == [0, 1, 2] and cluster.is_in(Phase.IDLE)
    serves(cluster, 2)


def test_after_a_death_the_survivors_go_on_without_the_dead_rank() -> None:
    """Case B39: recovery that comes before everybody has halted is accepted and waits."""
    cluster = formed_cluster(4)
    cluster.request(0, steps=100)
    cluster.flow()
    for rank in range(4):
        cluster.post(rank)
    cluster.kill(2)
    assert isinstance(wishes(cluster, RecoverWish()), Regroup)
    assert cluster.is_in(Phase.FAULTED), "ranks 0, 1 and 3 have not left their step"
    cluster.settle()

    assert cluster.lockstep.epoch == 2 and state(cluster)[0] is RegroupState.DONE
    assert cluster.engines[3].core.group_ranks == (0, 1, 3) and cluster.engines[3].core.group_rank == 2
    assert cluster.engines[0].work == 0, "its work was finished in the smaller group"
    assert up(cluster) == [0, 1, 3]
    serves(cluster, 3)


def test_a_replacement_after_a_shrink_is_a_spare_until_an_operator_scales() -> None:
    """Never is a rank that comes, or one that is missing, taken for a wish."""
    cluster = formed_cluster(3)
    cluster.kill(1)
    wishes(cluster, RecoverWish())
    cluster.settle()
    cluster.replace(1)
    cluster.settle()
    assert up(cluster) == [0, 2] and cluster.lockstep.epoch == 2
    wishes(cluster, ScaleWish(3))
    cluster.settle()

    assert up(cluster) == [0, 1, 2] and cluster.lockstep.epoch == 3
    serves(cluster, 1)


def test_a_new_rank_that_goes_before_the_commit_sends_everybody_back_to_work_until_it_is_there_again() -> None:
    """Found by seed 13450 of the simulator: a group was formed that lacked one of its ranks."""
    cluster = formed_cluster(3)
    wishes(cluster, ScaleWish(1))
    cluster.settle()
    cluster.engines[0].device_idle = False
    wishes(cluster, ScaleWish(3))
    cluster.settle()
    assert state(cluster)[0] is RegroupState.STOPPING
    cluster.kill(2)
    cluster.engines[0].device_idle = True
    cluster.settle()

    assert state(cluster)[0] is RegroupState.PREPARING and cluster.is_in(Phase.IDLE)
    serves(cluster, 0)
    cluster.replace(2)
    cluster.settle()
    assert state(cluster)[0] is RegroupState.DONE and up(cluster) == [0, 1, 2]
    serves(cluster, 2)


def test_shrinking_takes_the_place_of_a_scaling_that_cannot_come_true() -> None:
    cluster = formed_cluster(3)
    wishes(cluster, ScaleWish(2))
    cluster.settle()
    cluster.kill(2)
    wishes(cluster, ScaleWish(3))  # waits for rank 2
    cluster.kill(1)
    answer = wishes(cluster, RecoverWish())
    cluster.settle()

    assert isinstance(answer, Regroup) and answer.number == 3
    assert state(cluster) == (RegroupState.DONE, "epoch 3 is rank 0") and up(cluster) == [0]


def test_a_scaled_group_stays_scaled_when_the_coordinator_restarts() -> None:
    cluster = formed_cluster(3)
    wishes(cluster, ScaleWish(2))
    cluster.settle()
    cluster.crash()
    cluster.restart()
    cluster.pass_time(3_000)

    assert cluster.is_in(Phase.IDLE) and cluster.lockstep.epoch == 2 and up(cluster) == [0, 1]
    serves(cluster, 0)


def test_a_fault_in_the_middle_rolls_back_and_says_so() -> None:
    cluster = formed_cluster(3)
    cluster.engines[0].device_idle = False
    wishes(cluster, ScaleWish(2))
    cluster.settle()
    cluster.kill(1)
    cluster.settle()

    assert state(cluster)[0] is RegroupState.ROLLED_BACK and cluster.is_in(Phase.FAULTED)
    assert cluster.lockstep.operation is None
    cluster.replace(1)
    cluster.engines[0].device_idle = True
    cluster.settle()
    assert up(cluster) == [0, 1, 2]
    serves(cluster, 1)


def test_what_cannot_be_changed_says_why() -> None:
    cluster = formed_cluster(2)
    for wish, reason in (
        (ScaleWish(3), "out_of_range"),
        (ScaleWish(2), "no_change"),
        (RecoverWish(), "not_faulted"),
    ):
        answer = wishes(cluster, wish)
        assert isinstance(answer, Refusal) and answer.reason == reason
    assert isinstance(answer, Refusal) and answer.detail.endswith("this one is idle, and misses none")
    wishes(cluster, HoldWish())
    answer = wishes(cluster, ScaleWish(1))
    assert isinstance(answer, Refusal) and answer.reason == "busy" and "hold operation 1" in answer.detail
    wishes(cluster, ResumeWish())
    cluster.settle()
    wishes(cluster, ScaleWish(1))
    answer = wishes(cluster, HoldWish())
    assert isinstance(answer, Refusal) and "regroup 1 is in progress" in answer.detail
