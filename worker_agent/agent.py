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
                run(batch, plan)              # a dummy where plan.roles[rank] says so

One thread drives the loop; `notify_work`, `report_load` and `close` may come from any thread.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from random import Random

from ..proto.errors import HeaderMismatchError, LocalProtocolError, RemoteProtocolError, RowInvalidError
from ..proto.messages import Activity, Counters, Kind, Load, Mode, Setting, Timing
from ..proto.rows import DUMMY, Operation, Position, Row, pack, unpack
from .client import Link
from .control import Control, monotonic_ms
from .core import RankCore
from .errors import (
    AgentClosedError,
    AgentError,
    ExchangeError,
    ExchangeInterruptedError,
    NotReadyError,
    RankFailedError,
    RankLostError,
    RegistrationRefusedError,
    StepSkippedError,
    blamed,
)
from .events import Hook, Identity
from .exchange.base import Exchange
from .exchange.rendezvous import Listener
from .forming import Builder, listener_for, offers_of
from .forward_context import ForwardContext, forward_context
from .hooks import EngineHooks
from .host import host_identity
from .offline import OfflineCore, OfflineDriver
from .plan import IDLE_PLAN, Plan, PlanSettings, Role, decide
from .turn import Turn

_FAILED_ROW = Row(dummy=True, local_error=True)
_READY = (Mode.SERVING, Mode.IDLE, Mode.RUNNING)


