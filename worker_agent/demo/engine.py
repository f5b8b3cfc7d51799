"""The demo's engine loop: continuous batching on top of `RankAgent`, the same loop for MoE and dense.

A turn, in this order:

1. `agent.wait()`: blocks until a wave runs (lockstep) or a request has come (dense).
2. Take in new requests and propose chunks. Nothing is committed yet: whether they run is the group's decision, not
   this rank's.
3. `turn.step(row)`: the one exchange. It happens in every turn of a running wave, with or without work, tokens or
   an error to tell.
4. Only if the plan says forward: run the model inside `agent.forward(plan)`, with the chunks and padding, or with a
   dummy. All other outcomes run nothing.

A failed step fails every request that has begun, once; those that still wait keep their place, since nothing of
them is lost.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import msgspec

from ...proto.errors import RemoteProtocolError
from ...proto.messages import Kind, Load
from ...proto.rows import DUMMY, Row
from ..errors import AgentClosedError, AgentError, RegistrationRefusedError
from ..plan import Plan
from .model import VOCABULARY, Batch, DenseDecoder
from .wire import GenerateRequest, GenerateResult, Reply

log = logging.getLogger(__name__)


class EngineSettings(msgspec.Struct, frozen=True):
    """Limits of one engine."""

    step_tokens_max: int = 64
    """Tokens of one forward pass; longer prompts are cut into chunks."""
    requests_max: int = 4096
    """Unanswered requests; more are refused at once, so that a flood cannot eat the memory."""
    wait_s: float = 0.5
    """Longest uninterrupted wait for work: how fast a stop is seen."""


class Turn(Protocol):
    """What the engine needs of a `RankAgent`'s turn."""

    def step(self, row: Row) -> Plan:
        """Exchange this rank's row and return what the group does."""
        ...


class Agent(Protocol):
    """What the engine needs of a `RankAgent`; it says there what may be raised."""

    kind: Kind
    rank: int

    @property
    def group_rank(self) -> int:
        """Place in the tuples of a plan."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Block until a turn is to be taken."""
        ...

    def turn(self) -> AbstractContextManager[Turn]:
        """Surround what leads to a step, so that the group hears of it if there is none."""
        ...

    def forward(self, plan: Plan) -> AbstractContextManager[object]:
        """Surround the forward pass of a plan."""
        ...

    def notify_work(self) -> None:
        """Tell, from any thread, that a request has been queued."""
        ...

    def report_load(self, load: Load) -> None:
        """Tell the queue's length."""
        ...


class RequestRefusedError(ValueError):
    """A request cannot be served here; the text is meant for its sender."""


class EngineFigures(msgspec.Struct):
    """What an engine has done, for the end of a run. Only the engine's thread writes them."""

    forwards: int = 0
    dummy_forwards: int = 0
    tokens_computed: int = 0
    requests_done: int = 0
    requests_failed: int = 0


class Sequence:
    """A request on its way: its tokens so far, and how many of them are in the cache of `slot`."""

    def __init__(self, request: GenerateRequest, reply: Reply) -> None:
        self.request = request
        self.reply = reply
        self.token_ids = list(request.prompt)
        self.computed = 0
        self.slot: int | None = None

    @property
    def remaining(self) -> int:
        """Tokens known but not yet in the cache; 1 means decoding (or a very short prompt)."""
        return len(self.token_ids) - self.computed

    @property
    def output(self) -> list[int]:
        """Tokens generated so far."""
        return self.token_ids[len(self.request.prompt) :]


class Chunk(NamedTuple):
    """The next `num_tokens` tokens of a sequence, to run in `slot`."""

    sequence: Sequence
    slot: int
    num_tokens: int

    @property
    def is_prefill(self) -> bool:
        """Whether it holds prompt tokens."""
        return self.sequence.computed < len(self.sequence.request.prompt)


