"""The part of a lockstep deployment's life that changes its ranks: prepare -> everybody stops -> commit, or back. The
base of `Lockstep`.

The law of this file: the old group serves until all ranks of the new one are registered; it is then held like by an
operator, so nobody is in a step when the new group is formed; and if the new one does not form in time, the old one
is formed again. Never is a missing rank taken for a wish to shrink.
"""

import msgspec

from ...proto.messages import HoldMode, Phase, RankState, Resume
from .events import Wish
from .holding import Holding
from .holds import AWAKE, HoldWish, Operation, Refusal
from .members import NEVER_MS
from .regroups import RecoverWish, Regroup, RegroupState, ScaleWish
from .specs import DeploymentSpec, FleetSpec
from .waiting import names


class Regrouping(Holding):
    """Carries out one change of ranks at a time."""

    def __init__(self, spec: DeploymentSpec, fleet: FleetSpec, term: int, now_ms: int) -> None:
        super().__init__(spec, fleet, term, now_ms)
        self.regroup: Regroup | None = None
        self._form_failed = ""
        """Why the group of this epoch cannot be formed, as some rank has said."""

    def _wished(self, wish: Wish, now_ms: int) -> Operation | Regroup | Refusal:
        match wish:
            case ScaleWish():
                return self._wished_scale(wish, now_ms)
            case RecoverWish():
                return self._wished_shrink(now_ms)
            case HoldWish() if self.regroup is not None and self.regroup.in_progress:
                return Refusal("busy", f"regroup {self.regroup.number} is in progress ({self.regroup.state})")
            case _:
                return super()._wished(wish, now_ms)

    def _wished_scale(self, wish: ScaleWish, now_ms: int) -> Regroup | Refusal:
        target, places = tuple(range(wish.to)), self.members.places
        if self.regroup is not None and self.regroup.in_progress:
            if self.regroup.target == target:
                return self.regroup
            return Refusal("busy", f"regroup {self.regroup.number} is in progress ({self.regroup.state})")
        if self.operation is not None:
            return Refusal("busy", f"hold operation {self.operation.number} is in force; resume it first")
        if wish.to > self.spec.dp_size:
            detail = f"to must be in 1..{self.spec.dp_size}, the configured dp_size, got {wish.to}"
            return Refusal("out_of_range", detail)
        if target == places:
            return Refusal("no_change", f"the group already is rank {names(list(places))}")
        if self.phase not in AWAKE:
            return Refusal("not_formed", f"the deployment is {self.phase}: {self.waits_for(now_ms)}")
        deadline_ms = now_ms + round(wish.deadline_s * 1000)
        return self._begin(target, places, RegroupState.PREPARING, now_ms, deadline_ms)

    def _wished_shrink(self, now_ms: int) -> Regroup | Refusal:
        left = tuple(record.rank for record in self.members.group())
        if self.phase is not Phase.FAULTED or not self.members.missing() or not left:
            detail = f"only a faulted deployment that misses some of its ranks can be shrunk; this one is {self.phase}"
            return Refusal("not_faulted", detail)
        self.members.move(left)
        return self._begin(left, left, RegroupState.FORMING, now_ms, NEVER_MS)

    def _begin(
        self, target: tuple[int, ...], before: tuple[int, ...], state: RegroupState, now_ms: int, deadline_ms: int
    ) -> Regroup:
        number = self.regroup.number + 1 if self.regroup is not None else 1
        self.regroup = Regroup(number, target, before, now_ms, deadline_ms, state)
        return self.regroup

    def _regrouping(self, now_ms: int) -> bool:
        """Make at most one step of the operation; True if one was made."""
        regroup = self.regroup
        if regroup is None or not regroup.in_progress:
            return False
        match regroup.state:
            case RegroupState.PREPARING:
                return self._preparing(regroup, now_ms)
            case RegroupState.STOPPING:
                return self._stopping(regroup, now_ms)
            case _:
                return self._committing(regroup, now_ms)

    def _preparing(self, regroup: Regroup, now_ms: int) -> bool:
        records = {record.rank: record for record in self.members}
        missing = [rank for rank in regroup.target if rank not in records or not self._is_placed(records[rank])]
        if missing and now_ms >= regroup.deadline_ms:
            return self._end(RegroupState.ROLLED_BACK, f"rank {names(missing)} did not register in time")
        if missing or self.phase not in AWAKE:
            return False
        self._operations += 1
        self.operation = Operation(self._operations, HoldWish(HoldMode.WAIT, f"regroup {regroup.number}"), now_ms)
        self.regroup = msgspec.structs.replace(regroup, state=RegroupState.STOPPING)
        return self._hold(now_ms)

    def _stopping(self, regroup: Regroup, now_ms: int) -> bool:
        if self.phase is Phase.HELD:
            self.operation = None
            self.members.move(regroup.target)
            self.regroup = msgspec.structs.replace(regroup, state=RegroupState.FORMING)
            return self._form(now_ms, f"from rank {names(list(regroup.before))} to rank {names(list(regroup.target))}")
        if self.phase is not Phase.HOLDING:  # a fault, or an operator's resume
            self.operation = self.operation if self.phase is Phase.RESUMING else None
            return self._end(RegroupState.ROLLED_BACK, f"it was {self.phase} before everybody had stopped")
        if now_ms < regroup.deadline_ms or self.operation is None:
            return False
        not_held = names(self._not_held())
        self._append(self._command(Resume, operation=self.operation.number), now_ms)
        self._enter(Phase.RESUMING, now_ms, f"regroup {regroup.number} is rolled back")
        return self._end(RegroupState.ROLLED_BACK, f"rank {not_held} did not stop in time")

    def _committing(self, regroup: Regroup, now_ms: int) -> bool:
        if self.phase in AWAKE:
            return self._end(RegroupState.DONE, f"epoch {self.epoch} is rank {names(list(regroup.target))}")
        if regroup.before == regroup.target:
            return False  # no way back: forming is tried again
        late = self.phase is Phase.FORMING and now_ms >= regroup.deadline_ms
        if not late and not self._form_failed and self.phase is not Phase.FAULTED:
            return False
        reason = self._form_failed or self.waits_for(now_ms)
        self.members.move(regroup.before)
        self._end(RegroupState.ROLLED_BACK, reason)
        if self.phase is Phase.FORMING and self.members.full:
            self._form(now_ms, f"rolled back ({reason})")
        elif self.phase is Phase.FORMING:
            self._break(self.members.missing()[0], reason, now_ms)
        return True

    def _end(self, state: RegroupState, detail: str) -> bool:
        assert self.regroup is not None
        self.regroup = msgspec.structs.replace(self.regroup, state=state, detail=detail)
        return True

    def _form(self, now_ms: int, why: str) -> bool:
        """Form the group of the present places; `Lockstep` says how."""
        raise NotImplementedError

    def _rank_state(self, rank: int, now_ms: int) -> RankState:
        """A spare is not routed to."""
        return super()._rank_state(rank, now_ms) if rank in self.members.places else RankState(rank=rank)