class RankAgent:
    """One rank of a deployment. Made by `connect` or `offline`."""

    def __init__(
        self,
        driver: Control | OfflineDriver,
        builder: Builder,
        settings: PlanSettings,
        rank: int,
        dp_size: int,
        hooks: EngineHooks,
    ) -> None:
        self.kind = driver.core.kind
        self.rank = rank
        self.dp_size = dp_size
        self.group_rank = rank if self.kind.lockstep else 0
        """Index of this rank in the tuples of a plan: an independent rank is a group of its own."""
        self._driver = driver
        self._core = driver.core
        self._builder = builder
        self._settings = settings
        self._hooks = hooks

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
            hooks: What the engine does around an operator's hold.
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
            rendezvous=builder.rendezvous,
            exchanges=offers,
            serve=serve,
            attributes=attributes or {},
        )
        core = RankCore(identity, Random(), monotonic_ms())
        control = Control(core, Link(endpoint, identity.incarnation), builder)
        control.start()
        return cls(control, builder, settings, rank, dp_size, hooks or EngineHooks())

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
        core = OfflineCore(rank, kind, timing)
        listener = Listener.at(rendezvous) if kind.lockstep and rank == 0 and rendezvous else None
        builder = Builder(deployment, rank, device, listener)
        built = None
        if kind.lockstep:
            built = builder.build_offline(exchange, dp_size, rendezvous, timing.form_timeout_ms)
            core.formed(built.name, built.process_groups)
        return cls(OfflineDriver(core, built), builder, settings, rank, dp_size, EngineHooks())

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
            AgentClosedError: `close` was called.
        """
        until = time.monotonic() + timeout_s
        while isinstance(found := self._wait_for_something(until), Hook):
            self._call(found)
        return found

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """One turn of the loop. Left without `step` while a wave runs, or by an exception before it, it tells the
        group.

        Raises:
            StepSkippedError: The turn was left without a step. Every other rank gets `RankFailedError` for the same
            step.
        """
        turn = Turn(self.step)
        try:
            yield turn
        except BaseException:
            if not turn.stepped:
                self._fail_step()
            raise
        if not turn.stepped and self._fail_step():
            raise StepSkippedError(f"rank {self.rank} left a turn of a running wave without step()")

    def step(self, row: Row = DUMMY) -> Plan:
        """Exchange this rank's row with the group's and return the plan, the same on every rank.

        Exactly one exchange while a wave runs, and none otherwise: then a row with `has_work` asks for a wave, and
        the outcome is IDLE. An independent (dense) rank exchanges nothing and plans for itself alone.

        Raises:
            RankLostError: The group has lost a rank; the wave is over.
            RankFailedError: Some rank had a local error: all ranks leave this step, and the wave goes on.
            HeaderMismatchError, RowInvalidError: The ranks are not at the same exchange, or the transport is damaged.
            LocalProtocolError: This row is not allowed; the group was told of a local error.
        """
        if not self.kind.lockstep:
            return self._step_alone(row)
        skipped: LocalProtocolError | None = None
        with self._driver.changed:
            self._raise_if_over()
            self._raise_if_lost()
            if not self._core.must_step:
                if row.has_work:
                    self._driver.perform(self._core.work_arrived())
                return IDLE_PLAN
            try:
                row, position = self._core.begin(row)
            except LocalProtocolError as error:
                skipped = error
        if skipped is not None:
            self._fail_step()  # the others wait in the sub-steps that this rank left out
            raise skipped
        return self._exchange(row, position)

    def substep(self, row: Row = DUMMY) -> Plan:
        """One further synchronised pass of the present step, such as a draft model's. All ranks run `plan.substeps`
        of them.
        """
        with self._driver.changed:
            self._raise_if_over()
            self._raise_if_lost()
            row, position = self._core.stepper.begin_substep(row)
        return self._exchange(row, position)

    def forward(self, plan: Plan) -> AbstractContextManager[ForwardContext]:
        """Make the plan visible to model code: see `forward_context.current`."""
        return forward_context(plan, self.group_rank)

    def role(self, plan: Plan) -> Role:
        """What this rank runs in the step of `plan`."""
        return plan.roles[self.group_rank] if plan.roles else Role.NONE

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
                if (hook := self._core.hook_due()) is not None:
                    return hook
                if self._core.must_step:
                    self._enter(Activity.STEPPING)
                    return True
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return False
                self._driver.changed.wait(left_s)

    def _call(self, hook: Hook) -> None:
        """On the engine's thread and without the lock: a hook may take its time."""
        hold = self._core.hold
        match hook:
            case Hook.HOLD:
                if hold is not None:  # resumed meanwhile: nothing to tell
                    self._hooks.hold(hold.hold_mode)
            case Hook.DEVICE_IDLE:
                self._hooks.device_idle()
            case Hook.RESUME:
                self._hooks.resume()
        with self._driver.changed:
            self._driver.perform(self._core.hook_done(hook))

    def _step_alone(self, row: Row) -> Plan:
        with self._driver.changed:
            self._raise_if_over()
            self._core.stepper.alone(row)
            self._enter(Activity.STEPPING)
            step = self._core.stepper.counters().steps
        plan = decide((row,), Position(Operation.STEP, 0, 0, step), self._settings)
        return IDLE_PLAN if plan.over else plan

    def _exchange(self, row: Row, position: Position) -> Plan:
        """The one place where rows meet."""
        rejected: LocalProtocolError | None = None
        try:
            mine = pack(row, position, self.rank)
        except LocalProtocolError as error:  # the others wait for a row: give them one that says so
            rejected, mine = error, pack(_FAILED_ROW, position, self.rank)
        with self._driver.changed:
            exchange = self._driver.exchange
            self._driver.gathering = exchange is not None
            self._enter(Activity.EXCHANGING)
        began_ns = time.perf_counter_ns()
        try:
            if exchange is None:  # given up between begin and here
                raise ExchangeInterruptedError("the exchange was given up")
            data = exchange.gather(mine, timeout_ms=self._core.timing.step_deadline_ms)
            rows = unpack(data, self.dp_size, mine, position, self.rank)
        except (ExchangeError, RemoteProtocolError) as error:
            raise self._left(error, exchange, position) from error
        took_us = (time.perf_counter_ns() - began_ns) / 1000
        plan = decide(rows, position, self._settings)
        with self._driver.changed:
            self._driver.gathering = False
            self._driver.perform(self._core.finish(plan, took_us))
            self._enter(Activity.IDLE if plan.over else Activity.STEPPING)
        if rejected is not None:
            raise rejected
        if plan.failed:
            raise RankFailedError(plan.failed, plan.wave, plan.step)
        return plan

    def _left(self, error: Exception, exchange: Exchange | None, position: Position) -> Exception:
        """Out of an exchange that gave no rows: settle the state, and return the error for the engine."""
        with self._driver.changed:
            self._driver.gathering = False
            known, effects = self._core.leave_for_fault()
            if known is None and not self._core.closed:
                effects = self._core.fail(str(error), blamed(error))
            self._driver.perform(effects)
        if exchange is not None:
            exchange.close()
        if self._core.closed:
            return AgentClosedError("the agent was closed during an exchange")
        if known is not None:
            return RankLostError(known.rank, known.wave, known.step, known.reason)
        if isinstance(error, (HeaderMismatchError, RowInvalidError)):
            return error
        return RankLostError(blamed(error), position.wave, position.step, str(error))

    def _fail_step(self) -> bool:
        """Tell the group that this rank cannot take its step. False: no wave runs, so nobody waits."""
        try:
            with self._driver.changed:
                if not self.kind.lockstep or not self._core.stepper.running or self._core.closed:
                    return False
                row, position = self._core.begin_failure(_FAILED_ROW)
            self._exchange(row, position)
        except (AgentError, RemoteProtocolError):
            pass  # the group knows, or there is none any more; the caller's own error says why
        return True

    def _raise_if_over(self) -> None:
        if self._driver.broken is not None:
            raise AgentClosedError(f"the agent failed: {self._driver.broken!r}") from self._driver.broken
        if self._core.closed:
            raise AgentClosedError("the agent is closed")
        refused = self._core.refused
        if refused is not None and not refused.retry:
            raise RegistrationRefusedError(refused.reason, refused.detail, tuple(refused.mismatches))

    def _raise_if_lost(self) -> None:
        lost, effects = self._core.leave_for_fault()
        self._driver.perform(effects)
        if lost is not None:
            raise RankLostError(lost.rank, lost.wave, lost.step, lost.reason)

    def _enter(self, activity: Activity) -> None:
        if self._core.activity is not activity:
            self._core.activity = activity
            self._core.activity_since_ms = monotonic_ms()
