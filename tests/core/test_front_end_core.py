"""Stories of a front-end: it follows the feed or asks again, keeps its own counts, picks, and asks for starts."""

from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest

from wavekeeper.proto import messages as m
from wavekeeper.proto.messages import Phase
from wavekeeper.worker_agent.front_end_core import (
    ASK_AGAIN_MS,
    ATTACH_MS,
    SILENT_MS,
    Choice,
    Effect,
    FrontEndCore,
    Received,
    Send,
    Subscribe,
    Tick,
)

from .stories import FRONT_END, picture, wire

IDLE: dict[str, Any] = {"phase": Phase.IDLE, "epoch": 1, "wave": 3}


def rank_state(rank: int, life: int = 0, **fields: Any) -> m.RankState:
    return m.RankState(rank=rank, up=True, incarnation=f"{rank + 1:08x}{life:08x}", serve=f"tcp://r{rank}:1", **fields)


def asked(effects: list[Effect]) -> list[type[m.Message]]:
    """Types of what is sent to the coordinator."""
    return [type(effect.message) for effect in effects if isinstance(effect, Send)]


class Desk:
    """A front-end's core, and a clock."""

    def __init__(self, *ranks: m.RankState, kind: m.Kind = m.Kind.MOE, **state: Any) -> None:
        self.now_ms = 1_000
        self.core = FrontEndCore("moe", FRONT_END, Random(7), self.now_ms)
        self.kind = kind
        self.core.handle(Tick(), self.now_ms)
        self.gets(m.Attached(deployment="moe", term=1, feed="tcp://feed:1", kind=kind))
        self.gets(self.snapshot(1, 10, *ranks, **state))
        assert self.core.synced

    def snapshot(self, term: int, seq: int, *ranks: m.RankState, **state: Any) -> m.Snapshot:
        known = m.DeploymentState(
            name="moe", kind=self.kind, dp_size=len(ranks), ranks=list(ranks), **{**IDLE, **state}
        )
        return m.Snapshot(deployment="moe", term=term, seq=seq, state=known)

    def update(self, term: int, seq: int, *ranks: m.RankState, **state: Any) -> m.Update:
        return m.Update(deployment="moe", term=term, seq=seq, dp_size=2, ranks=list(ranks), **{**IDLE, **state})

    def gets(self, message: m.Message) -> list[Effect]:
        return self.core.handle(Received(wire(message)), self.now_ms)

    def pick(self) -> Choice:
        choice, _ = self.core.pick(self.now_ms)
        assert choice is not None
        return choice

    def place(self) -> tuple[int, int, int]:
        assert self.core.state is not None
        return self.core.term, self.core.seq, self.core.state.wave


def two(**state: Any) -> Desk:
    """Two ranks, idle."""
    return Desk(rank_state(0), rank_state(1), **state)


# --- following the feed ----------------------------------------------------------------------------------------------


def test_it_attaches_subscribes_and_asks_for_the_whole_state_in_this_order() -> None:
    core = FrontEndCore("moe", FRONT_END, Random(0), 0)
    assert asked(core.handle(Tick(), 0)) == [m.Attach]
    effects = core.handle(Received(m.Attached(deployment="moe", term=1, feed="f", kind=m.Kind.MOE)), 1)
    assert effects == [Subscribe("f"), Send(m.GetSnapshot(front_end=FRONT_END, deployment="moe"))]


def test_what_is_lost_on_the_way_is_asked_for_again() -> None:
    core = FrontEndCore("moe", FRONT_END, Random(0), 0)
    core.handle(Tick(), 0)
    assert core.next_deadline_ms(0) == ATTACH_MS
    assert asked(core.handle(Tick(), ATTACH_MS - 1)) == []
    assert asked(core.handle(Tick(), ATTACH_MS)) == [m.Attach]


def test_updates_are_applied_in_order_and_old_ones_dropped() -> None:
    desk = two()
    assert asked(desk.gets(desk.update(1, 11, rank_state(1, load=m.Load(waiting=4)), wave=4))) == []
    assert desk.place() == (1, 11, 4)
    assert desk.core.state is not None and [rank.load.waiting for rank in desk.core.state.ranks] == [0, 4]

    before = picture(desk.core)
    for old in (desk.update(1, 11, wave=9), desk.update(1, 5, wave=9), desk.update(0, 99, wave=9), desk.snapshot(1, 9)):
        assert desk.gets(old) == []
    assert picture(desk.core) == before


