"""A step in two halves: the row is sent, the engine works on, and the plan is taken when it is needed."""

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from wavekeeper.proto.errors import LocalProtocolError
from wavekeeper.proto.messages import Kind
from wavekeeper.proto.rows import DUMMY, Row
from wavekeeper.worker_agent import Outcome, RankAgent
from wavekeeper.worker_agent.errors import RankFailedError, StepSkippedError

LIMIT_S = 20.0


class Pair:
    """Two ranks without a coordinator, each on a thread of its own."""

    def __init__(self) -> None:
        name = f"halves-{secrets.token_hex(4)}"
        self.pool = ThreadPoolExecutor(2)
        self.agents: list[RankAgent] = self.both(
            lambda rank: RankAgent.offline(
                deployment=name, rank=rank, dp_size=2, kind=Kind.MOE, step_deadline_s=LIMIT_S
            )
        )

    def both(self, do: Callable[[int], Any]) -> list[Any]:
        """What both ranks make of it; an error is returned like a result."""

        def caught(rank: int) -> Any:
            try:
                return do(rank)
            except Exception as error:
                return error

        return [future.result(LIMIT_S) for future in [self.pool.submit(caught, rank) for rank in (0, 1)]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for agent in pair.agents:
        agent.close()
    pair.pool.shutdown()


def test_the_two_halves_give_the_plan_of_a_whole_step_and_the_other_rank_need_not_know(pair: Pair) -> None:
    def one(rank: int) -> Any:
        with pair.agents[rank].turn() as turn:
            if rank == 0:
                turn.begin(Row(num_tokens=5, has_work=True))
                return turn.end()
            return turn.step(DUMMY)

    plans = pair.both(one)
    assert plans[0] == plans[1]
    assert plans[0].outcome is Outcome.FORWARD and plans[0].num_tokens_unpadded == (5, 0)
    assert pair.agents[0].counters.group_operations == 1


def test_a_turn_that_is_left_between_its_halves_is_an_error_here_and_the_group_stays_in_step(pair: Pair) -> None:
    def forgets(rank: int) -> Any:
        with pair.agents[rank].turn() as turn:
            if rank == 0:
                turn.begin(Row(num_tokens=5, has_work=True))
                return None
            return turn.step(DUMMY)

    error, plan = pair.both(forgets)
    assert isinstance(error, StepSkippedError) and "between begin() and end()" in str(error)
    assert plan.outcome is Outcome.FORWARD
    whole = pair.both(lambda rank: pair.agents[rank].step(Row(num_tokens=1, has_work=True)))
    assert whole[0] == whole[1] and whole[0].step == 2


def test_an_error_between_the_halves_leaves_the_turn_as_it_is_and_the_group_stays_in_step(pair: Pair) -> None:
    def breaks(rank: int) -> Any:
        with pair.agents[rank].turn() as turn:
            turn.begin(Row(num_tokens=5, has_work=True))
            if rank == 0:
                raise KeyError("the engine's own")
            return turn.end()

    error, plan = pair.both(breaks)
    assert isinstance(error, KeyError) and plan.outcome is Outcome.FORWARD
    assert [plan.step for plan in pair.both(lambda rank: pair.agents[rank].step(DUMMY))] == [2, 2]


def test_halves_come_in_pairs(pair: Pair) -> None:
    with pytest.raises(LocalProtocolError, match="has not begun a step"):
        pair.agents[0].end_step()

    def twice(rank: int) -> Any:
        pair.agents[rank].begin_step(DUMMY)
        try:
            pair.agents[rank].begin_step(DUMMY)
        except LocalProtocolError as error:
            return error, pair.agents[rank].end_step().step
        return None

    for error, step in pair.both(twice):
        assert "has begun a step and not ended it" in str(error) and step == 1


def test_a_row_that_is_not_allowed_is_refused_when_the_step_ends(pair: Pair) -> None:
    """The others must not wait for it: they have got a row that says that this rank failed."""

    def wrong(rank: int) -> Any:
        pair.agents[rank].begin_step(Row(num_tokens=-1) if rank == 0 else DUMMY)
        return pair.agents[rank].end_step()

    mine, other = pair.both(wrong)
    assert isinstance(mine, LocalProtocolError) and "num_tokens" in str(mine)
    assert isinstance(other, RankFailedError) and other.ranks == (0,)


def test_an_independent_rank_has_halves_as_well() -> None:
    agent = RankAgent.offline(deployment="alone", rank=0, dp_size=2, kind=Kind.DENSE)
    agent.begin_step(Row(num_tokens=3, has_work=True))
    assert agent.end_step().num_tokens_across_dp == (3,)
    agent.close()
