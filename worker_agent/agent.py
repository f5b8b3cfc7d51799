"""`RankAgent`: what an engine's loop calls. A few calls, and no way to leave a step without its exchange.

    agent = RankAgent.connect("tcp://127.0.0.1:29560", deployment="deepseek-v3", rank=3, dp_size=16, kind=Kind.MOE)
    agent.wait_ready(timeout_s=600)
    while serving:
        if not agent.wait(timeout_s=1.0):
            continue                          # nothing to do; blocked in the kernel meanwhile
        with agent.turn() as turn:
            batch = scheduler.schedule()
            plan = turn.step(row_of(batch))   # the one exchange of this step
        if plan.runs_forward:
            with agent.forward(plan):
                run(batch, plan)              # a dummy where agent.role(plan) says so

One thread drives the loop; `notify_work`, `report_load` and `close` may come from any thread.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from random import Random

from ..proto.messages import Activity, Counters, Kind, Load, Mode, Setting, Timing
from ..proto.process_identity import this_process
from .client import Link
from .control import Control, monotonic_ms
from .core import RankCore
from .errors import (
    CoordinatorLostError,
    LossPolicy,
    NotReadyError,
)
from .events import Hook, Identity
from .exchange.rendezvous import Listener
from .forming import Builder, listener_for, offers_of
from .forward_context import ForwardContext, forward_context
from .hooks import EngineHooks, call_hook
from .host import host_identity
from .offline import OfflineCore, OfflineDriver
from .plan import Plan, PlanSettings, Role
from .stepping import Stepping

LOOK_S = 0.2
_READY = (Mode.SERVING, Mode.IDLE, Mode.RUNNING)


class RankAgent(Stepping):
    """One rank of a deployment. Made by `connect` or `offline`."""

    def __init__(
        self,
        driver: Control | OfflineDriver,
        builder: Builder,
        settings: PlanSettings,
        rank: int,
        dp_size: int,
        hooks: EngineHooks,
        loss_policy: LossPolicy,
    ) -> None:
        super().__init__(driver, settings, rank, dp_size)
        self._builder = builder
        self._hooks = hooks
        self._loss_policy = loss_policy

    # --- making one --------------------------------------------------------------------------------------------------

    @classmethod
    def connect(
        cls,
        endpoint: str,
        *,
        deployment: str,
        rank: int,
        dp_size: int,
        kind: Kind,
        settings: PlanSettings | None = None,
        extra_settings: dict[str, Setting] | None = None,
        exchanges: Sequence[str] | None = None,
        device: str = "cpu",
        serve: str = "",
        advertise_host: str = "",
        attributes: dict[str, str] | None = None,
        hooks: EngineHooks | None = None,
        on_coordinator_loss: LossPolicy = LossPolicy.HOLD,
    ) -> "RankAgent":
        """Register with a coordinator. Returns at once; `wait_ready` waits. Call it in the process that runs the
        engine.

        Args:
            endpoint: The coordinator's control endpoint, such as `tcp://127.0.0.1:29560`.
            deployment: Its name in the coordinator's configuration.
            rank: Global DP rank.
            dp_size: Ranks of the deployment.
            kind: What this engine really serves; refused when the configuration says otherwise.
            settings: What the plan depends on; compared between the ranks.
            extra_settings: Anything else that must be equal on all ranks (model, versions, thresholds).
            exchanges: Exchanges to offer, best first; all that are available when not given. Dense ranks offer none.
            device: `cpu`, `cuda:N` or `npu:N`: where a torch exchange keeps its tensors.
            serve: Where front-ends send requests to this rank; opaque to the coordinator.
            advertise_host: Address by which the other ranks reach this one; found by itself when empty.
            attributes: For display: node, local rank, pid, engine.
            hooks: What the engine does around an operator's hold or scaling, and when a rank is lost.
            on_coordinator_loss: What `wait` does when the coordinator has been silent for `dead_after_ms`.
        """
        settings = settings or PlanSettings()
        offers = offers_of(kind, exchanges, device)
        builder = Builder(deployment, rank, device, listener_for(offers, endpoint, advertise_host))
        identity = Identity(
            deployment=deployment,
            rank=rank,
            incarnation=secrets.token_hex(8),
            kind=kind,
            dp_size=dp_size,
            settings={**settings.compared(), **(extra_settings or {})},
            host=host_identity(),
            process=this_process(),
            rendezvous=builder.rendezvous,
            exchanges=offers,
            serve=serve,
            attributes=attributes or {},
        )
        core = RankCore(identity, Random(), monotonic_ms())
        hooks = hooks or EngineHooks()
        control = Control(core, Link(endpoint, identity.incarnation), builder, hooks)
        control.start()
        return cls(control, builder, settings, rank, dp_size, hooks, on_coordinator_loss)

    @classmethod
    def offline(
        cls,
        *,
        deployment: str,
        rank: int,
        dp_size: int,
        kind: Kind,
        exchange: str = "shm",
        rendezvous: str = "",
        settings: PlanSettings | None = None,
        device: str = "cpu",
        step_deadline_s: float = 60.0,
        form_timeout_s: float = 60.0,
    ) -> "RankAgent":
        """Join a group without a coordinator; waits for the other ranks. A dense rank joins nothing and returns at
        once.

        Args:
            deployment: A name that only the processes of this run share.
            rank: Global DP rank.
            dp_size: Ranks of the run.
            kind: `Kind.MOE` keeps the ranks in lockstep until all are done; `Kind.DENSE` creates nothing at all.
            exchange: `shm` on one host; `gloo`, `nccl` or `hccl` need `rendezvous`.
            rendezvous: `tcp://host:port` on which rank 0 listens.
            settings: What the plan depends on; equal on all ranks.
            device: `cpu`, `cuda:N` or `npu:N`.
            step_deadline_s: Longest wait for the slowest rank in one step.
            form_timeout_s: Longest wait for all ranks to come.

        Raises:
            ExchangeTimeoutError: Some ranks did not come; it names them.
            ExchangeUnavailableError: This exchange cannot be used here.
        """
        settings = settings or PlanSettings()
        timing = Timing(step_deadline_ms=round(step_deadline_s * 1000), form_timeout_ms=round(form_timeout_s * 1000))
        core = OfflineCore(rank, dp_size, kind, timing)
        listener = Listener.at(rendezvous) if kind.lockstep and rank == 0 and rendezvous else None
        builder = Builder(deployment, rank, device, listener)
        built = None
        if kind.lockstep:
            built = builder.build_offline(exchange, dp_size, rendezvous, timing.form_timeout_ms)
            core.formed(built.name, built.process_groups)
        return cls(OfflineDriver(core, built), builder, settings, rank, dp_size, EngineHooks(), LossPolicy.HOLD)

    # --- the engine's loop -------------------------------------------------------------------------------------------

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until this rank is registered and, in a lockstep deployment, its group is formed.

        Raises:
            RegistrationRefusedError: The coordinator refuses this rank for good.
            NotReadyError: It took longer; says what was waited for.
            AgentClosedError: `close` was called.
        """
        began = time.monotonic()
        with self._driver.changed:
            while True:
                self._raise_if_over()
                if self._core.mode in _READY and (isinstance(self._core, OfflineCore) or self._core.registered):
                    return
                left_s = began + timeout_s - time.monotonic()
                if left_s <= 0:
                    raise NotReadyError(self._core.waits_for(monotonic_ms()), timeout_s)
                self._driver.changed.wait(left_s)

    def wait(self, timeout_s: float = 1.0) -> bool:
        """Wait, without using the processor, until `step` has to be called. False: the time is over and there is
        nothing to do.

        Raises:
            RankLostError: The wave that this rank was in is over, because its group lost a rank. Raised once.
            RegistrationRefusedError: The coordinator refuses this rank for good.
            CoordinatorLostError: It has been silent for too long, and the policy is to drain or to exit.
            AgentClosedError: `close` was called.
        """
        until = time.monotonic() + timeout_s
        while isinstance(found := self._wait_for_something(until), Hook):
            self._call(found)
        return found

    def forward(self, plan: Plan) -> AbstractContextManager[ForwardContext]:
        """Make the plan visible to model code: see `forward_context.current`."""
        return forward_context(plan, self.group_rank)

    def role(self, plan: Plan) -> Role:
        """What this rank runs in the step of `plan`."""
        return plan.role(self.group_rank)

    # --- from any thread ---------------------------------------------------------------------------------------------

    def notify_work(self) -> None:
        """A request has been queued for the engine. Call it after queueing: the next row carries it."""
        with self._driver.changed:
            self._driver.perform(self._core.work_arrived())

    def report_load(self, load: Load) -> None:
        """Tell the coordinator this rank's queue. Cheap: sent at most every 50 ms, and only when it has changed."""
        self._driver.report_load(load)

    @contextmanager
    def busy(self, at_most_s: float) -> Iterator[None]:
        """Announce a long operation (compiling, capturing graphs, loading weights): deadlines wait for it so long."""
        self._driver.announce_busy(round(at_most_s * 1000))
        try:
            yield
        finally:
            self._driver.announce_busy(0)

    @property
    def counters(self) -> Counters:
        """What this rank has done since it began."""
        with self._driver.changed:
            return self._core.stepper.counters()

    @property
    def exchange_backend(self) -> str:
        """Name of the exchange in use; empty when there is none."""
        return self._core.exchange

    def close(self, reason: str = "closed") -> None:
        """Leave the deployment. Whoever waits in this agent gets `AgentClosedError`. May be called twice."""
        self._driver.close(reason)
        self._builder.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _wait_for_something(self, until: float) -> Hook | bool:
        """A hook that must be called first, or whether `step` has to be called."""
        with self._driver.changed:
            self._enter(Activity.IDLE)
            while True:
                self._raise_if_over()
                self._raise_if_lost()
                self._raise_if_left_alone()
                if (hook := self._core.take_hook()) is not None:
                    return hook
                if self._core.must_step:
                    self._enter(Activity.STEPPING)
                    return True
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return False
                # In slices: nobody wakes us when a coordinator falls silent.
                self._driver.changed.wait(left_s if self._loss_policy is LossPolicy.HOLD else min(left_s, LOOK_S))

    def _call(self, hook: Hook) -> None:
        """On the engine's thread and without the lock: a hook may take its time."""
        call_hook(self._hooks, hook, self._core.hold)
        with self._driver.changed:
            self._driver.perform(self._core.hook_done(hook))

    def _raise_if_left_alone(self) -> None:
        policy, silent_ms = self._loss_policy, self._driver.silent_ms()
        needed = policy is LossPolicy.DRAIN and self._core.must_step  # by the wave, or by its own work
        if policy is not LossPolicy.HOLD and not needed and silent_ms >= self._core.timing.dead_after_ms:
            raise CoordinatorLostError(silent_ms / 1000, policy)
