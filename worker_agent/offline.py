"""One rank without a coordinator: batch inference with one process a rank.

There is nobody to ask for a start, so the first step of every rank begins the wave: the ranks' own calls are the
agreement. It ends at the exchange that shows no work on any rank, at the same step for all; a rank that has finished
early serves dummies until then.
"""

import threading

from ..proto.messages import Activity, HoldOrder, Kind, Load, Mode, Refused, Timing
from ..proto.rows import Position, Row
from .events import Effect, Hook, LostRank, Wake
from .exchange.base import Exchange
from .forming import OFFLINE_EPOCH
from .plan import Plan
from .stepper import Stepper


class OfflineCore:
    """Pure. The same engine-side door as `RankCore`, with nobody on the other side."""

    def __init__(self, rank: int, dp_size: int, kind: Kind, timing: Timing) -> None:
        self.kind = kind
        self.group_ranks = tuple(range(dp_size)) if kind.lockstep else (rank,)
        self.group_rank = rank if kind.lockstep else 0
        self.timing = timing
        self.stepper = Stepper(rank)
        self.stepper.epoch = OFFLINE_EPOCH
        self.mode = Mode.IDLE if kind.lockstep else Mode.SERVING
        self.exchange = ""
        self.lost: LostRank | None = None
        self.hold: HoldOrder | None = None
        self.refused: Refused | None = None
        self.closed = False
        self.activity = Activity.IDLE
        self.activity_since_ms = 0

    def formed(self, exchange: str, process_groups: int) -> None:
        """The exchange stands, and its pre-flight exchange has passed."""
        self.exchange = exchange
        self.stepper.process_groups += process_groups
        self.stepper.preflights += 1

    @property
    def must_step(self) -> bool:
        """Whether the engine has to call `step` now. A lockstep rank always may: the others call it as well."""
        return self.mode is not Mode.HALTED if self.kind.lockstep else self.stepper.has_work

    def begin(self, row: Row) -> tuple[Row, Position]:
        """Begin a step, and the wave with its first one."""
        if not self.stepper.running:
            self.stepper.begin_wave()
            self.mode = Mode.RUNNING
        return self.stepper.begin(row)

    def take_hook(self) -> Hook | None:
        """Nobody holds a run without a coordinator."""
        return None

    def hook_done(self, hook: Hook) -> list[Effect]:
        """See `take_hook`."""
        return []

    def begin_failure(self, row: Row) -> tuple[Row, Position]:
        """Begin whatever exchange the others wait in, to tell them that this rank cannot go on."""
        return self.stepper.begin_failure(row)

    def work_arrived(self) -> list[Effect]:
        """A request has been queued."""
        self.stepper.work_arrived()
        return [Wake()]

    def finish(self, plan: Plan, exchange_us: float, waited_us: float = 0.0) -> list[Effect]:
        """The exchange that was begun has given this plan."""
        if self.stepper.finish(plan, exchange_us, waited_us):
            self.mode = Mode.IDLE
        return []

    def fail(self, reason: str, lost: int | None) -> list[Effect]:
        """The exchange failed; without a coordinator there is no next group."""
        self.stepper.leave()
        self.mode = Mode.HALTED
        self.lost = LostRank(lost, self.stepper.wave, self.stepper.step, reason)
        return []

    def leave_for_fault(self) -> tuple[LostRank | None, list[Effect]]:
        """The fault that ended this group, if one did; it stays."""
        return self.lost, []

    def waits_for(self, now_ms: int) -> str:
        """What this rank waits for, in words."""
        return "work"


class OfflineDriver:
    """What `Control` is to a `RankCore`, without a thread or a socket."""

    def __init__(self, core: OfflineCore, exchange: Exchange | None) -> None:
        self.core = core
        self.changed = threading.Condition()
        self.exchange = exchange
        self.gathering = False
        self.broken: BaseException | None = None

    def perform(self, effects: list[Effect]) -> None:
        """Wake whoever waits. The caller holds `changed`."""
        if effects:
            self.changed.notify_all()

    def silent_ms(self) -> int:
        """There is no coordinator to be silent."""
        return 0

    def report_load(self, load: Load) -> None:
        """Nobody listens."""

    def announce_busy(self, busy_ms: int) -> None:
        """Nobody listens."""

    def close(self, reason: str) -> None:
        """Give the exchange up."""
        with self.changed:
            self.core.closed = True
            exchange, self.exchange = self.exchange, None
            self.changed.notify_all()
        if exchange is not None:
            exchange.interrupt()
            if not self.gathering:
                exchange.close()
