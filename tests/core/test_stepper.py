"""Stories of steps inside a wave: numbered from one, each with its exchange, sub-steps included."""

import pytest

from wavekeeper.proto.errors import LocalProtocolError
from wavekeeper.proto.rows import DUMMY, Position, Row
from wavekeeper.worker_agent.plan import Outcome, Plan, Role
from wavekeeper.worker_agent.stepper import Stepper


def forward(step: int, substeps: int = 0, substep: int = 0) -> Plan:
    """A plan of two real ranks."""
    return Plan(
        Outcome.FORWARD, step=step, substep=substep, substeps=substeps, has_work=True, roles=(Role.REAL, Role.DUMMY)
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
            ended = stepper.finish(Plan(outcome, step=position.step, roles=(Role.DUMMY,)), 1.0)
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
