"""Deliberate mistakes in the cores are caught, and taken back cleanly.

Here are those that are caught in seconds; `make mutate` hunts for all of them, and CI runs it.
"""

import pytest

from wavekeeper.worker_agent.stepper import Stepper

from .mutations import MUTATIONS, Mutation, MutationError, applied, hunt
from .scenario import draw, play

SOON = (
    "running without acknowledgements",
    "running on sending",
    "whoever asked is left out",
    "a late message rewinds the wave",
    "an early start is dropped",
    "work asks once only",
)
"""Caught by the first few seeds."""


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.story or m.name in SOON], ids=lambda each: each.name)
def test_a_mistake_is_caught(mutation: Mutation) -> None:
    if mutation.story is not None:
        assert not play(mutation.story).failure, "without the mistake it goes well"

    assert hunt(mutation).by


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
