"""Stories of one rank: it applies commands in order, says where it stands, asks and never starts by itself."""

from random import Random
from typing import Any

import pytest

from wavekeeper.proto import messages as m
from wavekeeper.proto.messages import Mode
from wavekeeper.proto.rows import DUMMY, Operation, Position, Row
from wavekeeper.worker_agent.core import RankCore
from wavekeeper.worker_agent.events import (
    Build,
    BuildFailed,
    Built,
    Closing,
    Effect,
    Identity,
    Interrupt,
    LoadChanged,
    LostRank,
    Received,
    Send,
    Tick,
    Wake,
)
from wavekeeper.worker_agent.plan import Plan

from .stories import TIMING, picture, planned, wire

ME = "00000000000000aa"
TO_ME: dict[str, Any] = {"deployment": "moe", "rank": 0, "incarnation": ME}
MEMBERS = [m.Member(0, ME, "one"), m.Member(1, "00000000000000bb", "one")]


class One:
    """One rank core of two, and a clock."""

    def __init__(self, kind: m.Kind = m.Kind.MOE) -> None:
        self.now_ms = 1_000
        self.core = RankCore(Identity("moe", 0, ME, kind, 2), Random(0), self.now_ms)
        self.out: list[Effect] = []
        self.core.handle(Tick(), self.now_ms)

    def gets(self, kind: type[m.ToRank], **fields: Any) -> list[Effect]:
        """The coordinator says something (term 1, unless said otherwise)."""
        message = kind(**{"term": 1, **TO_ME, **fields})
        return self.core.handle(Received(wire(message)), self.now_ms)

    def welcomed(self, **fields: Any) -> "One":
        """Registered."""
        place = {"seq": 0, "epoch": 0, "wave": 0, "phase": m.Phase.GATHERING}
        self.gets(m.Welcome, **{"answers": self.core._number, "timing": TIMING, "boot": "b", **place, **fields})
        return self

    def formed(self, wave: int = 5) -> "One":
        """Registered and formed, idle: epoch 1, command 1 applied."""
        self.welcomed()
        self.gets(m.Form, epoch=1, seq=1, group="g", exchange="shm", wave=wave, members=MEMBERS)
        self.core.handle(Built("g", "shm", 0), self.now_ms)
        assert self.core.mode is Mode.IDLE
        return self

    def running(self) -> "One":
        """In wave 5 by command 2."""
        self.formed()
        self.gets(m.Start, epoch=1, seq=2, wave=5)
        assert self.core.mode is Mode.RUNNING
        return self

    def step(self, row: Row = DUMMY, other: Row = DUMMY) -> tuple[Plan, list[Effect]]:
        """One exchange with rank 1."""
        mine, position = self.core.begin(row)
        plan = planned([mine, other], position)
        return plan, self.core.finish(plan, 1.0)


def said(effects: list[Effect]) -> list[type[m.Message]]:
    """Types of the messages among effects."""
    return [type(effect.message) for effect in effects if isinstance(effect, Send)]


def state(one: One) -> object:
    """Everything but counters and the time when the coordinator was last heard."""
    found = picture(one.core)
    assert isinstance(found, dict)
    return {key: value for key, value in found.items() if key not in ("heard_ms", "_out", "_heartbeat_ms", "_number")}


# --- commands --------------------------------------------------------------------------------------------------------


def test_commands_are_applied_in_the_order_of_their_numbers_whatever_order_they_come_in() -> None:
    one = One().welcomed()
    assert said(one.gets(m.Start, epoch=1, seq=2, wave=5)) == []
    assert (one.core.applied, one.core.mode) == (0, Mode.JOINING)

    effects = one.gets(m.Form, epoch=1, seq=1, group="g", exchange="shm", wave=5, members=MEMBERS)
    assert [type(e) for e in effects if isinstance(e, Build | Interrupt)] == [Interrupt, Build]
    assert (one.core.applied, one.core.mode) == (1, Mode.FORMING)
    effects = one.core.handle(Built("g", "shm", 0), one.now_ms)
    assert said(effects) == [m.Formed, m.Started]
    assert one.core.at() == m.At(mode=Mode.RUNNING, term=1, epoch=1, applied=2, wave=5)


