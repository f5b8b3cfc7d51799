"""Stories of a new term: a coordinator that knows nothing takes everything from the ranks, and breaks nothing."""

from typing import Any

import pytest

from wavekeeper.coordinator.core import Effect
from wavekeeper.proto import messages as m
from wavekeeper.proto.messages import Mode, Phase

from .cluster import Cluster, formed_cluster
from .stories import TIMING, Puppet, Stage, moe, sent


def returning(stage: Stage, places: list[tuple[Mode, int]], *, has_work: bool = False) -> list[Effect]:
    """All ranks register at a coordinator that knows nothing, from these places."""
    effects: list[Effect] = []
    for rank, (mode, wave) in zip(stage.ranks, places, strict=True):
        rank.register["group"] = "g"
        rank.move(mode=mode, wave=wave, term=1, epoch=4, applied=9, has_work=has_work)
        effects += stage.join(rank)
    return effects


ADOPTED = {
    "all idle: nothing is started": ([(Mode.IDLE, 3), (Mode.IDLE, 3)], (Phase.IDLE, 4, 3), None),
    "all run: the start is repeated, which moves nobody": (
        [(Mode.RUNNING, 3), (Mode.RUNNING, 3)],
        (Phase.STARTING, 4, 3),
        3,
    ),
    "one runs, the other never heard the start": ([(Mode.IDLE, 3), (Mode.RUNNING, 3)], (Phase.STARTING, 4, 3), 3),
    "one has ended, the other reads the last exchange": ([(Mode.IDLE, 4), (Mode.RUNNING, 3)], (Phase.IDLE, 4, 4), None),
    "one runs the next already": ([(Mode.RUNNING, 4), (Mode.RUNNING, 3)], (Phase.STARTING, 4, 4), 4),
}


@pytest.mark.parametrize("places, expected, started", ADOPTED.values(), ids=ADOPTED)
def test_a_new_coordinator_takes_the_wave_from_the_ranks(
    places: list[tuple[Mode, int]], expected: tuple[Phase, int, int], started: int | None
) -> None:
    """DESIGN.md section 9: the wave is the highest reported; who has not begun it is started into it."""
    stage = Stage(moe(2), term=2)
    effects = returning(stage, places)

    assert stage.place == expected
    assert [(s.wave, s.seq, s.term) for s in sent(effects, m.Start)] == (
        [] if started is None else [(started, 1, 2)] * 2
    )
    assert not sent(effects, m.Form), "nobody builds anything anew"


def test_what_a_rank_has_applied_in_an_older_term_acknowledges_nothing_in_this_one() -> None:
    """An engine goes on stepping between its registration and the welcome; what it says then is of the old term."""
    stage = Stage(moe(2), term=2)
    returning(stage, [(Mode.RUNNING, 3), (Mode.RUNNING, 3)])
    stage.tell(*(rank.says(m.Heartbeat) for rank in stage.ranks))
    assert stage.is_in(Phase.STARTING), "both have applied 9 commands of term 1"

    stage.tell(*(rank.move(term=2, applied=1).says(m.Heartbeat) for rank in stage.ranks))
    assert stage.is_in(Phase.RUNNING)


def test_a_start_that_was_asked_for_while_nobody_led_is_served_by_the_next_coordinator() -> None:
    stage = Stage(moe(2), term=2)
    effects = returning(stage, [(Mode.IDLE, 3), (Mode.IDLE, 3)], has_work=True)

    assert [(start.rank, start.wave) for start in sent(effects, m.Start)] == [(0, 3), (1, 3)]


def test_a_wave_number_of_another_epoch_says_nothing_about_this_one() -> None:
    stage = Stage(moe(2))
    stage.form()
    stage.run()
    stage.tell(stage.ranks[0].move(epoch=0, wave=9).says(m.Heartbeat))
    assert stage.place == (Phase.RUNNING, 1, 0)


def test_ranks_of_different_groups_are_formed_anew_above_every_epoch_and_wave_that_they_know() -> None:
    stage = Stage(moe(2), term=2)
    for rank, epoch, wave in zip(stage.ranks, (4, 6), (9, 2), strict=True):
        rank.register["group"] = f"group-{epoch}"
        rank.move(mode=Mode.IDLE, term=1, epoch=epoch, wave=wave)
        effects = stage.join(rank)

    assert {(form.epoch, form.wave) for form in sent(effects, m.Form)} == {(7, 9)}


def test_a_copy_of_an_old_registration_that_comes_first_to_a_new_coordinator_forms_nothing() -> None:
    """Found by seed 7017 of `make sim SEEDS=10000`: epoch 1 was formed again, under ranks that stood in epoch 2."""
    cluster = Cluster(2)
    copies = [link[0] for link in cluster.up]
    cluster.settle()
    cluster.request(0)
    cluster.settle()
    cluster.crash()
    cluster.restart()
    for rank, copy in enumerate(copies):
        cluster.up[rank].append(copy)
    cluster.hear(0)
    cluster.hear(1)
    assert cluster.is_in(Phase.GATHERING)
    assert cluster.lockstep.waits_for(cluster.now_ms) == "waits for rank 0 and 1 to say where it stands, since 0.0 s"
    cluster.pass_time(1_000)

    assert cluster.is_in(Phase.IDLE)
    assert cluster.waves() == [(Mode.IDLE, 1)] * 2
    assert cluster.lockstep.epoch == 1
    assert not [each for each in cluster.said if isinstance(each, m.Form) and each.term > 1]


