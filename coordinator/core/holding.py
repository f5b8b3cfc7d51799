"""The part of a lockstep deployment's life that an operator makes: hold, held, resume. The base of `Lockstep`.

The law of this file: a hold is a command in the log like any other, so every rank sees it at the same place in its
history. Held is published when every rank says so of itself, at one wave; until an operator resumes, no start is
sent. A hold outlives a fault: the next group is held.
"""

import msgspec

from ...proto.messages import Hold, Mode, Phase, Resume
from .commanded import Commanded
from .events import Wish
from .holds import HoldWish, Operation, Refusal, ResumeWish, judge_hold, judge_resume, operation_of, order_of
from .regroups import Regroup
from .specs import DeploymentSpec, FleetSpec


class Holding(Commanded):
    """Carries out one hold at a time."""

    def __init__(self, spec: DeploymentSpec, fleet: FleetSpec, term: int, now_ms: int) -> None:
        super().__init__(spec, fleet, term, now_ms)
        self.waves_run = 0
        self._counted_wave = -1
        self.operation: Operation | None = None
        """The hold that is in force, coming or ending; it outlives a fault."""
        self._operations = 0

    @property
    def refuses(self) -> bool:
        """Whether new requests are turned away for now."""
        return self.operation is not None and self.operation.wish.refuse

    def _turned_away(self) -> str:
        """Why a start that is asked for now is refused, or an empty text."""
        operation = self.operation
        if operation is None or not operation.wish.refuse:
            return ""
        self.operation = msgspec.structs.replace(operation, refused=operation.refused + 1)
        return f"held by operation {operation.number}; try again when it has been resumed"

    def _wished(self, wish: Wish, now_ms: int) -> Operation | Regroup | Refusal:
        match wish:
            case HoldWish():
                return self._wished_hold(wish, now_ms)
            case ResumeWish():
                return self._wished_resume(wish, now_ms)
            case _:
                return super()._wished(wish, now_ms)

    def _wished_hold(self, wish: HoldWish, now_ms: int) -> Operation | Refusal:
        judged = judge_hold(wish, self.operation, self.phase, self.waits_for(now_ms))
        if judged is not None:
            return judged
        return self._begin_hold(wish, now_ms)

    def _wished_resume(self, wish: ResumeWish, now_ms: int) -> Operation | Refusal:
        operation, refusal = self.operation, judge_resume(wish, self.operation, self.phase)
        if refusal is not None or operation is None:
            return refusal or Refusal("not_held", "no hold is in force")
        if self.phase in (Phase.HOLDING, Phase.HELD):
            self._resume(now_ms, "an operator resumes")
        elif self.phase is Phase.GATHERING:
            self.operation = msgspec.structs.replace(operation, over=True)
        elif self.phase is not Phase.RESUMING:  # faulted or forming: nothing to undo, but nothing will be held any more
            self.operation = None
        return operation

    def _learn_hold(self, now_ms: int) -> None:
        """A hold outlives the coordinator that was asked for it: its ranks know it."""
        known = [record.register for record in self.members.group() if self._is_placed(record)]
        orders = [register.hold for register in known if register.hold is not None]
        newest = max(orders, key=lambda order: order.operation, default=None)
        if newest is not None and (self.operation is None or newest.operation > self.operation.number):
            self.operation = operation_of(newest, now_ms)
        resumed = max((register.resumed for register in known), default=0)
        if self.operation is not None and resumed >= self.operation.number:
            self.operation = msgspec.structs.replace(self.operation, over=True)
        self._operations = max(self._operations, resumed, newest.operation if newest is not None else 0)

    def _begin_hold(self, wish: HoldWish, now_ms: int, regroup: bool = False) -> Operation:
        self._operations += 1
        operation = self.operation = Operation(self._operations, wish, now_ms, regroup)
        self._hold(now_ms)
        return operation

    def _resume(self, now_ms: int, why: str) -> None:
        operation = self.operation
        assert operation is not None
        self._append(self._command(Resume, operation=operation.number), now_ms)
        self._enter(Phase.RESUMING, now_ms, f"hold operation {operation.number} ends: {why}")

    def _hold(self, now_ms: int) -> bool:
        operation = self.operation
        assert operation is not None
        self._append(self._command(Hold, order=order_of(operation)), now_ms)
        self._enter(Phase.HOLDING, now_ms, f"hold operation {operation.number}, mode {operation.wish.mode}")
        return True

    def _holding(self, now_ms: int) -> bool:
        self._follow_wave()
        if self._not_acknowledged("the hold", now_ms):
            return True
        waves = {record.at.wave for record in self.members.group()}
        if len(waves) != 1 or self._not_held():
            return False
        self._enter(Phase.HELD, now_ms, f"every rank is held at wave {self.wave}, its device idle")
        return True

    def _held(self, now_ms: int) -> bool:
        """Only an operator ends this; a rank that says otherwise is told again."""
        self._follow_wave()
        return bool(self._not_held()) and self._hold(now_ms)

    def _resuming(self, now_ms: int) -> bool:
        self._follow_wave()
        if self._behind():
            return self._not_acknowledged("the end of the hold", now_ms)
        self.operation = None
        self._enter(Phase.IDLE, now_ms, "every rank has resumed")
        return True

    def _follow_wave(self) -> None:
        """A hold in `wait` mode lets the running wave end."""
        wave = max(record.at.wave for record in self.members.group())
        if wave > self.wave:
            self._count_wave()
            self.wave = wave

    def _not_held(self) -> list[int]:
        """Ranks that have not said that they are held since the present command."""
        return [r.rank for r in self.members.group() if r.at.mode is not Mode.HELD or r.applied < self._phase_seq]

    def _count_wave(self) -> None:
        """The present wave has run."""
        if self._counted_wave < self.wave:
            self._counted_wave = self.wave
            self.waves_run += 1