class Scheduler:
    """Which tokens run next. No model, no agent, no clock."""

    def __init__(self, slots: int, context_tokens: int, step_tokens_max: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._slots = slots
        self._context_tokens = context_tokens
        self._step_tokens_max = step_tokens_max

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.running or self.waiting)

    def propose(self) -> list[Chunk]:
        """Return what would run now and change nothing: decodes, then prompts, then new sequences in order of
        arrival.
        """
        used = {sequence.slot for sequence in self.running}
        free = [slot for slot in range(self._slots) if slot not in used]
        decodes_first = sorted(self.running, key=lambda sequence: sequence.remaining > 1)
        chunks: list[Chunk] = []
        budget = self._step_tokens_max
        for sequence in (*decodes_first, *self.waiting):
            if budget == 0 or (sequence.slot is None and not free):
                break
            count = min(sequence.remaining, budget)
            chunks.append(Chunk(sequence, free.pop(0) if sequence.slot is None else sequence.slot, count))
            budget -= count
        return chunks

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """The chunks run now: from here on a failure is theirs as well."""
        for chunk in chunks:
            if chunk.sequence.slot is None:
                self.waiting.remove(chunk.sequence)
                self.running.append(chunk.sequence)
                chunk.sequence.slot = chunk.slot

    def finish(self, chunks: Iterable[Chunk], choices: list[int]) -> list[Sequence]:
        """The chunks have run and the model chose `choices[i]` after their i-th token. Returns the sequences that
        are done.
        """
        end = 0
        for chunk in chunks:
            end += chunk.num_tokens
            chunk.sequence.computed += chunk.num_tokens
            if chunk.sequence.remaining == 0:
                chunk.sequence.token_ids.append(choices[end - 1])
        done = [s for s in self.running if len(s.output) == s.request.max_tokens]
        self.running = [s for s in self.running if s not in done]
        return done

    def abandon_running(self) -> list[Sequence]:
        """Forget all sequences that have begun, and return them."""
        failed, self.running = self.running, []
        return failed

    def load(self) -> Load:
        """The queue as of now."""
        cached = sum(sequence.computed for sequence in self.running)
        return Load(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_cache_usage=round(cached / (self._slots * self._context_tokens), 2),
            waiting_tokens=sum(s.remaining for s in (*self.running, *self.waiting)),
        )


def batch_of(chunks: Iterable[Chunk]) -> Batch:
    """Return the flat batch of these chunks."""
    batch = Batch([], [], [])
    for sequence, slot, count in chunks:
        positions = range(sequence.computed, sequence.computed + count)
        batch.token_ids.extend(sequence.token_ids[position] for position in positions)
        batch.positions.extend(positions)
        batch.slots.extend([slot] * count)
    return batch


