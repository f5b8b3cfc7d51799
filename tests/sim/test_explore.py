"""The explorer: sound cores pass, a planted bug is found with its story, and a state's copy shares nothing with it."""

from .actions import actions, first
from .explore import explore
from .mutations import MUTATIONS, applied
from .system import Budget, key


def test_every_state_of_the_smallest_system_is_visited_and_holds() -> None:
    result = explore(2, Budget(requests=1), 10_000)

    assert not result.fails, result.told()
    assert result.complete
    assert result.states > 1_000


def test_a_planted_bug_is_found_with_the_story_that_leads_there() -> None:
    planted = next(each for each in MUTATIONS if each.name == "running on sending")

    with applied(planted):
        result = explore(2, Budget(requests=1), 10_000)

    assert result.broken is not None
    problem, story = result.broken
    assert "has not begun it" in problem
    assert story[0].startswith("request to rank")


def test_work_that_cannot_finish_is_found_with_the_story_that_leads_there() -> None:
    planted = next(each for each in MUTATIONS if each.name == "nothing is sent again")

    with applied(planted):
        result = explore(2, Budget(requests=1, lost=1), 10_000)

    assert result.stuck is not None
    assert any(scene.startswith("lose") for scene in result.stuck)


def test_an_action_on_a_copy_leaves_the_state_as_it_was() -> None:
    state = first(2, Budget(requests=1, lost=1, doubled=1, restarts=1, deaths=1))
    for _ in range(12):
        for name, action in actions(state):
            before = key(state)
            copy = state.clone()
            action(copy)
            state.keys.clear()
            assert key(state) == before, name
        copy = state.clone()
        list(actions(copy))[-1][1](copy)
        state = copy