def test_a_command_that_comes_again_is_dropped_and_the_place_is_said_again() -> None:
    one = One().running()
    before = state(one)
    effects = one.gets(m.Start, epoch=1, seq=2, wave=5)

    assert said(effects) == [m.Heartbeat] and state(one) == before
    assert one.core.dropped == {"repeated": 1}


def test_a_rank_that_reads_the_last_exchange_keeps_the_start_of_the_next_wave() -> None:
    """DESIGN.md section 5: dropping it there loses the wave."""
    one = One().running()
    row, position = one.core.begin(DUMMY)
    assert said(one.gets(m.Start, epoch=1, seq=3, wave=6)) == []
    assert one.core.at().applied == 2, "what is kept is not acknowledged"

    plan = planned([row, DUMMY], position)
    effects = one.core.finish(plan, 1.0)
    assert said(effects) == [m.WaveComplete, m.Started]
    assert one.core.at() == m.At(mode=Mode.RUNNING, term=1, epoch=1, applied=3, wave=6)


def test_a_fault_makes_a_start_that_is_kept_void() -> None:
    one = One().running()
    one.core.begin(DUMMY)
    one.gets(m.Start, epoch=1, seq=3, wave=6)
    effects = one.gets(m.Fault, epoch=1, seq=4, lost=1, reason="dead")

    assert one.core.applied == 4
    assert [effect for effect in effects if isinstance(effect, Interrupt)]
    assert one.core.at().mode is Mode.RUNNING, "the engine is still inside: it is halted when it has left"
    lost, effects = one.core.leave_for_fault()
    assert lost == LostRank(1, 5, 1, "dead")
    assert said(effects) == [m.Halted] and one.core.mode is Mode.HALTED
    assert one.core.leave_for_fault() == (None, []), "the engine is told once"


def test_a_start_of_a_wave_that_is_over_moves_nobody_and_is_acknowledged() -> None:
    """A new coordinator repeats the start of the wave that it found running."""
    one = One().running()
    one.step()
    effects = one.gets(m.Start, epoch=1, seq=3, wave=5)

    assert said(effects) == [m.Heartbeat], "not `started`: it has not"
    assert one.core.at() == m.At(mode=Mode.IDLE, term=1, epoch=1, applied=3, wave=6)


def test_a_form_while_a_wave_runs_is_a_fault_and_a_form_in_one() -> None:
    one = One().running()
    one.core.begin(Row(num_tokens=1, has_work=True))
    effects = one.gets(m.Form, epoch=2, seq=3, group="h", exchange="shm", wave=6, members=MEMBERS)
    assert not [e for e in effects if isinstance(e, Build)], "the engine must be out of the old exchange first"

    lost, effects = one.core.leave_for_fault()
    assert lost is not None and lost.rank is None and "epoch 2" in lost.reason
    assert said(effects) == [m.Halted] and [e for e in effects if isinstance(e, Build)]
    assert (one.core.mode, one.core.stepper.epoch, one.core.stepper.wave) == (Mode.FORMING, 2, 6)
    assert one.core.at().has_work, "what it holds is still to be done"


def test_an_exchange_of_an_epoch_that_is_over_is_not_taken() -> None:
    one = One().welcomed()
    one.gets(m.Form, epoch=1, seq=1, group="g", exchange="shm", wave=0, members=MEMBERS)
    one.gets(m.Form, epoch=2, seq=2, group="h", exchange="shm", wave=0, members=MEMBERS)
    before = state(one)
    effects = one.core.handle(Built("g", "shm", 0), one.now_ms)

    assert said(effects) == [] and state(one) == before and one.core.dropped == {"late_build": 1}
    assert said(one.core.handle(BuildFailed("g", "late"), one.now_ms)) == []
    assert said(one.core.handle(BuildFailed("h", "no shm"), one.now_ms)) == [m.FormFailed]
    assert "no shm" in one.core.waits_for(one.now_ms)


# --- terms and identity ----------------------------------------------------------------------------------------------


