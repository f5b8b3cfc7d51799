"""Every request ends in exactly one outcome, whatever its rank does."""

import time
from collections import Counter

import pytest

from wavekeeper.worker_agent.demo.replay import Client, Job, Outcome, Replay
from wavekeeper.worker_agent.demo.wire import GenerateRequest, GenerateResult
from wavekeeper.worker_agent.front_end import NoRankUpError
from wavekeeper.worker_agent.front_end_core import Choice

LIMIT_S = 10.0


class GoodRank:
    """Answers at once."""

    def __init__(self) -> None:
        self.closed = False
        self.asked: list[GenerateRequest] = []
        self.answers: list[GenerateResult] = []

    def submit(self, request: GenerateRequest) -> bool:
        self.asked.append(request)
        self.answers.append(GenerateResult(request.id, 0, [7] * request.max_tokens))
        return True

    def receive(self, timeout_ms: int) -> GenerateResult | None:
        if self.answers:
            return self.answers.pop(0)
        time.sleep(timeout_ms / 1000)
        return None

    def close(self) -> None:
        self.closed = True


class FullRank(GoodRank):
    """Takes nothing."""

    def submit(self, request: GenerateRequest) -> bool:
        return False


class SilentRank(GoodRank):
    """Takes everything and answers nothing."""

    def submit(self, request: GenerateRequest) -> bool:
        self.asked.append(request)
        return True


class FailingRank(GoodRank):
    """Answers each request with an error."""

    def submit(self, request: GenerateRequest) -> bool:
        self.answers.append(GenerateResult(request.id, 0, [7], "rank 1 was lost"))
        return True


class BrokenRank(GoodRank):
    """Has a bug of ours."""

    def receive(self, timeout_ms: int) -> GenerateResult | None:
        raise ValueError("junk")


class OneRank:
    """A front-end that knows one rank, or none."""

    def __init__(self, *, up: bool = True) -> None:
        self.in_flight: Counter[int] = Counter()
        self._up = up

    def pick(self) -> Choice:
        if not self._up:
            raise NoRankUpError("no rank of d is up")
        self.in_flight[0] += 1
        return Choice(0, "0123456789abcdef", "tcp://127.0.0.1:1", 0)

    def done(self, choice: Choice) -> None:
        self.in_flight[choice.rank] -= 1


class Deserted(OneRank):
    """Knows no rank for a while: as after a restart of the coordinator."""

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.refusals = refusals

    def pick(self) -> Choice:
        self.refusals -= 1
        if self.refusals >= 0:
            raise NoRankUpError("no rank of d is up")
        return super().pick()


class TwoRanks(OneRank):
    """Knows two ranks and chooses the one with less in flight, first rank 0."""

    def pick(self) -> Choice:
        rank = min((0, 1), key=lambda rank: self.in_flight[rank])
        self.in_flight[rank] += 1
        return Choice(rank, "0123456789abcdef", f"tcp://127.0.0.1:{rank + 1}", 0)


def jobs(*due_s: float) -> list[Job]:
    return [Job(due, "d", GenerateRequest(f"r{number}", [1], 2)) for number, due in enumerate(due_s)]


def replayed(rank: Client, router: OneRank, *due_s: float, deadline_s: float = LIMIT_S) -> tuple[Replay, list[Outcome]]:
    replay = Replay(jobs(*due_s), {"d": router}, connect=lambda endpoint: rank, deadline_s=deadline_s)
    replay.start()
    wait_for_end(replay)
    assert +router.in_flight == Counter(), "every choice was given back"
    return replay, replay.outcomes


def wait_for_end(replay: Replay) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not replay.finished:
        assert time.monotonic() < until_s
        time.sleep(0.002)


def test_every_request_is_answered_once_and_not_before_it_is_due() -> None:
    rank = GoodRank()

    replay, outcomes = replayed(rank, OneRank(), 0.0, 0.0, 0.1)

    assert [(o.request.id, o.tokens, o.error) for o in outcomes] == [(f"r{n}", [7, 7], "") for n in range(3)]
    assert all(o.latency_s is not None and o.latency_s >= 0 for o in outcomes)
    assert replay.elapsed_s >= 0.1
    assert (replay.tallies["d"].sent, replay.tallies["d"].done, replay.tallies["d"].lost) == (3, 3, 0)
    assert rank.closed


