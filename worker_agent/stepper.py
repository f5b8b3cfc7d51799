"""Where one rank stands inside its waves: pure, and the same with or without a coordinator.

The law of this file: a step is begun with a row and finished with the plan of the exchange, and nothing else moves
`wave` and `step`. Work is remembered until a row has carried it: a request that arrives after the row was written
still asks for a wave.
"""

from collections import deque

import msgspec

from ..proto.errors import LocalProtocolError
from ..proto.messages import Counters
from ..proto.rows import Operation, Position, Row
from .attribution import Attribution
from .plan import Outcome, Plan, Role

EXCHANGE_SAMPLES_MAX = 2048
"""Latest exchange times that p50 and p99 are taken of."""


class Stepper:
    """The step loop of one rank, as numbers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.epoch = 0
        self.wave = 0
        self.step = 0
        self.running = False
        self.inside = False
        """The engine's thread is between `begin` and `finish`."""
        self.process_groups = 0
        self.preflights = 0
        self.wave_messages = 0
        self.attribution = Attribution()
        self.ended_at = (0, 0)
        """Wave and step of the exchange that ended the last wave; the same on all ranks of a group."""
        self._arrived = False
        """Work was announced since the last row was written."""
        self._row_work = False
        """The last row carried work."""
        self._substep = 0
        self._substeps = 0
        self._waves = 0
        self._empty_waves = 0
        self._steps = 0
        self._dummy_steps = 0
        self._group_operations = 0
        self._forwards = 0
        self._idle_exchanges = 0
        self._steps_after_last_work = 0
        self._exchange_us: deque[float] = deque(maxlen=EXCHANGE_SAMPLES_MAX)

    @property
    def has_work(self) -> bool:
        """Whether this rank holds work, as far as it has said so."""
        return self._arrived or self._row_work

    def work_arrived(self) -> None:
        """A request has been queued (call it after queueing, or the next row may miss it)."""
        self._arrived = True

    def forget_work(self) -> None:
        """What was announced and not run will not be run."""
        self._arrived = self._row_work = False

    def begin_wave(self) -> None:
        """Enter the wave that `self.wave` numbers."""
        self.running, self.step = True, 0
        self._forwards = self._idle_exchanges = 0

    def begin(self, row: Row) -> tuple[Row, Position]:
        """Return the row to exchange and where. Only while a wave runs."""
        if self._substep < self._substeps:
            raise LocalProtocolError(
                f"step {self.step} has {self._substeps} sub-steps and {self._substep} were run: "
                "call substep() for the others first, the other ranks wait in them"
            )
        # A failed step finishes no work, so what the last row carried is still there.
        if (self._arrived or (row.local_error and self._row_work)) and not row.has_work:
            row = msgspec.structs.replace(row, has_work=True)
        self._arrived, self._row_work = False, row.holds_work
        self.inside = True
        return row, Position(Operation.STEP, self.epoch, self.wave, self.step + 1)

    def begin_substep(self, row: Row) -> tuple[Row, Position]:
        """The same for a further pass of the step that is under way."""
        if self._substep >= self._substeps:
            raise LocalProtocolError(f"step {self.step} has {self._substeps} sub-steps, and all were run")
        self.inside = True
        return row, Position(Operation.SUBSTEP, self.epoch, self.wave, self.step, self._substep + 1)

    def begin_failure(self, row: Row) -> tuple[Row, Position]:
        """Begin whatever exchange the others wait in, to tell them that this rank cannot go on."""
        return self.begin_substep(row) if self._substep < self._substeps else self.begin(row)

    def finish(self, plan: Plan, exchange_us: float, waited_us: float = 0.0) -> bool:
        """Take in the plan of the exchange that was begun, and how long it took. True: it ended the wave."""
        self.inside = False
        self._group_operations += 1
        self._exchange_us.append(exchange_us)
        self.attribution.count(plan, self.rank, exchange_us, waited_us)
        if plan.substep:
            # After a failure all ranks leave the rest of the step out; all have seen it.
            self._substep, self._substeps = plan.substep, 0 if plan.failed else self._substeps
            return False
        self.step = plan.step
        self._substep, self._substeps = 0, plan.substeps
        self._steps += 1
        self._idle_exchanges = 0 if plan.has_work else self._idle_exchanges + 1
        if plan.outcome is Outcome.FORWARD:
            self._forwards += 1
            self._dummy_steps += plan.role(self.rank) is Role.DUMMY
        if plan.outcome not in (Outcome.WAVE_ENDED, Outcome.HELD):
            return False
        self._end_wave()
        return True

    def alone(self, row: Row) -> int:
        """A step of an independent rank: nothing is exchanged. Returns its number, from 1."""
        # Work that was announced after this row was written is still work: the next wait must not sleep over it.
        self._arrived, self._row_work = False, row.holds_work or self._arrived
        self._steps += 1
        return self._steps

    def leave(self) -> None:
        """The exchange of this epoch is over for us, in the middle of whatever was going on."""
        self.running = self.inside = False
        self._substep = self._substeps = 0

    @property
    def last_wave_was_empty(self) -> bool:
        """Whether the wave that ended last ran no forward."""
        return self._forwards == 0

    def counters(self) -> Counters:
        """Everything counted since this life began."""
        times = sorted(self._exchange_us)
        return Counters(
            waves=self._waves,
            empty_waves=self._empty_waves,
            steps=self._steps,
            dummy_steps=self._dummy_steps,
            steps_after_last_work=self._steps_after_last_work,
            group_operations=self._group_operations,
            preflights=self.preflights,
            process_groups=self.process_groups,
            wave_messages=self.wave_messages,
            costs=self.attribution.costs(),
            exchange_p50_us=round(times[len(times) // 2], 1) if times else 0.0,
            exchange_p99_us=round(times[len(times) * 99 // 100], 1) if times else 0.0,
        )

    def _end_wave(self) -> None:
        self.ended_at = self.wave, self.step
        self._waves += 1
        self._empty_waves += self._forwards == 0
        self._steps_after_last_work = max(self._steps_after_last_work, self._idle_exchanges)
        self.wave += 1
        self.running, self.step = False, 0
        self._substep = self._substeps = 0