def test_a_lower_term_is_void() -> None:
    one = One().welcomed(term=7).welcomed(term=7)
    before = state(one)
    for kind, fields in (
        (m.Start, {"epoch": 1, "seq": 1, "wave": 0}),
        (m.Pulse, {"seq": 9}),
        (m.Fault, {"epoch": 1, "seq": 1, "lost": 0, "reason": ""}),
    ):
        assert said(one.gets(kind, term=6, **fields)) == []
    assert state(one) == before and one.core.dropped == {"stale_term": 3}


def test_a_coordinator_behind_our_term_is_told_by_our_registration() -> None:
    one = One().welcomed(term=7)
    effects = one.gets(m.RegisterAgain, term=6)
    assert [type(e.message) for e in effects if isinstance(e, Send)] == [m.Register]
    assert one.core.term == 7


@pytest.mark.parametrize("kind, fields", [(m.Pulse, {"seq": 3}), (m.Start, {"epoch": 1, "seq": 1, "wave": 0})])
def test_a_higher_term_is_obeyed_after_a_new_registration_only(kind: type[m.ToRank], fields: dict[str, Any]) -> None:
    one = One().formed()
    effects = one.gets(kind, term=2, **fields)
    (register,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, m.Register)]
    assert (register.group, register.at.epoch, register.at.wave, register.at.term) == ("g", 1, 5, 1)
    assert one.core.mode is Mode.IDLE

    one.welcomed(term=2, seq=0)
    assert one.core.at().applied == 0, "what was acknowledged in the old term counts for nothing in this one"


@pytest.mark.parametrize("sent_before", [1, 2])
def test_a_welcome_to_a_registration_of_the_past_is_answered_by_one_of_now(sent_before: int) -> None:
    """A late copy of an old registration came to a new coordinator first: it must not be taken for the present."""
    one = One().formed()  # its registration had number 1: joining, of no group
    if sent_before == 2:
        one.gets(m.RegisterAgain, term=2)  # the present one is on its way as well
    one.welcomed(term=2, answers=1)
    assert (one.core.term, one.core.registered) == (1, False)
    one.now_ms += 300
    (register,) = [e.message for e in one.core.handle(Tick(), one.now_ms) if isinstance(e, Send)]
    assert isinstance(register, m.Register) and register.group == "g"

    one.welcomed(term=2, answers=register.number)
    assert (one.core.term, one.core.registered) == (2, True)


def test_a_registered_rank_says_anew_where_it_stands_before_it_obeys_a_new_term() -> None:
    """A coordinator of an old term may have commanded something since the registration that the new one has heard."""
    one = One().formed()
    effects = one.gets(m.RegisterAgain)
    (register,) = [e.message for e in effects if isinstance(e, Send)]
    one.welcomed(answers=register.number)
    one.welcomed(term=2, answers=register.number)

    assert (one.core.term, one.core.registered) == (1, False)


def test_a_group_that_stands_while_nobody_leads_is_named_in_a_new_registration() -> None:
    one = One().welcomed()
    one.gets(m.Form, epoch=1, seq=1, group="g", exchange="shm", wave=5, members=MEMBERS)
    (before,) = [e.message for e in one.gets(m.RegisterAgain, term=2) if isinstance(e, Send)]
    effects = one.core.handle(Built("g", "shm", 0), one.now_ms)
    assert isinstance(before, m.Register) and before.group == ""
    one.welcomed(term=2, answers=before.number)

    assert not one.core.registered
    (register,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, m.Register)]
    one.welcomed(term=2, answers=register.number)
    assert one.core.registered and register.group == "g"


@pytest.mark.parametrize("form", [{"epoch": 1, "wave": 5}, {"epoch": 0, "wave": 5}, {"epoch": 2, "wave": 4}])
def test_a_group_that_would_take_this_rank_back_is_not_formed(form: dict[str, int]) -> None:
    """Invariant 3, from the rank's side: epoch and wave never go back, whoever commands it."""
    one = One().formed()
    effects = one.gets(m.Form, seq=2, group="h", exchange="shm", members=MEMBERS, **form)

    assert not any(isinstance(effect, Build | Interrupt) for effect in effects)
    (beat,) = [e.message for e in effects if isinstance(e, Send)]
    assert (beat.at.mode, beat.at.epoch, beat.at.wave, beat.at.applied) == (Mode.IDLE, 1, 5, 2)
    assert one.core.dropped == {"stale_form": 1}


