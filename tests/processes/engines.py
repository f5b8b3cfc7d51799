"""Engines that are a counter, on threads, with real agents: enough to make waves over real sockets."""

import threading
import time
from collections import Counter

from wavekeeper.proto.messages import Kind, Load
from wavekeeper.proto.rows import DUMMY, Row
from wavekeeper.worker_agent import EngineHooks, RankAgent, Role
from wavekeeper.worker_agent.errors import AgentClosedError, AgentError


class CountingEngine:
    """One rank: every unit of work is one forward step."""

    def __init__(
        self,
        control: str,
        deployment: str,
        kind: Kind,
        rank: int,
        dp_size: int,
        step_s: float = 0.0,
        hooks: EngineHooks | None = None,
    ) -> None:
        self.rank = rank
        self.step_s = step_s
        self.work = 0
        self.done = 0
        self.lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self.errors: list[Exception] = []
        self.operations: list[tuple[int, int, int]] = []
        self.agent = RankAgent.connect(
            control,
            deployment=deployment,
            rank=rank,
            dp_size=dp_size,
            kind=kind,
            exchanges=("shm",) if kind.lockstep else None,
            serve=f"test://{deployment}/{rank}",
            hooks=hooks,
        )
        self.thread = threading.Thread(target=self.loop, daemon=True)
        self.thread.start()

    def submit(self, units: int) -> None:
        with self.lock:
            self.work += units
        self.agent.notify_work()

    def has_done(self, units: int) -> bool:
        return self.done >= units

    def loop(self) -> None:
        while True:
            try:
                self.turn()
            except AgentClosedError:
                return
            except AgentError as error:
                self.errors.append(error)

    def turn(self) -> None:
        if not self.agent.wait(0.5):
            return
        with self.agent.turn() as turn:
            work = self.work
            plan = turn.step(Row(num_tokens=1, has_work=True) if work else DUMMY)
        self.outcomes[plan.outcome] += 1
        if not plan.over:
            self.operations.append((plan.epoch, plan.wave, plan.step))
        if plan.runs_forward:
            self.model()
            if self.agent.role(plan) is Role.REAL:
                with self.lock:
                    self.work -= 1
                    self.done += 1
        self.agent.report_load(Load(running=self.work))

    def model(self) -> None:
        """A forward pass."""
        time.sleep(self.step_s)

    def close(self) -> None:
        self.agent.close()
        self.thread.join(5)
        assert not self.thread.is_alive(), f"rank {self.rank} does not come out of its loop"