def test_a_gap_makes_it_ask_for_the_whole_state_once_and_keep_what_came_after() -> None:
    """Case B29 (b), llm-d-router issue 1737."""
    desk = two()
    assert asked(desk.gets(desk.update(1, 13, wave=5))) == [m.GetSnapshot]
    assert asked(desk.gets(desk.update(1, 14, wave=6))) == []
    assert desk.place() == (1, 10, 3) and not desk.core.synced

    desk.gets(desk.snapshot(1, 12, rank_state(0), rank_state(1), wave=4))
    assert desk.place() == (1, 14, 6) and desk.core.synced


def test_an_old_snapshot_revives_nobody() -> None:
    """Case B44, vllm PR 55772, without scaling: what is older in (term, seq) is ignored."""
    desk = two()
    old = desk.snapshot(1, 10, rank_state(0), rank_state(1))
    desk.gets(desk.update(1, 11, m.RankState(rank=1), epoch=2))
    assert desk.gets(old) == []
    assert {desk.pick().rank for _ in range(6)} == {0}


def test_a_new_term_makes_it_ask_again_and_an_old_term_is_dead() -> None:
    desk = two()
    assert asked(desk.gets(desk.update(2, 1, wave=8))) == [m.GetSnapshot]
    desk.gets(desk.snapshot(2, 1, rank_state(0), rank_state(1), wave=8))
    assert desk.place() == (2, 1, 8) and desk.core.synced

    assert desk.gets(desk.update(1, 11, wave=4)) == []
    assert desk.gets(desk.snapshot(1, 50, rank_state(0), wave=4)) == []
    assert desk.place() == (2, 1, 8)


def test_a_silent_coordinator_is_looked_for_again() -> None:
    desk = two()
    desk.now_ms += SILENT_MS
    assert asked(desk.core.handle(Tick(), desk.now_ms)) == [m.Attach, m.GetSnapshot]
    assert asked(desk.core.handle(Tick(), desk.now_ms + 1)) == []

    effects = desk.gets(m.Attached(deployment="moe", term=2, feed="tcp://elsewhere:1", kind=m.Kind.MOE))
    assert Subscribe("tcp://elsewhere:1") in effects


def test_news_of_another_deployment_change_nothing() -> None:
    desk = two()
    before = picture(desk.core)
    other = msgspec.structs.replace(desk.update(1, 11, wave=9), deployment="moe-2")
    assert desk.gets(other) == [] and picture(desk.core) == before


# --- picking a rank --------------------------------------------------------------------------------------------------


def test_no_rank_is_picked_before_one_is_known_to_be_up() -> None:
    core = FrontEndCore("moe", FRONT_END, Random(0), 0)
    assert core.pick(0) == (None, [])
    assert Desk(m.RankState(rank=0)).core.pick(0)[0] is None


def test_ties_rotate() -> None:
    desk = Desk(*(rank_state(rank) for rank in range(4)))
    picks = [desk.pick() for _ in range(40)]
    assert Counter(choice.rank for choice in picks) == {0: 10, 1: 10, 2: 10, 3: 10}
    for choice in picks:
        desk.core.done(choice)
    assert not desk.core.in_flight


def test_the_least_loaded_rank_is_picked_until_it_is_no_longer() -> None:
    desk = Desk(rank_state(0, load=m.Load(running=3)), rank_state(1, load=m.Load(waiting=1)))
    assert Counter(desk.pick().rank for _ in range(2)) == {1: 2}
    assert Counter(desk.pick().rank for _ in range(10)) == {0: 5, 1: 5}


def test_a_snapshot_never_erases_what_is_in_flight_from_here() -> None:
    """DESIGN.md section 11: three requests were just sent; the reports were made before they arrived."""
    desk = two()
    picks = [desk.pick().rank for _ in range(3)]
    twice = max(picks, key=picks.count)
    idle = [rank_state(rank, load_number=5, load=m.Load()) for rank in (0, 1)]
    desk.gets(desk.snapshot(1, 20, *idle))

    assert sum(desk.core.in_flight.values()) == 3
    assert desk.pick().rank != twice, "the one with two in flight is not the next"


