"""Deliberate mistakes in the cores are made and taken back cleanly.

The hunt for all of them takes minutes, so it is a command of its own: `python -I tests/sim/__main__.py mutations`.
"""

import pytest

from wavekeeper.worker_agent.stepper import Stepper

from .mutations import MUTATIONS, Mutation, MutationError, applied
from .scenario import draw, play


def test_a_mutation_is_taken_back() -> None:
    seed = next(seed for seed in range(100) if _fails(seed, MUTATIONS[0]))

    assert not play(draw(seed)).failure


def test_a_mutation_whose_text_is_gone_says_so() -> None:
    lost = Mutation("lost", "its text is not there", Stepper, "finish", "no such text", "")

    with pytest.raises(MutationError, match="stands 0 times"), applied(lost):
        pass


def _fails(seed: int, mutation: Mutation) -> bool:
    with applied(mutation):
        return bool(play(draw(seed)).failure)
