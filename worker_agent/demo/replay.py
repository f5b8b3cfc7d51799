"""Sends the requests of a trace at their times and collects the answers: what an API server would do, in one thread.

The law of this file: arrivals do not wait for answers (open loop), and each request ends in exactly one `Outcome`:
answered, failed, or given up at its deadline. Nothing is sent twice; what finds no rank up waits for one, as it would
at an API server while the ranks come back to a new coordinator.

A latency is measured from the moment at which a request is due to the moment at which this thread takes the answer; it
looks at all ranks that owe one in turn, so a latency is too long by up to `LOOK_MS` times their number.
"""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from ..errors import AgentError
from ..front_end import NoRankUpError
from ..front_end_core import Choice
from .trace import Arrival, scaled
from .wire import GenerateRequest, GenerateResult, RankClient

LOOK_MS = 2
IDLE_S_MAX = 0.05
"""Longest sleep while nothing is out: how fast a stop is seen."""

REQUEST_DEADLINE_S = 60.0
"""A request without an answer for so long is lost. Far above any latency of a machine that only is slow."""

ROUTE_WAIT_S = 30.0
"""A request that finds no rank up for so long is lost."""
CHOICES_MAX = 16
"""Choices that may fall on ranks which are known to be gone before a request waits instead."""


class Router(Protocol):
    """What a replay needs of a `FrontEnd`; it says there what may be raised."""

    def pick(self) -> Choice:
        """Choose a rank for one request."""
        ...

    def done(self, choice: Choice) -> None:
        """The request of this choice is over."""
        ...


class Client(Protocol):
    """What a replay needs of a `RankClient`."""

    def submit(self, request: GenerateRequest) -> bool:
        """Send a request; False if the rank takes nothing any more."""
        ...

    def receive(self, timeout_ms: int) -> GenerateResult | None:
        """Return the next result, or None if none comes in time."""
        ...

    def close(self) -> None:
        """Close at once."""
        ...


class Job(msgspec.Struct, frozen=True):
    """One request to send to `deployment`, `due_s` after the replay has begun."""

    due_s: float
    deployment: str
    request: GenerateRequest


class Outcome(msgspec.Struct, frozen=True):
    """How one request ended. Without `error` the tokens are its whole output."""

    deployment: str
    request: GenerateRequest
    rank: int | None
    """Where it was sent; None if it could not be."""
    latency_s: float | None
    """None: no answer came."""
    tokens: list[int]
    error: str = ""
    with_rank: bool = False
    """It failed with its rank, which `Replay.lose_rank` has told to be gone."""


class Tally(msgspec.Struct):
    """Counts of one deployment, for display. Written by the replay's thread alone."""

    total: int = 0
    sent: int = 0
    done: int = 0
    lost: int = 0
    failed_with_rank: int = 0

    @property
    def ended(self) -> int:
        """All that are over, however."""
        return self.done + self.lost + self.failed_with_rank


class _Out(msgspec.Struct, frozen=True):
    """A request that has not been answered yet."""

    job: Job
    choice: Choice
    due_s: float
    """Monotonic."""


def schedule(arrivals: Sequence[Arrival], deployments: Sequence[str], speed: float) -> list[Job]:
    """Return the jobs of a trace: deployments take turns, times are divided by `speed`, token counts scaled.

    A prompt's bytes follow from the request's number, so every run asks the same.
    """
    jobs = []
    for number, arrival in enumerate(arrivals):
        prompt_tokens, max_tokens = scaled(arrival)
        prompt = hashlib.shake_128(f"wavekeeper demo request {number}".encode()).digest(prompt_tokens)
        request = GenerateRequest(f"r{number}", list(prompt), max_tokens)
        jobs.append(Job(arrival.offset_s / speed, deployments[number % len(deployments)], request))
    return jobs


