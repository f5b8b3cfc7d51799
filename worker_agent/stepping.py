"""The step: the one place where the rows of a group meet. The base of `RankAgent`.

The law of this file: while a wave runs, every way out of a step leads through its exchange. A row that is not
allowed, a turn that was skipped, an exception before the step: each gives the others a row that says so, and they
leave by the same door.
"""

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..proto.errors import HeaderMismatchError, LocalProtocolError, RemoteProtocolError, RowInvalidError
from ..proto.messages import Activity
from ..proto.rows import DUMMY, Operation, Position, Row, gathered, pack, unpack
from .control import Control, monotonic_ms
from .errors import (
    AgentClosedError,
    AgentError,
    ExchangeError,
    ExchangeInterruptedError,
    RankFailedError,
    RankLostError,
    RegistrationRefusedError,
    StepSkippedError,
    blamed,
)
from .exchange.base import Exchange
from .offline import OfflineDriver
from .plan import IDLE_PLAN, Plan, PlanSettings, decide
from .turn import Turn

_FAILED_ROW = Row(dummy=True, local_error=True)


class _Entry(NamedTuple):
    """What one exchange begins with."""

    exchange: Exchange | None
    mine: bytes
    position: Position
    place: int
    size: int
    rejected: LocalProtocolError | None
    """The engine's row was not allowed, and another one goes in its place."""


class _Begun(NamedTuple):
    """An exchange that is under way."""

    entry: _Entry
    exchange: Exchange
    began_ns: int
    """How long it took to begin it."""


