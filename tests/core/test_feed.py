"""Stories of the feed: numbered without gaps, at once where it matters, bounded where it does not."""

import pytest

from wavekeeper.coordinator.core import Effect, Publish, Received, Send, Tick
from wavekeeper.coordinator.core.feed import Feed
from wavekeeper.proto import messages as m
from wavekeeper.proto.messages import Phase

from .stories import FRONT_END, Puppet, Stage, dense, moe, sent


def updates(effects: list[Effect]) -> list[m.Update]:
    """The updates among effects."""
    return [e.message for e in effects if isinstance(e, Publish) and isinstance(e.message, m.Update)]


def get_snapshot(stage: Stage) -> m.Snapshot:
    """Ask for the whole state."""
    event = Received(b"fe", m.GetSnapshot(front_end=FRONT_END, deployment=stage.spec.name))
    (snapshot,) = sent(stage.tell(event), m.Snapshot)
    return snapshot


def test_a_change_of_phase_is_published_at_once_and_a_load_within_the_interval() -> None:
    stage = Stage(moe(2))
    stage.form()
    effects = stage.tell(stage.asks_for_start(0))
    assert [update.phase for update in updates(effects)] == [Phase.STARTING]

    report = stage.ranks[0].says(m.LoadReport, load=m.Load(waiting=1))
    assert updates(stage.tell(report)) == []
    assert stage.fleet.next_deadline_ms(stage.now_ms) <= stage.now_ms + 100
    (update,) = updates(stage.tell(Tick(), wait_ms=100))
    assert [(rank.rank, rank.load.waiting) for rank in update.ranks] == [(0, 1)], "only what has changed"


def test_updates_are_numbered_without_gaps_and_come_also_when_nothing_changes() -> None:
    """Case B29: a reader can tell a quiet deployment from a lost feed."""
    stage = Stage(dense(2))
    effects = stage.tell(*(rank.registers() for rank in stage.ranks))
    effects += stage.live(5_000)
    numbers = [update.seq for update in updates(effects)]

    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert len([update for update in updates(effects) if not update.ranks]) >= 4
    assert stage.deployment.longest_feed_gap_ms <= 1_000


def test_no_amount_of_input_starves_the_feed() -> None:
    """Time passes with every event: a flood of heartbeats does not hold an update back."""
    stage = Stage(dense(2))
    stage.tell(*(rank.registers() for rank in stage.ranks))
    effects: list[Effect] = []
    for number in range(2_000):
        load = m.Load(waiting=number)
        effects += stage.tell(stage.ranks[0].says(m.LoadReport, load=load), wait_ms=number % 2)
    assert 9 <= len(updates(effects)) <= 12, "one in 100 ms, over one second"


def test_a_snapshot_is_the_state_as_of_the_newest_update() -> None:
    stage = Stage(moe(2))
    stage.form()
    effects = stage.tell(stage.asks_for_start(0))
    snapshot = get_snapshot(stage)

    assert snapshot.seq == updates(effects)[-1].seq
    assert (snapshot.state.phase, snapshot.state.wave, snapshot.state.epoch) == (Phase.STARTING, 0, 1)
    assert [rank.rank for rank in snapshot.state.ranks] == [0, 1]


def test_a_rank_that_goes_or_is_replaced_is_published_at_once() -> None:
    stage = Stage(dense(2))
    stage.tell(*(rank.registers() for rank in stage.ranks))
    (update,) = updates(stage.tell(stage.ranks[1].says(m.Leave)))
    assert [(rank.rank, rank.up) for rank in update.ranks] == [(1, False)]

    new = Puppet(1, stage.spec, life=1, serve="tcp://new:1")
    (update,) = updates(stage.tell(new.registers()))
    assert [(rank.rank, rank.up, rank.incarnation, rank.serve) for rank in update.ranks] == [
        (1, True, new.incarnation, "tcp://new:1")
    ]
    assert update.ranks[0].load_number == 0, "the dead one's load does not live on"


def test_snapshot_and_updates_together_are_the_state_whatever_was_published_when() -> None:
    """A reader that applies the numbers above its snapshot's knows what the coordinator knows."""
    stage = Stage(dense(3))
    stage.tell(*(rank.registers() for rank in stage.ranks))
    stage.tell(stage.ranks[0].says(m.LoadReport, load=m.Load(waiting=7)))
    snapshot = get_snapshot(stage)
    known = {rank.rank: rank for rank in snapshot.state.ranks}
    effects = stage.tell(stage.ranks[1].says(m.LoadReport, load=m.Load(waiting=9)))
    effects += stage.live(1_000)
    for update in updates(effects):
        assert update.seq > snapshot.seq
        known |= {rank.rank: rank for rank in update.ranks}
    assert [known[rank].load.waiting for rank in range(3)] == [7, 9, 0]


def test_a_front_end_is_told_where_the_feed_is_and_what_kind_the_deployment_is() -> None:
    stage = Stage(moe(2))
    (effect,) = stage.tell(Received(b"fe", m.Attach(front_end=FRONT_END, deployment="moe")))
    assert effect == Send(b"fe", m.Attached(deployment="moe", term=1, feed="tcp://feed:1", kind=m.Kind.MOE))


@pytest.mark.parametrize("kind", [m.Attach, m.GetSnapshot])
def test_a_front_end_of_an_unknown_deployment_is_told_what_there_is(kind: type[m.Attach] | type[m.GetSnapshot]) -> None:
    stage = Stage(moe(2), dense(1))
    (effect,) = stage.tell(Received(b"fe", kind(front_end=FRONT_END, deployment="other")))
    assert isinstance(effect, Send) and isinstance(effect.message, m.Rejected)
    assert effect.message.reason is m.RejectReason.UNKNOWN_DEPLOYMENT and "moe, dense" in effect.message.detail


def test_a_front_end_that_leaves_needs_no_answer() -> None:
    assert Stage(moe(2)).tell(Received(b"fe", m.Detach(front_end=FRONT_END))) == []


def test_the_first_update_is_due_at_once() -> None:
    feed = Feed("moe", 1, 100, 1_000)
    assert feed.deadline_ms(5) == 5