class Engine:
    """One rank's engine. `run` belongs to one thread; `submit` may be called from any.

    Args:
        model: Its forward pass is a group act if the deployment is in lockstep.
        agent: Connected; `run` does not close it.
        regroup: Called inside the first forward pass of an epoch and of the time after a failed step, on all ranks
            in the same
            step: the place to (re)build what the ranks share.
    """

    def __init__(
        self,
        model: DenseDecoder,
        agent: Agent,
        *,
        settings: EngineSettings | None = None,
        regroup: Callable[[Plan], None] | None = None,
    ) -> None:
        self.figures = EngineFigures()
        self._model = model
        self._agent = agent
        self._rank = agent.rank
        self._settings = settings or EngineSettings()
        self._regroup = regroup
        self._grouped_epoch: int | None = None
        self._scheduler = Scheduler(model.slots, model.context_tokens, self._settings.step_tokens_max)
        self._inbox: deque[Sequence] = deque()
        self._lock = threading.Lock()  # of the three below
        self._unanswered = 0
        self._closed = False
        self._forward_failed = False
        self._reported_load: Load | None = None

    def submit(self, request: GenerateRequest, reply: Reply) -> None:
        """Queue a request. `reply` gets its result exactly once, from the engine's thread (or at once, if it is
        refused).
        """
        try:
            self._check(request)
            with self._lock:
                if self._closed:
                    raise RequestRefusedError("this rank is stopping")
                if self._unanswered >= self._settings.requests_max:
                    raise RequestRefusedError(f"{self._unanswered} requests are waiting here already; try another rank")
                self._unanswered += 1
                self._inbox.append(Sequence(request, reply))
        except RequestRefusedError as error:
            reply(GenerateResult(request.id, self._rank, error=str(error)))
            return
        self._agent.notify_work()  # after it is queued: a rank that wakes earlier would find nothing

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set. What is unfinished at the end, whatever ended it, is answered with an error.

        Raises:
            RegistrationRefusedError: This rank will never be part of the deployment.
            AgentClosedError: The agent was closed or has failed.
        """
        reason = "this rank is stopping"
        try:
            while not stop.is_set():
                try:
                    self._turn()
                except (AgentClosedError, RegistrationRefusedError) as error:
                    reason = str(error)
                    raise
                except (AgentError, RemoteProtocolError) as error:
                    self._forward_failed = False  # the group knows, or there is none any more
                    self._abandon(str(error))
        finally:
            self._close(reason)

    def _turn(self) -> None:
        woken = self._agent.wait(self._settings.wait_s)
        self._take_in()
        # Woken without work: others have some (lockstep), or ours is done and the agent does not know yet (dense).
        # Not woken, but with work: no wave runs, and the row asks for one again.
        if woken or self._scheduler.has_work:
            with self._agent.turn() as turn:
                chunks = self._scheduler.propose()
                plan = turn.step(self._row(chunks))
            if plan.runs_forward:
                self._forward(plan, chunks)
        self._report_load()

    def _row(self, chunks: list[Chunk]) -> Row:
        if not self._scheduler.has_work and not self._forward_failed:
            return DUMMY
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        return Row(
            num_tokens=num_tokens,
            num_tokens_padded=num_tokens,
            num_reqs=len(chunks),
            max_query_len=max((chunk.num_tokens for chunk in chunks), default=0),
            has_work=self._scheduler.has_work,
            has_prefill=any(chunk.is_prefill for chunk in chunks),
            local_error=self._forward_failed,
        )

    def _forward(self, plan: Plan, chunks: list[Chunk]) -> None:
        """Run the model; a failure is told to the group in the next row and never ends the loop."""
        self._scheduler.begin(chunks)
        batch = batch_of(chunks)
        num_tokens = len(batch.slots)
        fed = plan.num_tokens_across_dp[self._agent.group_rank]
        try:
            with self._agent.forward(plan):
                if self._regroup is not None and plan.epoch != self._grouped_epoch:
                    self._regroup(plan)
                    self._grouped_epoch = plan.epoch
                choices = self._model.next_tokens(batch.padded(fed))
        except Exception as error:
            log.exception("rank %d: the forward pass of wave %d step %d failed", self._rank, plan.wave, plan.step)
            self._forward_failed = self._agent.kind.lockstep
            self._abandon(f"the forward pass failed: {error}")
            return
        self.figures.forwards += 1
        self.figures.dummy_forwards += not num_tokens
        self.figures.tokens_computed += num_tokens
        for sequence in self._scheduler.finish(chunks, choices):
            self.figures.requests_done += 1
            self._answer(sequence, "")

    def _abandon(self, reason: str) -> None:
        """Fail all that has begun. What the ranks shared is in doubt, so it is built anew at the next forward."""
        log.warning("rank %d: %s", self._rank, reason)
        self._grouped_epoch = None
        for sequence in self._scheduler.abandon_running():
            self._fail(sequence, reason)

    def _close(self, reason: str) -> None:
        with self._lock:
            self._closed = True
        self.give_back(reason)

    def give_back(self, reason: str) -> None:
        """Fail all that is queued or running here; belongs to the thread of `run`."""
        self._take_in()
        waiting, self._scheduler.waiting = self._scheduler.waiting, deque()
        for sequence in (*self._scheduler.abandon_running(), *waiting):
            self._fail(sequence, reason)

    def _fail(self, sequence: Sequence, reason: str) -> None:
        self.figures.requests_failed += 1
        self._answer(sequence, reason)

    def _answer(self, sequence: Sequence, error: str) -> None:
        with self._lock:
            self._unanswered -= 1
        sequence.reply(GenerateResult(sequence.request.id, self._rank, sequence.output, error))

    def _take_in(self) -> None:
        with self._lock:
            self._scheduler.waiting.extend(self._inbox)
            self._inbox.clear()

    def _report_load(self) -> None:
        load = self._scheduler.load()
        if load != self._reported_load:
            self._reported_load = load
            self._agent.report_load(load)

    def _check(self, request: GenerateRequest) -> None:
        if not request.prompt or not all(0 <= token < VOCABULARY for token in request.prompt):
            raise RequestRefusedError(f"the prompt must be at least one token, each in 0..{VOCABULARY - 1}")
        longest = self._model.context_tokens
        if request.max_tokens < 1 or len(request.prompt) + request.max_tokens > longest:
            raise RequestRefusedError(
                f"a prompt of {len(request.prompt)} tokens and max_tokens {request.max_tokens}: max_tokens must be at "
                f"least 1, and both together at most {longest}"
            )


def generate_alone(model: DenseDecoder, requests: Iterable[GenerateRequest]) -> dict[str, list[int]]:
    """Return the output of each request by id, as one rank alone makes it: one after the other, prompts in one piece.

    This is the reference of the demo's output check, so it shares no scheduling with `Engine`. The model must be
    alone in its group.
    """
    outputs: dict[str, list[int]] = {}
    for request in requests:
        token_ids = list(request.prompt)
        computed = 0
        while len(token_ids) < len(request.prompt) + request.max_tokens:
            count = len(token_ids) - computed
            positions = list(range(computed, len(token_ids)))
            token_ids.append(model.next_tokens(Batch(token_ids[computed:], positions, [0] * count))[-1])
            computed += count
        outputs[request.id] = token_ids[len(request.prompt) :]
    return outputs
