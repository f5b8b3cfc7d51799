"""The part of a lockstep deployment's life that changes its ranks: prepare -> everybody stops -> commit, or back. The
base of `Lockstep`.

The law of this file: the old group serves until all ranks of the new one are registered and those who leave have
finished their work; it is then held like by an operator, so nobody is in a step when the new group is formed; and if
the new one does not form in time, the old one is formed again. Never is a missing rank taken for a wish to shrink.
"""

import msgspec

from ...proto.messages import HoldMode, Phase, RankState
from .events import Level, Wish
from .holding import Holding
from .holds import AWAKE, HoldWish, Operation, Refusal
from .members import NEVER_MS, MemberRecord
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

    @property
    def regroup_in_progress(self) -> Regroup | None:
        """The change of ranks that has not ended, if there is one."""
        return None if self.regroup is None or self.regroup.state.is_over else self.regroup

    def _wished(self, wish: Wish, now_ms: int) -> Operation | Regroup | Refusal:
        regroup = self.regroup_in_progress
        match wish:
            case ScaleWish():
                return self._wished_scale(wish, now_ms)
            case RecoverWish():
                return self._wished_shrink(now_ms)
            case HoldWish() if regroup is not None:
                return self._busy(regroup)
            case _:
                return super()._wished(wish, now_ms)

    def _wished_scale(self, wish: ScaleWish, now_ms: int) -> Regroup | Refusal:
        target, places, regroup = tuple(range(wish.to)), self.members.places, self.regroup_in_progress
        if regroup is not None:
            return regroup if regroup.target == target else self._busy(regroup)
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

    def _busy(self, regroup: Regroup) -> Refusal:
        return Refusal("busy", f"regroup {regroup.number} is in progress ({regroup.state})")

    def _wished_shrink(self, now_ms: int) -> Regroup | Refusal:
        left, missing = tuple(record.rank for record in self.members.group()), self.members.missing()
        if self.phase is not Phase.FAULTED or not missing or not left:
            detail = (
                "only a faulted deployment that misses some of its ranks can be shrunk; "
                f"this one is {self.phase}, and misses {'rank ' + names(missing) if missing else 'none'}"
            )
            return Refusal("not_faulted", detail)
        self.members.move(left)
        return self._begin(left, left, RegroupState.FORMING, now_ms, NEVER_MS)

    def _begin(
        self, target: tuple[int, ...], before: tuple[int, ...], state: RegroupState, now_ms: int, deadline_ms: int
    ) -> Regroup:
        if self.regroup_in_progress is not None:
            self._move_on(RegroupState.ROLLED_BACK, f"the group was changed to rank {names(list(target))} instead")
        number = self.regroup.number + 1 if self.regroup is not None else 1
        self.regroup = Regroup(number, target, before, now_ms, deadline_ms, state)
        self._note(Level.INFO, f"regroup {number} to rank {names(list(target))} is {state}")
        return self.regroup

    def _regrouping(self, now_ms: int) -> bool:
        """Make at most one step of the operation; True if one was made."""
        regroup = self.regroup_in_progress
        if regroup is None:
            return False
        match regroup.state:
            case RegroupState.PREPARING:
                return self._preparing(regroup, now_ms)
            case RegroupState.DRAINING:
                return self._draining(regroup, now_ms)
            case RegroupState.STOPPING:
                return self._stopping(regroup, now_ms)
            case _:
                return self._committing(regroup, now_ms)

    def _preparing(self, regroup: Regroup, now_ms: int) -> bool:
        missing = self._not_prepared(regroup)
        if missing and now_ms >= regroup.deadline_ms:
            return self._move_on(RegroupState.ROLLED_BACK, f"rank {names(missing)} did not register in time")
        if missing or self.phase not in AWAKE:
            return False
        return self._move_on(RegroupState.DRAINING)  # from now on nobody sends to those who leave

    def _draining(self, regroup: Regroup, now_ms: int) -> bool:
        if self._not_prepared(regroup):
            return self._move_on(RegroupState.PREPARING)  # one that was there has gone again
        late = self._not_drained(regroup)
        if now_ms >= regroup.deadline_ms:
            reason = f"rank {names(late)} still had work at the deadline"
            return self._move_on(RegroupState.ROLLED_BACK, reason if late else f"it was {self.phase} at the deadline")
        if late or self.phase not in AWAKE:
            return False
        self._begin_hold(HoldWish(HoldMode.WAIT, f"regroup {regroup.number}"), now_ms, regroup=True)
        return self._move_on(RegroupState.STOPPING)

    def _stopping(self, regroup: Regroup, now_ms: int) -> bool:
        if self.phase is Phase.HELD and (late := self._not_drained(regroup)):  # sent to it before that was known
            self._resume(now_ms, f"rank {names(late)} has got more work, and will be a spare")
            return self._move_on(RegroupState.DRAINING)
        if self.phase is Phase.HELD and (missing := self._not_prepared(regroup)):
            self._resume(now_ms, f"rank {names(missing)} has gone, and would be part of the new group")
            return self._move_on(RegroupState.PREPARING)
        if self.phase is Phase.HELD:
            self.operation = None
            self.members.move(regroup.target)
            self._move_on(RegroupState.FORMING)
            return self._form(now_ms, f"from rank {names(list(regroup.before))} to rank {names(list(regroup.target))}")
        if self.phase is not Phase.HOLDING:  # a fault, or an operator's resume
            self.operation = self.operation if self.phase is Phase.RESUMING else None
            return self._move_on(RegroupState.ROLLED_BACK, f"it was {self.phase} before everybody had stopped")
        if now_ms < regroup.deadline_ms:
            return False
        not_held = names(self._not_held())
        self._resume(now_ms, f"regroup {regroup.number} is rolled back")
        return self._move_on(RegroupState.ROLLED_BACK, f"rank {not_held} did not stop in time")

    def _committing(self, regroup: Regroup, now_ms: int) -> bool:
        if self.phase in AWAKE:
            return self._move_on(RegroupState.DONE, f"epoch {self.epoch} is rank {names(list(regroup.target))}")
        if regroup.before == regroup.target:
            return False  # no way back: forming is tried again
        late = self.phase is Phase.FORMING and now_ms >= regroup.deadline_ms
        if not late and not self._form_failed and self.phase is not Phase.FAULTED:
            return False
        reason = self._form_failed or f"the new group {self.waits_for(now_ms)}"
        self.members.move(regroup.before)
        self._move_on(RegroupState.ROLLED_BACK, reason)
        if self.phase is Phase.FORMING and self.members.full:
            self._form(now_ms, f"rolled back ({reason})")
        elif self.phase is Phase.FORMING:
            self._break(self.members.missing()[0], reason, now_ms)
        return True

    def _move_on(self, state: RegroupState, detail: str = "") -> bool:
        assert self.regroup is not None
        self.members.version += 1  # published at once: who is routed to may have changed
        self.regroup = msgspec.structs.replace(self.regroup, state=state, detail=detail)
        level = Level.WARNING if state is RegroupState.ROLLED_BACK else Level.INFO
        self._note(level, f"regroup {self.regroup.number} is {state}{': ' if detail else ''}{detail}")
        return True

    def _not_prepared(self, regroup: Regroup) -> list[int]:
        """Ranks of the new group that are not there yet."""
        placed = {record.rank for record in self.members if self._is_placed(record)}
        return [rank for rank in regroup.target if rank not in placed]

    def _not_drained(self, regroup: Regroup) -> list[int]:
        """Ranks that will be spares, and hold work."""
        return [record.rank for record in self.members if record.rank in regroup.leaving and record.at.has_work]

    def _regroup_waits_for(self, now_ms: int) -> str:
        """What a change of ranks waits for while the old group serves."""
        regroup = self.regroup
        if regroup is None or regroup.state not in (RegroupState.PREPARING, RegroupState.DRAINING):
            return ""
        missing, late = self._not_prepared(regroup), self._not_drained(regroup)
        what = f"{names(missing)} to register" if missing else f"{names(late)} to finish all work"
        return f"regroup {regroup.number} waits for rank {what}, since {(now_ms - regroup.since_ms) / 1000:.1f} s"

    def _form(self, now_ms: int, why: str) -> bool:
        """Form the group of the present places; `Lockstep` says how."""
        raise NotImplementedError

    def _is_left_out(self, record: MemberRecord) -> bool:
        grouped = self.phase not in (Phase.GATHERING, Phase.FAULTED)
        return grouped and record.rank not in self.members.places

    def _rank_state(self, rank: int, now_ms: int) -> RankState:
        """A spare is not routed to, nor is a rank that will be one."""
        unrouted = self.regroup.unrouted if self.regroup is not None else frozenset()
        if rank not in self.members.places or rank in unrouted:
            return RankState(rank=rank)
        return super()._rank_state(rank, now_ms)