class Replay:
    """One replay. `start` begins its thread; `tallies` may be read meanwhile, `outcomes` once `finished`.

    Args:
        jobs: In order of `due_s`.
        routers: One for each deployment that the jobs name.
        connect: How to reach the rank at an address; called in the replay's thread.
        deadline_s: Longest wait for one answer.
        route_wait_s: Longest wait for a rank that is up.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        routers: Mapping[str, Router],
        *,
        connect: Callable[[str], Client] = RankClient,
        deadline_s: float = REQUEST_DEADLINE_S,
        route_wait_s: float = ROUTE_WAIT_S,
    ) -> None:
        self.tallies = {name: Tally() for name in routers}
        for job in jobs:
            self.tallies[job.deployment].total += 1
        self.outcomes: list[Outcome] = []
        self.elapsed_s = 0.0
        """From the first request until all have ended."""
        self._jobs = deque(jobs)
        self._routers = routers
        self._connect = connect
        self._deadline_s = deadline_s
        self._route_wait_s = route_wait_s
        self._due: deque[tuple[Job, float]] = deque()
        """Requests that wait for a rank, and since when."""
        self._gone: dict[str, str] = {}
        """Why the ranks at these addresses answer no more."""
        self._clients: dict[str, Client] = {}
        self._out: dict[str, _Out] = {}
        self._news: deque[str] = deque()
        self._stop_reason = ""
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="demo-replay", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    @property
    def finished(self) -> bool:
        """Whether every request has ended."""
        return not self._thread.is_alive()

    def out(self) -> list[tuple[str, Choice]]:
        """Deployment and rank of every request that is out now."""
        return [(out.job.deployment, out.choice) for out in list(self._out.values())]

    def lose_rank(self, serve: str, reason: str) -> int:
        """The rank at this address is gone: nothing more goes there, and what is out to it ends soon, for this reason
        and not as lost. Returns how many that were.
        """
        out = sum(choice.serve == serve for _, choice in self.out())
        self._gone[serve] = reason
        return out

    def news(self) -> list[str]:
        """Return what has failed since the last call, one line each."""
        lines = []
        while self._news:
            lines.append(self._news.popleft())
        return lines

    def stop(self, reason: str, timeout_s: float) -> None:
        """Send nothing more and give up what is out, as lost for this reason. Waits for the thread; may be called
        twice.
        """
        self._stop_reason = reason
        self._thread.join(timeout_s)

    def raise_failure(self) -> None:
        """Raise what ended the replay before its end, if anything did: a bug of ours."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        began_s = time.monotonic()
        try:
            while (self._jobs or self._due or self._out) and not self._stop_reason:
                self._send_due(time.monotonic() - began_s)
                self._receive(began_s)
                self._give_up_gone()
                self._give_up_overdue()
            for id in list(self._out):
                self._end(id, None, f"not answered: {self._stop_reason}")
            for job, _ in self._due:
                self._note(_unsent(job, self._stop_reason))
        except Exception as error:
            self._failure = error
        finally:
            self.elapsed_s = time.monotonic() - began_s
            for client in self._clients.values():
                client.close()

    def _send_due(self, now_s: float) -> None:
        while self._jobs and self._jobs[0].due_s <= now_s:
            job = self._jobs.popleft()
            self.tallies[job.deployment].sent += 1
            self._due.append((job, time.monotonic()))
        for _ in range(len(self._due)):
            job, due_s = self._due.popleft()
            if not self._send(job, due_s):
                self._due.append((job, due_s))

    def _send(self, job: Job, due_s: float) -> bool:
        """Send it, or note why it never will be; False if it has to wait for a rank."""
        try:
            choice = self._choose(job.deployment)
        except NoRankUpError as error:
            if time.monotonic() - due_s < self._route_wait_s:
                return False
            self._note(_unsent(job, str(error)))
            return True
        except AgentError as error:
            self._note(_unsent(job, str(error)))
            return True
        if choice.serve not in self._clients:
            self._clients[choice.serve] = self._connect(choice.serve)
        self._out[job.request.id] = _Out(job, choice, due_s)
        if not self._clients[choice.serve].submit(job.request):
            self._end(job.request.id, None, "not sent: the rank takes nothing any more")
        return True

    def _choose(self, deployment: str) -> Choice:
        """A rank that is not known to be gone; the coordinator may learn of that later than its front-ends."""
        router = self._routers[deployment]
        passed_over: list[Choice] = []
        try:
            while len(passed_over) < CHOICES_MAX:
                choice = router.pick()
                if choice.serve not in self._gone:
                    return choice
                passed_over.append(choice)  # given back later: counted as in flight, it is not the best again
        finally:
            for choice in passed_over:
                router.done(choice)
        raise NoRankUpError(f"the ranks of {deployment} that seem to be up are gone")

    def _receive(self, began_s: float) -> None:
        """Take all answers that are there; if there is none, wait a little for one."""
        owing = {out.choice.serve for out in self._out.values()}
        results = [result for serve in owing for result in self._drain(self._clients[serve])]
        if not results and owing:
            # One look at each: whoever answers first is at most the others' looks late.
            waited = (self._clients[serve].receive(LOOK_MS) for serve in owing)
            results = [result for result in waited if result is not None]
        for result in results:
            self._end(result.id, result, result.error)
        if not owing and (self._jobs or self._due):
            left_s = began_s + self._jobs[0].due_s - time.monotonic() if self._jobs else IDLE_S_MAX
            time.sleep(max(0.0, min(left_s, IDLE_S_MAX)))

    @staticmethod
    def _drain(client: Client) -> list[GenerateResult]:
        results = []
        while (result := client.receive(0)) is not None:
            results.append(result)
        return results

    def _give_up_gone(self) -> None:
        for id, out in list(self._out.items()):
            if reason := self._gone.get(out.choice.serve):
                self._end(id, None, reason, with_rank=True)

    def _give_up_overdue(self) -> None:
        now_s = time.monotonic()
        for id, out in list(self._out.items()):
            if now_s - out.due_s > self._deadline_s:
                self._end(id, None, f"not answered within {self._deadline_s:g} s")

    def _end(self, id: str, result: GenerateResult | None, error: str, *, with_rank: bool = False) -> None:
        out = self._out.pop(id, None)
        if out is None:  # an answer after its deadline
            return
        self._routers[out.job.deployment].done(out.choice)
        latency_s = time.monotonic() - out.due_s if result is not None else None
        tokens = result.tokens if result is not None else []
        self._note(Outcome(out.job.deployment, out.job.request, out.choice.rank, latency_s, tokens, error, with_rank))

    def _note(self, outcome: Outcome) -> None:
        tally = self.tallies[outcome.deployment]
        if outcome.error:
            tally.failed_with_rank += outcome.with_rank
            tally.lost += not outcome.with_rank
            at = f" at rank {outcome.rank}" if outcome.rank is not None else ""
            self._news.append(f"{outcome.deployment}: request {outcome.request.id}{at}: {outcome.error}")
        else:
            tally.done += 1
        self.outcomes.append(outcome)


def _unsent(job: Job, reason: str) -> Outcome:
    return Outcome(job.deployment, job.request, None, None, [], f"not sent: {reason}")