def test_commands_of_an_old_term_that_were_kept_are_void_in_a_new_one() -> None:
    one = One().running()
    one.core.begin(DUMMY)
    one.gets(m.Start, epoch=1, seq=3, wave=6)  # kept: wave 5 has not ended here
    one.gets(m.RegisterAgain, term=2)
    one.welcomed(term=2, seq=2)
    plan = planned([DUMMY, DUMMY], Position(Operation.STEP, 1, 5, 1))
    effects = one.core.finish(plan, 1.0)

    assert said(effects) == [m.WaveComplete]
    assert one.core.at() == m.At(mode=Mode.IDLE, term=2, epoch=1, applied=2, wave=6)


def test_what_is_meant_for_another_life_of_this_rank_is_not_obeyed() -> None:
    """Case B36 from the rank's side."""
    one = One().formed()
    before = state(one)
    assert said(one.gets(m.Start, epoch=1, seq=2, wave=5, incarnation="00000000000000cc")) == []
    assert state(one) == before and one.core.dropped == {"misdirected": 1}


def test_a_final_refusal_is_kept_with_its_reason_and_a_passing_one_is_tried_again() -> None:
    for reason, retry in ((m.RefusalReason.SETTINGS_MISMATCH, False), (m.RefusalReason.DUPLICATE_RANK, True)):
        one = One()
        one.gets(m.Refused, reason=reason, detail="because", retry=retry)
        assert one.core.refused is not None and "because" in one.core.waits_for(one.now_ms)
        one.now_ms += 5_000
        assert said(one.core.handle(Tick(), one.now_ms)) == ([m.Register] if retry else [])


# --- work ------------------------------------------------------------------------------------------------------------


def test_a_rank_with_work_asks_once_and_every_heartbeat_asks_again() -> None:
    one = One().formed()
    assert said(one.core.work_arrived()) == [m.NeedWave]
    assert said(one.core.work_arrived()) == []
    assert one.core.mode is Mode.IDLE and not one.core.must_step, "it never starts by itself"

    one.now_ms += TIMING.heartbeat_ms
    (beat,) = [e.message for e in one.core.handle(Tick(), one.now_ms) if isinstance(e, Send)]
    assert isinstance(beat, m.Heartbeat) and beat.at.has_work


def test_a_request_that_arrives_after_the_row_was_written_asks_for_the_next_wave() -> None:
    """DESIGN.md section 5, and case B01."""
    one = One().running()
    row, position = one.core.begin(DUMMY)
    assert said(one.core.work_arrived()) == []
    effects = one.core.finish(planned([row, DUMMY], position), 1.0)

    assert said(effects) == [m.WaveComplete, m.NeedWave]
    assert one.core.at() == m.At(mode=Mode.IDLE, term=1, epoch=1, applied=2, wave=6, has_work=True)


def test_work_that_was_announced_before_the_row_is_carried_by_it_even_if_the_engine_has_not_seen_it() -> None:
    one = One().running()
    one.core.work_arrived()
    row, _ = one.core.begin(DUMMY)
    assert row.has_work and row.dummy


def test_work_in_a_group_that_is_not_formed_asks_when_it_is() -> None:
    one = One().welcomed()
    assert said(one.core.work_arrived()) == []
    one.gets(m.Form, epoch=1, seq=1, group="g", exchange="shm", wave=0, members=MEMBERS)
    (formed,) = [e.message for e in one.core.handle(Built("g", "shm", 0), 0) if isinstance(e, Send)]
    assert isinstance(formed, m.Formed) and formed.at.has_work


def test_an_independent_rank_says_nothing_about_waves() -> None:
    """Case B45 from the rank's side."""
    one = One(m.Kind.DENSE).welcomed(phase=m.Phase.SERVING)
    assert said(one.core.work_arrived()) == [] and one.core.must_step
    one.core.stepper.alone(Row(num_tokens=1, has_work=True))
    assert one.core.must_step
    one.core.stepper.alone(DUMMY)
    assert not one.core.must_step
    counters = one.core.stepper.counters()
    assert (counters.group_operations, counters.wave_messages, counters.waves, counters.steps) == (0, 0, 0, 2)