def stands(rank: Puppet, epoch: int, mode: Mode = Mode.IDLE, **register: Any) -> Puppet:
    """A rank of the group of this epoch, which a coordinator before us had formed."""
    rank.register.update(group=f"group-{epoch}", group_ranks=[0, 1], **register)
    return rank.move(mode=mode, term=1, epoch=epoch, wave=3)


def test_a_zombie_that_comes_first_to_a_new_coordinator_is_known_by_the_newest_group() -> None:
    """Found by seed 11090: replaced, and let go on just when a new coordinator began; its successor was refused."""
    stage = Stage(moe(2), term=2)
    zombie, successor = stage.ranks[1], Puppet(1, stage.spec, life=1)
    stage.join(stands(zombie, 1, Mode.RUNNING))
    (again,) = sent(stage.tell(stands(successor, 2).says(m.Heartbeat)), m.RegisterAgain)
    assert again.incarnation == successor.incarnation, "who it is must be judged first"

    effects = stage.join(stands(stage.ranks[0], 2, group_next=successor.incarnation))
    (refused,) = sent(effects, m.Refused)
    assert (refused.incarnation, refused.reason, refused.retry) == (zombie.incarnation, m.RefusalReason.FENCED, False)
    assert refused.detail == "rank 1 was another life when epoch 2 was formed; you are of epoch 1"
    stage.join(successor)
    assert stage.place == (Phase.IDLE, 2, 3), "the group is whole, and adopted"


def test_a_life_that_was_in_a_later_group_takes_the_place_of_a_zombie() -> None:
    stage = Stage(moe(2), term=2)
    stage.join(stands(stage.ranks[1], 1))
    effects = stage.join(stands(Puppet(1, stage.spec, life=1), 2))

    (refused,) = sent(effects, m.Refused)
    assert refused.incarnation == stage.ranks[1].incarnation and refused.reason is m.RefusalReason.FENCED
    assert [record.incarnation for record in stage.deployment.members] == ["0000000200000001"]


def test_a_rank_that_never_heard_of_the_last_group_is_no_zombie() -> None:
    stage = Stage(moe(2), term=2)
    stage.join(stands(stage.ranks[0], 2, group_next=stage.ranks[1].incarnation))
    effects = stage.join(stands(stage.ranks[1], 1))

    assert not sent(effects, m.Refused)
    assert {form.epoch for form in sent(effects, m.Form)} == {3}


def test_what_this_very_term_has_left_behind_is_not_adopted() -> None:
    """Found by seed 10916: the successor left, and its zombie's group of an earlier epoch was taken for the present."""
    stage = Stage(moe(2))
    stage.form()
    zombies = stage.ranks
    stage.live(TIMING.dead_after_ms, zombies[0])  # rank 1 is silent for too long
    stage.tell(zombies[0].says(m.Leave))
    assert stage.place == (Phase.GATHERING, 1, 0)
    stage.ranks = [Puppet(rank, stage.spec, life=1) for rank in range(2)]
    stage.form()
    stage.tell(*(rank.says(m.Leave) for rank in stage.ranks))
    assert stage.place == (Phase.GATHERING, 2, 0)

    for rank in zombies:
        rank.register["group"] = "g"
        effects = stage.join(rank)
    assert {form.epoch for form in sent(effects, m.Form)} == {3}


def test_a_coordinator_that_dies_in_a_wave_does_not_disturb_it() -> None:
    """Invariant 9, and DESIGN.md section 9: starts wait, nobody restarts, nothing is lost."""
    cluster = formed_cluster(3)
    cluster.request(1, steps=5)
    cluster.flow()
    cluster.crash()
    cluster.turn_all()
    assert cluster.engines[1].done == 5 and cluster.waves() == [(Mode.IDLE, 1)] * 3

    cluster.request(0)
    cluster.pass_time(1_000)
    assert cluster.engines[0].done == 0, "a rank never starts a wave by itself"
    cluster.restart()
    cluster.pass_time(1_000)
    assert cluster.engines[0].done == 1
    assert cluster.waves() == [(Mode.IDLE, 2)] * 3
    assert {engine.core.stepper.epoch for engine in cluster.engines} == {1}


def test_a_term_that_a_rank_has_seen_and_we_have_not_is_outgrown() -> None:
    stage = Stage(moe(2))
    stage.form()
    effects = stage.tell(stage.ranks[0].move(term=5).says(m.Heartbeat))
    assert len(sent(effects, m.RegisterAgain)) == 1 and stage.fleet.term == 1, "a mere message proves nothing"
    stage.tell(stage.ranks[0].registers())

    assert stage.fleet.term == 6
    assert stage.place == (Phase.GATHERING, 0, 0), "all register again with what they know"


@pytest.mark.parametrize("place", [{"term": (1 << 53) - 1}, {"epoch": (1 << 31) - 1}, {"wave": 1 << 30}])
def test_a_rank_that_claims_to_stand_where_nobody_can_bricks_nothing(place: dict[str, int]) -> None:
    """Found by random lying ranks: the next term, or epoch, would be one that no message can carry."""
    stage = Stage(moe(2))
    liar = stage.ranks[0].move(**place)
    effects = stage.tell(liar.registers())
    assert effects == [] or not sent(effects, m.Welcome)
    assert stage.fleet.term == 1 and len(stage.deployment.members) == 0

    stage = Stage(moe(2))
    stage.form()
    assert stage.is_in(Phase.IDLE)