@pytest.mark.parametrize(
    ("rank", "error"),
    [
        (FullRank(), "not sent: the rank takes nothing any more"),
        (SilentRank(), "not answered within 0.05 s"),
        (FailingRank(), "rank 1 was lost"),
    ],
    ids=["full", "silent", "failing"],
)
def test_a_rank_that_does_not_serve_loses_its_request_and_the_reason_is_told(rank: GoodRank, error: str) -> None:
    replay, outcomes = replayed(rank, OneRank(), 0.0, deadline_s=0.05)

    assert [o.error for o in outcomes] == [error]
    assert replay.tallies["d"].lost == 1
    assert replay.news() == [f"d: request r0 at rank 0: {error}"]
    assert replay.news() == []


def test_a_request_that_finds_no_rank_waits_for_one() -> None:
    rank = GoodRank()

    _, outcomes = replayed(rank, Deserted(3), 0.0, 0.0)

    assert sorted(o.request.id for o in outcomes if not o.error) == ["r0", "r1"]
    assert len(rank.asked) == 2, "sent once each"
    assert all(o.latency_s is not None and o.latency_s > 0.01 for o in outcomes), "the wait is in the latency"


def test_a_request_that_finds_no_rank_for_too_long_is_lost() -> None:
    replay = Replay(jobs(0.0), {"d": OneRank(up=False)}, connect=lambda endpoint: GoodRank(), route_wait_s=0.05)
    replay.start()
    wait_for_end(replay)

    assert [(o.rank, o.error) for o in replay.outcomes] == [(None, "not sent: no rank of d is up")]
    assert replay.tallies["d"].sent == replay.tallies["d"].lost == 1


def test_what_was_out_to_a_lost_rank_fails_with_it_and_the_rest_goes_elsewhere() -> None:
    ranks = {"tcp://127.0.0.1:1": SilentRank(), "tcp://127.0.0.1:2": GoodRank()}
    router = TwoRanks()
    replay = Replay(jobs(0.0, 0.1, 0.1), {"d": router}, connect=ranks.__getitem__)
    replay.start()
    until_s = time.monotonic() + LIMIT_S
    while not replay.out():
        assert time.monotonic() < until_s
        time.sleep(0.002)

    assert replay.lose_rank("tcp://127.0.0.1:1", "its rank was killed") == 1
    wait_for_end(replay)

    by_id = {o.request.id: (o.rank, o.error, o.with_rank) for o in replay.outcomes}
    assert by_id == {"r0": (0, "its rank was killed", True), "r1": (1, "", False), "r2": (1, "", False)}
    tally = replay.tallies["d"]
    assert (tally.done, tally.lost, tally.failed_with_rank, tally.ended) == (2, 0, 1, 3)
    assert +router.in_flight == Counter(), "every choice was given back, the ones passed over too"


def test_a_request_waits_while_only_lost_ranks_seem_to_be_up() -> None:
    replay = Replay(jobs(0.0), {"d": OneRank()}, connect=lambda endpoint: GoodRank(), route_wait_s=0.05)
    replay.lose_rank("tcp://127.0.0.1:1", "its rank was killed")
    replay.start()
    wait_for_end(replay)

    (outcome,) = replay.outcomes
    assert outcome.error == "not sent: the ranks of d that seem to be up are gone" and not outcome.with_rank


def test_arrivals_do_not_wait_for_answers() -> None:
    rank = SilentRank()
    replay = Replay(jobs(0.0, 0.01, 0.02, 60.0), {"d": OneRank()}, connect=lambda endpoint: rank)
    replay.start()
    until_s = time.monotonic() + LIMIT_S
    while len(rank.asked) < 3:
        assert time.monotonic() < until_s
        time.sleep(0.002)

    replay.stop("the demo was stopped", LIMIT_S)

    assert replay.finished
    assert [o.error for o in replay.outcomes] == ["not answered: the demo was stopped"] * 3
    assert len(rank.asked) == 3, "what was not due was not sent"


def test_an_answer_that_comes_twice_or_too_late_counts_for_nothing() -> None:
    rank = GoodRank()
    rank.answers = [GenerateResult("r0", 0, [1]), GenerateResult("stranger", 0, [1])]

    _, outcomes = replayed(rank, OneRank(), 0.0, 0.05)

    assert [(o.request.id, o.tokens) for o in outcomes] == [("r0", [1]), ("r1", [7, 7])]


def test_a_bug_in_the_thread_reaches_the_caller() -> None:
    replay = Replay(jobs(0.0), {"d": OneRank()}, connect=lambda endpoint: BrokenRank())
    replay.start()
    wait_for_end(replay)

    with pytest.raises(ValueError, match="junk"):
        replay.raise_failure()
