"""Stories of steps inside a wave: numbered from one, each with its exchange, sub-steps included."""

import pytest

from wavekeeper.proto.errors import LocalProtocolError
from wavekeeper.proto.rows import DUMMY, Operation, Position, Row
from wavekeeper.worker_agent.plan import Outcome, Plan
from wavekeeper.worker_agent.stepper import Stepper

from .stories import planned


def forward(step: int, substeps: int = 0, substep: int = 0) -> Plan:
    """A plan of two real ranks."""
    return Plan(
        Outcome.FORWARD, step=step, substep=substep, substeps=substeps, has_work=True, num_tokens_unpadded=(1, 0)
    )


def test_steps_are_numbered_from_one_and_a_wave_s_end_starts_them_again() -> None:
    """Case B08, vllm issue 43547: a step and its exchange are one thing, so nobody can fall behind by one."""
    stepper = Stepper(0)
    stepper.epoch = 3
    positions: list[Position] = []
    for outcomes in ([Outcome.FORWARD, Outcome.NO_FORWARD, Outcome.WAVE_ENDED], [Outcome.WAVE_ENDED]):
        stepper.begin_wave()
        for outcome in outcomes:
            _, position = stepper.begin(DUMMY)
            positions.append(position)
            ended = stepper.finish(Plan(outcome, step=position.step, num_tokens_unpadded=(0,)), 1.0)
            assert ended is (outcome is Outcome.WAVE_ENDED)
    assert [(p.epoch, p.wave, p.step) for p in positions] == [(3, 0, 1), (3, 0, 2), (3, 0, 3), (3, 1, 1)]
    assert stepper.counters().group_operations == stepper.counters().steps == 4
    assert (stepper.counters().waves, stepper.counters().empty_waves, stepper.counters().dummy_steps) == (2, 1, 1)


def test_sub_steps_are_run_by_all_or_the_next_step_is_refused() -> None:
    """Case B11, vllm issue 44185: a rank cannot skip the draft's passes; the header says 40.2."""
    stepper = Stepper(0)
    stepper.begin_wave()
    stepper.begin(Row(num_tokens=1, has_work=True))
    stepper.finish(forward(1, substeps=2), 1.0)
    with pytest.raises(LocalProtocolError, match="2 sub-steps and 0 were run"):
        stepper.begin(DUMMY)

    positions = []
    for substep in (1, 2):
        _, position = stepper.begin_substep(DUMMY)
        positions.append(str(position))
        assert stepper.finish(forward(1, substep=substep), 1.0) is False
    assert positions == ["substep epoch 0 wave 0 step 1.1", "substep epoch 0 wave 0 step 1.2"]
    with pytest.raises(LocalProtocolError, match="all were run"):
        stepper.begin_substep(DUMMY)
    assert stepper.begin(DUMMY)[1].step == 2


def test_a_step_without_sub_steps_refuses_them() -> None:
    stepper = Stepper(0)
    stepper.begin_wave()
    with pytest.raises(LocalProtocolError, match="has 0 sub-steps"):
        stepper.begin_substep(DUMMY)


def test_a_step_that_failed_here_keeps_the_work_that_its_last_row_carried() -> None:
    stepper = Stepper(0)
    stepper.begin_wave()
    stepper.begin(Row(num_tokens=1, has_work=True))
    stepper.finish(planned([Row(num_tokens=1, has_work=True)], Position(Operation.STEP, 0, 0, 1)), 1.0)
    row, _ = stepper.begin_failure(Row(dummy=True, local_error=True))

    assert row.has_work
    stepper.leave()
    assert stepper.has_work, "the group broke before the next row: the work must ask for a wave by itself"


def test_a_failure_between_a_step_and_its_substeps_is_told_in_the_substep_and_ends_them() -> None:
    stepper = Stepper(0)
    stepper.begin_wave()
    row = Row(num_tokens=1, has_work=True, substeps=2)
    stepper.begin(row)
    stepper.finish(planned([row], Position(Operation.STEP, 0, 0, 1)), 1.0)
    failed, position = stepper.begin_failure(Row(dummy=True, local_error=True))
    assert (position.operation, position.substep) == (Operation.SUBSTEP, 1)
    stepper.finish(planned([failed], position), 1.0)

    assert stepper.begin(row)[1] == Position(Operation.STEP, 0, 0, 2)


def test_tokens_are_work_whether_their_owner_says_so_or_not() -> None:
    row = Row(num_tokens=4)
    plan = planned([row, DUMMY], Position(Operation.STEP, 0, 0, 1))

    assert plan.runs_forward and plan.has_work


def test_a_substep_never_ends_a_wave() -> None:
    plan = planned([Row(), DUMMY], Position(Operation.SUBSTEP, 0, 0, 1, 1))

    assert plan.outcome is Outcome.NO_FORWARD and not plan.over