def test_a_report_that_has_our_requests_in_it_does_not_count_them_twice() -> None:
    desk = two()
    for _ in range(4):
        desk.pick()
    desk.gets(
        desk.update(
            1,
            11,
            rank_state(0, load_number=1, load=m.Load(running=2)),
            rank_state(1, load_number=1, load=m.Load(running=5)),
        )
    )
    assert Counter(desk.pick().rank for _ in range(3)) == {0: 3}, "2 + 3 against 5, not 4 + 3 against 7"


def test_a_full_cache_weighs_more_than_a_short_queue() -> None:
    desk = Desk(
        rank_state(0, load=m.Load(waiting=4, kv_cache_usage=0.99)),
        rank_state(1, load=m.Load(waiting=8, kv_cache_usage=0.1)),
    )
    assert desk.pick().rank == 1


def test_another_life_of_a_rank_begins_without_the_requests_of_the_dead_one() -> None:
    desk = two()
    for _ in range(10):
        desk.pick()
    desk.gets(desk.update(1, 11, rank_state(1, life=1)))
    assert Counter(desk.pick().rank for _ in range(5)) == {1: 5}


def test_in_a_large_group_two_are_drawn_and_the_better_one_taken() -> None:
    desk = Desk(*(rank_state(rank, load=m.Load(waiting=rank)) for rank in range(64)))
    picks = Counter(desk.pick().rank for _ in range(400))
    assert len(picks) > 32, "the best one alone would be everybody's choice"
    assert sum(picks[rank] for rank in range(32)) > 250, "the better half is taken three times out of four"


# --- asking for a start ----------------------------------------------------------------------------------------------

PHASES = {
    Phase.IDLE: True,
    Phase.GATHERING: True,
    Phase.FORMING: True,
    Phase.FAULTED: True,
    Phase.HELD: True,
    Phase.HOLDING: True,
    Phase.STARTING: False,
    Phase.RUNNING: False,
}


@pytest.mark.parametrize("phase, asks", PHASES.items())
def test_a_start_is_asked_for_whenever_no_wave_starts_or_runs(phase: Phase, asks: bool) -> None:
    """Case B01: the request is judged by the wave that it was sent with."""
    desk = two(phase=phase)
    choice, effects = desk.core.pick(desk.now_ms)
    assert choice is not None and choice.wave == 3
    expected = m.FirstRequest(front_end=FRONT_END, deployment="moe", ask=1, wave=3, rank=choice.rank, term=1)
    assert effects == ([Send(expected)] if asks else [])


def test_it_asks_once_for_each_wave_and_again_when_nothing_came_of_it() -> None:
    desk = two()
    asks = [len(asked(desk.core.pick(desk.now_ms)[1])) for _ in range(5)]
    assert asks == [1, 0, 0, 0, 0]
    desk.now_ms += ASK_AGAIN_MS
    assert asked(desk.core.pick(desk.now_ms)[1]) == [m.FirstRequest]

    desk.gets(desk.update(1, 11, wave=4))
    (effect,) = desk.core.pick(desk.now_ms)[1]
    assert isinstance(effect, Send) and isinstance(effect.message, m.FirstRequest)
    assert (effect.message.ask, effect.message.wave) == (3, 4)


def test_a_dense_deployment_is_never_asked() -> None:
    """Case B45."""
    desk = two(kind=m.Kind.DENSE, phase=Phase.SERVING, epoch=0, wave=0)
    assert desk.core.pick(desk.now_ms)[1] == []


def test_a_rejection_is_kept_for_people_and_a_late_welcome_clears_it() -> None:
    desk = two()
    desk.gets(m.Rejected(reason=m.RejectReason.UNKNOWN_DEPLOYMENT, detail="there is no such"))
    assert desk.core.rejected is not None
    desk.gets(m.Attached(deployment="moe", term=1, feed="tcp://feed:1", kind=m.Kind.MOE))
    assert desk.core.rejected is None


def test_it_says_goodbye() -> None:
    assert two().core.leave() == [Send(m.Detach(front_end=FRONT_END))]
