"""Sends the requests of a trace at their times and collects the answers: what an API server would do, in one thread.

The law of this file: arrivals do not wait for answers (open loop), and each request ends in exactly one `Outcome`:
answered, failed, or given up at its deadline. Nothing is sent twice.

A latency is measured from the moment of sending to the moment at which this thread takes the answer; it looks at all
ranks that owe one in turn, so a latency is too long by up to `LOOK_MS` times their number.
"""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from ..errors import AgentError
from ..front_end_core import Choice
from .trace import Arrival, scaled
from .wire import GenerateRequest, GenerateResult, RankClient

LOOK_MS = 2
IDLE_S_MAX = 0.05
"""Longest sleep while nothing is out: how fast a stop is seen."""

REQUEST_DEADLINE_S = 60.0
"""A request without an answer for so long is lost. Far above any latency of a machine that only is slow."""


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


class Tally(msgspec.Struct):
    """Counts of one deployment, for display. Written by the replay's thread alone."""

    total: int = 0
    sent: int = 0
    done: int = 0
    lost: int = 0


class _Out(msgspec.Struct, frozen=True):
    """A request that has not been answered yet."""

    job: Job
    choice: Choice
    sent_s: float


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
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        routers: Mapping[str, Router],
        *,
        connect: Callable[[str], Client] = RankClient,
        deadline_s: float = REQUEST_DEADLINE_S,
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
            while (self._jobs or self._out) and not self._stop_reason:
                self._send_due(time.monotonic() - began_s)
                self._receive(began_s)
                self._give_up_overdue()
            for id in list(self._out):
                self._end(id, None, f"not answered: {self._stop_reason}")
        except Exception as error:
            self._failure = error
        finally:
            self.elapsed_s = time.monotonic() - began_s
            for client in self._clients.values():
                client.close()

    def _send_due(self, now_s: float) -> None:
        while self._jobs and self._jobs[0].due_s <= now_s:
            self._send(self._jobs.popleft())

    def _send(self, job: Job) -> None:
        self.tallies[job.deployment].sent += 1
        try:
            choice = self._routers[job.deployment].pick()
        except AgentError as error:
            self._note(Outcome(job.deployment, job.request, None, None, [], f"not sent: {error}"))
            return
        if choice.serve not in self._clients:
            self._clients[choice.serve] = self._connect(choice.serve)
        self._out[job.request.id] = _Out(job, choice, time.monotonic())
        if not self._clients[choice.serve].submit(job.request):
            self._end(job.request.id, None, "not sent: the rank takes nothing any more")

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
        if not owing and self._jobs:
            left_s = began_s + self._jobs[0].due_s - time.monotonic()
            time.sleep(max(0.0, min(left_s, IDLE_S_MAX)))

    @staticmethod
    def _drain(client: Client) -> list[GenerateResult]:
        results = []
        while (result := client.receive(0)) is not None:
            results.append(result)
        return results

    def _give_up_overdue(self) -> None:
        now_s = time.monotonic()
        for id, out in list(self._out.items()):
            if now_s - out.sent_s > self._deadline_s:
                self._end(id, None, f"not answered within {self._deadline_s:g} s")

    def _end(self, id: str, result: GenerateResult | None, error: str) -> None:
        out = self._out.pop(id, None)
        if out is None:  # an answer after its deadline
            return
        self._routers[out.job.deployment].done(out.choice)
        latency_s = time.monotonic() - out.sent_s if result is not None else None
        tokens = result.tokens if result is not None else []
        self._note(Outcome(out.job.deployment, out.job.request, out.choice.rank, latency_s, tokens, error))

    def _note(self, outcome: Outcome) -> None:
        tally = self.tallies[outcome.deployment]
        if outcome.error:
            tally.lost += 1
            at = f" at rank {outcome.rank}" if outcome.rank is not None else ""
            self._news.append(f"{outcome.deployment}: request {outcome.request.id}{at}: {outcome.error}")
        else:
            tally.done += 1
        self.outcomes.append(outcome)
