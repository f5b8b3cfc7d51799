"""Stand-ins for what the demo engine stands on: a group of agents in threads, and ways for tokens to travel between
threads.

`LockstepAgents` obeys the rules of a wave (a rank asks, everybody runs, one exchange a step, the end is seen by all
at the same step) with the production plan, and without a coordinator, an exchange or a process.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from wavekeeper.proto.messages import Kind, Load
from wavekeeper.proto.rows import Operation, Position, Row, gathered
from wavekeeper.worker_agent.demo.wire import GenerateRequest, GenerateResult
from wavekeeper.worker_agent.errors import AgentClosedError, RankFailedError, RankLostError
from wavekeeper.worker_agent.forward_context import forward_context
from wavekeeper.worker_agent.plan import IDLE_PLAN, Outcome, Plan, PlanSettings, decide

torch.set_num_threads(1)  # ranks are threads here, and their matrices are small

DEADLINE_S = 20.0
"""No wait of a test is longer; reaching it is a failure."""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, at most `DEADLINE_S`."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what} after {DEADLINE_S} s"
        time.sleep(0.002)


class Meeting:
    """Where dp_size threads meet and each gets what all have brought."""

    def __init__(self, dp_size: int) -> None:
        self._barrier = threading.Barrier(dp_size, timeout=DEADLINE_S)
        self._brought: list[object] = [None] * dp_size

    def gather(self, rank: int, mine: object) -> list[object]:
        self._brought[rank] = mine
        self._barrier.wait()
        everything = list(self._brought)
        self._barrier.wait()  # nobody may bring the next thing before all have read this one
        return everything

    def abort(self) -> None:
        self._barrier.abort()


class ThreadAllToAll:
    """Tokens travel between threads; a rank that skips one leaves the others waiting, as a real group would."""

    def __init__(self, meeting: Meeting, rank: int, dp_size: int) -> None:
        self.rank = rank
        self.dp_size = dp_size
        self.swaps = 0
        self._meeting = meeting

    def swap(self, send: torch.Tensor) -> torch.Tensor:
        self.swaps += 1
        sent = self._meeting.gather(self.rank, send)
        return torch.stack([tensor[self.rank] for tensor in sent if isinstance(tensor, torch.Tensor)])


class LockstepAgents:
    """The agents of one MoE deployment; `agents[r]` is rank r's."""

    def __init__(self, dp_size: int) -> None:
        self.changed = threading.Condition()
        self.started = 0  # the newest wave that was started
        self.meeting = Meeting(dp_size)
        self.agents = [LockstepAgent(self, rank) for rank in range(dp_size)]

    def all_idle(self) -> bool:
        with self.changed:
            return all(agent.ended == self.started and not agent.notified for agent in self.agents)


class LockstepAgent:
    """One rank of `LockstepAgents`."""

    kind = Kind.MOE

    def __init__(self, group: LockstepAgents, rank: int) -> None:
        self.rank = rank
        self.group_rank = rank
        self.ended = 0
        self.step_number = 0
        self.notified = False
        self.plans: list[Plan] = []
        self.loads: list[Load] = []
        self._group = group

    def _running(self) -> bool:
        return self._group.started > self.ended

    def _ask(self) -> None:
        if not self._running():
            self._group.started += 1
            self._group.changed.notify_all()

    def notify_work(self) -> None:
        with self._group.changed:
            self.notified = True
            self._group.changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        with self._group.changed:
            self._group.changed.wait_for(lambda: self._running() or self.notified, timeout_s)
            return self._running() or self.notified

    def step(self, row: Row) -> Plan:
        with self._group.changed:
            self.notified = False
            if not self._running():
                if row.has_work:
                    self._ask()
                return IDLE_PLAN
        self.step_number += 1
        rows = [r for r in self._group.meeting.gather(self.rank, row) if isinstance(r, Row)]
        position = Position(Operation.STEP, 1, self.ended + 1, self.step_number)
        plan = decide(gathered(rows, position), position, PlanSettings())
        self.plans.append(plan)
        if plan.outcome is Outcome.WAVE_ENDED:
            self._end_wave()
        if plan.failed:
            raise RankFailedError(plan.failed, plan.wave, plan.step)
        return plan

    def _end_wave(self) -> None:
        with self._group.changed:
            self.ended += 1
            self.step_number = 0
            self._group.changed.notify_all()

    @contextmanager
    def turn(self) -> Iterator["LockstepAgent"]:
        yield self

    def forward(self, plan: Plan) -> AbstractContextManager[object]:
        return forward_context(plan, self.group_rank)

    def report_load(self, load: Load) -> None:
        self.loads.append(load)


class LosingAgent(LockstepAgent):
    """Loses its group in the exchange of step `lost_at_step`, once."""

    lost_at_step = 0

    def step(self, row: Row) -> Plan:
        if self._running() and self.step_number + 1 == self.lost_at_step:
            self.lost_at_step = 0
            self._end_wave()
            raise RankLostError(1, self.ended, self.step_number, "killed by the test")
        return super().step(row)


class DenseAgent:
    """The agent of an independent rank: a plan for itself alone. Like the real one, it wakes the engine until a row
    says that there is no work."""

    kind = Kind.DENSE
    rank = 0
    group_rank = 0

    def __init__(self) -> None:
        self.loads: list[Load] = []
        self.rows: list[Row] = []
        self._work = threading.Event()

    def notify_work(self) -> None:
        self._work.set()

    def wait(self, timeout_s: float) -> bool:
        return self._work.wait(timeout_s)

    def step(self, row: Row) -> Plan:
        self._work.clear()
        self.rows.append(row)
        if row.has_work:
            self._work.set()
        position = Position(Operation.STEP, 0, 0, 0)
        plan = decide(gathered([row], position), position, PlanSettings())
        return IDLE_PLAN if plan.over else plan

    @contextmanager
    def turn(self) -> Iterator["DenseAgent"]:
        yield self

    def forward(self, plan: Plan) -> AbstractContextManager[object]:
        return forward_context(plan, self.group_rank)

    def report_load(self, load: Load) -> None:
        self.loads.append(load)


class ClosedAgent(DenseAgent):
    """Was closed while requests were queued."""

    def wait(self, timeout_s: float) -> bool:
        raise AgentClosedError("closed by the test")


class Results:
    """Collects results by id; the same id twice is a failure of the engine."""

    def __init__(self) -> None:
        self.by_id: dict[str, list[GenerateResult]] = {}
        self._lock = threading.Lock()

    def __call__(self, result: GenerateResult) -> None:
        with self._lock:
            self.by_id.setdefault(result.id, []).append(result)

    def wait(self, count: int) -> None:
        wait_until(lambda: len(self.by_id) >= count, f"{count} results")

    def tokens(self) -> dict[str, list[int]]:
        """Outputs by id, each answered exactly once and without an error."""
        assert all(len(answers) == 1 for answers in self.by_id.values()), "answered more than once"
        assert not any(answers[0].error for answers in self.by_id.values()), self.by_id
        return {id: answers[0].tokens for id, answers in self.by_id.items()}


def requests(count: int, *, longest_prompt: int = 40, max_tokens: int = 12) -> list[GenerateRequest]:
    """Requests of many lengths, the same in every run."""
    generator = torch.Generator().manual_seed(count)
    made = []
    for number in range(count):
        length = 1 + int(torch.randint(longest_prompt, (1,), generator=generator))
        prompt = torch.randint(256, (length,), generator=generator).tolist()
        made.append(GenerateRequest(f"request-{number}", prompt, 1 + (number * 5) % max_tokens))
    return made