# --- failures --------------------------------------------------------------------------------------------------------


def test_an_exchange_that_fails_halts_the_rank_and_names_whom_it_blames() -> None:
    one = One().running()
    one.core.begin(DUMMY)
    effects = one.core.fail("rank 1 did not arrive", 1)
    (halted,) = [e.message for e in effects if isinstance(e, Send)]

    assert halted == m.Halted(
        **TO_ME, number=one.core._number, at=one.core.at(), reason="rank 1 did not arrive", lost=1
    )
    assert one.core.mode is Mode.HALTED and not one.core.must_step
    assert not one.core.group, "a new coordinator must not adopt what is broken"


def test_a_fault_of_an_idle_rank_halts_it_at_once() -> None:
    one = One().formed()
    assert said(one.gets(m.Fault, epoch=1, seq=2, lost=1, reason="dead")) == [m.Halted]
    assert one.core.mode is Mode.HALTED


def test_a_rank_that_comes_back_to_a_group_without_it_leaves_its_step_and_is_a_spare() -> None:
    """Found by seed 1179 of the simulator: cut off while an operator went on without it, it waited for ever."""
    one = One().running()
    one.core.begin(DUMMY)
    one.gets(m.RegisterAgain)
    effects = one.welcomed(seq=7, epoch=2, phase=m.Phase.IDLE, spare=True).core._flush()
    assert one.core.mode is Mode.RUNNING and not effects, "the engine is still in its step"

    lost, effects = one.core.leave_for_fault()
    assert lost is not None and lost.reason == "epoch 2 was formed without this rank"
    assert said(effects) == [m.Halted]
    assert (one.core.mode, one.core.group, one.core.group_ranks) == (Mode.JOINING, "", ())
    assert one.core.at().applied == 7


def test_a_fault_of_an_epoch_below_ours_is_a_fault_all_the_same() -> None:
    """A new coordinator that faults what it has found knows less than a rank which was told to form a last time."""
    one = One().formed()
    one.gets(m.RegisterAgain, term=2)
    one.welcomed(term=2, seq=0)
    assert said(one.gets(m.Fault, term=2, epoch=0, seq=1, lost=1, reason="did not come back")) == [m.Halted]


def test_a_fault_that_meets_a_rank_outside_is_acknowledged() -> None:
    one = One().welcomed()
    effects = one.gets(m.Fault, epoch=1, seq=1, lost=1, reason="dead")
    (beat,) = [e.message for e in effects if isinstance(e, Send)]
    assert isinstance(beat, m.Heartbeat) and beat.at.applied == 1 and one.core.mode is Mode.JOINING


def test_an_exchange_that_completes_although_a_fault_came_ends_in_the_fault_all_the_same() -> None:
    one = One().running()
    row, position = one.core.begin(DUMMY)
    one.gets(m.Fault, epoch=1, seq=3, lost=1, reason="dead")
    one.core.finish(planned([row, DUMMY], position), 1.0)
    assert not one.core.must_step

    lost, effects = one.core.leave_for_fault()
    assert lost is not None and lost.rank == 1 and said(effects) == [m.Halted]


def test_an_engine_that_stops_says_so_and_is_silent_afterwards() -> None:
    one = One().formed()
    effects = one.core.handle(Closing("done"), one.now_ms)
    assert said(effects) == [m.Leave] and any(isinstance(effect, Wake) for effect in effects)
    one.now_ms += 10_000
    assert said(one.core.handle(Tick(), one.now_ms)) == []
    assert said(one.gets(m.RegisterAgain)) == []


def test_a_load_is_sent_when_it_changes_and_not_more_often_than_the_interval() -> None:
    one = One().welcomed()
    sent: list[tuple[int, int]] = []
    for number in range(1, 101):
        one.now_ms += 5
        effects = one.core.handle(LoadChanged(m.Load(running=min(number, 60))), one.now_ms)
        loads = [e.message.load for e in effects if isinstance(e, Send) and isinstance(e.message, m.LoadReport)]
        sent += [(number, load.running) for load in loads]
    assert sent == [(10, 10), (20, 20), (30, 30), (40, 40), (50, 50), (60, 60)], (
        "every 50 ms, and none without a change"
    )