class Stepping:
    """Exchanges rows for plans. Not thread-safe: one thread drives the loop."""

    def __init__(self, driver: Control | OfflineDriver, settings: PlanSettings, rank: int, dp_size: int) -> None:
        self.kind = driver.core.kind
        self._lockstep = driver.core.kind.lockstep
        self.rank = rank
        self.dp_size = dp_size
        """As configured; `group_ranks` is who makes up the group now."""
        self._driver = driver
        self._core = driver.core
        self._settings = settings
        self._begun: _Begun | Plan | None = None

    @property
    def group_ranks(self) -> tuple[int, ...]:
        """Ranks that make up the group of this epoch, in the order of a plan's tuples; empty while there is none."""
        return self._core.group_ranks

    @property
    def group_rank(self) -> int:
        """Index of this rank in the tuples of a plan: an independent rank is a group of its own."""
        return self._core.group_rank

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """One turn of the loop. Left without `step` while a wave runs, or by an exception before it, it tells the
        group.

        Raises:
            StepSkippedError: The turn was left without a step, and every other rank gets `RankFailedError` for it; or
            between its halves, and the others run what they have planned.
        """
        turn = Turn(self)
        try:
            yield turn
        except BaseException:
            if not turn.stepped:
                self._fail_step()
            self._end_if_begun()
            raise
        if self._end_if_begun():
            raise StepSkippedError(f"rank {self.rank} left a turn between begin() and end(), without its plan")
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
        self.begin_step(row)
        return self.end_step()

    def begin_step(self, row: Row = DUMMY) -> None:
        """The first half of `step`: the row is on its way, and the engine's own work fits before `end_step`.

        Raises:
            RankLostError, LocalProtocolError: See `step`; there is no second half then.
        """
        if self._begun is not None:
            raise LocalProtocolError(f"rank {self.rank} has begun a step and not ended it")
        if not self._lockstep:
            self._begun = self._step_alone(row)
            return
        skipped: LocalProtocolError | None = None
        with self._driver.changed:
            self._raise_if_over()
            self._raise_if_lost()
            if not self._core.must_step:
                if row.has_work:
                    self._driver.perform(self._core.work_arrived())
                self._begun = IDLE_PLAN
                return
            try:
                entry = self._enter_exchange(*self._core.begin(row))
            except LocalProtocolError as error:
                skipped = error
        if skipped is not None:
            self._fail_step()  # the others wait in the sub-steps that this rank left out
            raise skipped
        self._begun = self._begin_exchange(entry)

    def end_step(self) -> Plan:
        """The second half of `step`: wait for the other rows.

        Raises:
            LocalProtocolError: No step was begun. Other errors: see `step`.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            raise LocalProtocolError(f"rank {self.rank} has not begun a step")
        return begun if isinstance(begun, Plan) else self._end_exchange(begun)

    def substep(self, row: Row = DUMMY) -> Plan:
        """One further synchronised pass of the present step, such as a draft model's. All ranks run `plan.substeps`
        of them.
        """
        with self._driver.changed:
            self._raise_if_over()
            self._raise_if_lost()
            entry = self._enter_exchange(*self._core.stepper.begin_substep(row))
        return self._end_exchange(self._begin_exchange(entry))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _step_alone(self, row: Row) -> Plan:
        with self._driver.changed:
            self._raise_if_over()
            step = self._core.stepper.alone(row)
            self._enter(Activity.STEPPING)
        position = Position(Operation.STEP, 0, 0, step)
        plan = decide(gathered((row,), position), position, self._settings)
        return IDLE_PLAN if plan.over else plan

    def _enter_exchange(self, row: Row, position: Position) -> "_Entry":
        """From here on this rank will exchange a row, whatever happens. The caller holds `changed`."""
        rejected: LocalProtocolError | None = None
        place = self.group_rank
        try:
            mine = pack(row, position, place, self._core.stepper.attribution.waited_us)
        except LocalProtocolError as error:  # the others wait for a row: give them one that says so
            rejected, mine = error, pack(_FAILED_ROW, position, place)
        exchange = self._driver.exchange
        self._driver.gathering = exchange is not None
        self._enter(Activity.EXCHANGING)
        return _Entry(exchange, mine, position, place, len(self.group_ranks), rejected)

    def _begin_exchange(self, entry: "_Entry") -> "_Begun":
        began_ns = time.perf_counter_ns()
        try:
            if entry.exchange is None:  # given up between begin and here
                raise ExchangeInterruptedError("the exchange was given up")
            entry.exchange.begin(entry.mine, timeout_ms=self._core.timing.step_deadline_ms)
        except ExchangeError as error:
            raise self._left(error, entry.exchange, entry.position) from error
        return _Begun(entry, entry.exchange, time.perf_counter_ns() - began_ns)

    def _end_exchange(self, begun: "_Begun") -> Plan:
        """The one place where rows meet."""
        (_, mine, position, place, size, rejected), exchange, began_ns = begun
        since_ns = time.perf_counter_ns()
        try:
            data = exchange.end()
            waited_us = (time.perf_counter_ns() - since_ns) / 1000
            rows = unpack(data, size, mine, place)
        except (ExchangeError, RemoteProtocolError) as error:
            raise self._left(error, exchange, position) from error
        took_us = (began_ns + time.perf_counter_ns() - since_ns) / 1000
        plan = decide(rows, position, self._settings)
        with self._driver.changed:
            self._driver.gathering = False
            if effects := self._core.finish(plan, took_us, waited_us):
                self._driver.perform(effects)
            self._enter(Activity.IDLE if plan.over else Activity.STEPPING)
        if rejected is not None:
            raise rejected
        if plan.failed:
            raise RankFailedError(tuple(self.group_ranks[place] for place in plan.failed), plan.wave, plan.step)
        return plan

    def _left(self, error: Exception, exchange: Exchange | None, position: Position) -> Exception:
        """Out of an exchange that gave no rows: settle the state, and return the error for the engine."""
        with self._driver.changed:
            self._driver.gathering = False
            known, effects = self._core.leave_for_fault()
            if known is None and not self._core.closed:
                effects = self._core.fail(str(error), self._lost_by(error))
            self._driver.perform(effects)
        if exchange is not None:
            exchange.close()
        if self._core.closed:
            return AgentClosedError("the agent was closed during an exchange")
        if known is not None:
            return RankLostError(known.rank, known.wave, known.step, known.reason)
        if isinstance(error, (HeaderMismatchError, RowInvalidError)):
            return error
        return RankLostError(self._lost_by(error), position.wave, position.step, str(error))

    def _lost_by(self, error: Exception) -> int | None:
        """The rank that an exchange's error blames; the exchange knows only places."""
        place, ranks = blamed(error), self.group_ranks
        return ranks[place] if place is not None and place < len(ranks) else None

    def _fail_step(self) -> bool:
        """Tell the group that this rank cannot take its step. False: no wave runs, so nobody waits."""
        try:
            with self._driver.changed:
                if not self._lockstep or not self._core.stepper.running or self._core.closed:
                    return False
                entry = self._enter_exchange(*self._core.begin_failure(_FAILED_ROW))
            self._end_exchange(self._begin_exchange(entry))
        except (AgentError, RemoteProtocolError):
            pass  # the group knows, or there is none any more; the caller's own error says why
        return True

    def _end_if_begun(self) -> bool:
        """The others have our row and go on with it: be where they are. Whether there was something to end."""
        if self._begun is None:
            return False
        with contextlib.suppress(AgentError, RemoteProtocolError):
            self.end_step()
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
        if self._core.lost is None:
            return
        lost, effects = self._core.leave_for_fault()
        self._driver.perform(effects)
        if lost is not None:
            raise RankLostError(lost.rank, lost.wave, lost.step, lost.reason)

    def _enter(self, activity: Activity) -> None:
        if self._core.activity is not activity:
            self._core.activity = activity
            self._core.activity_since_ms = monotonic_ms()
