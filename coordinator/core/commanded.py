"""A deployment whose ranks apply one history: commands with numbers, each sent to a rank until it is acknowledged.

The law of this file: whatever ranks must do alike is appended here once, for all of them and in one order, and
nowhere else. Losing, doubling or delaying a command changes when a rank applies it, never what it applies.
"""

from typing import Any

import msgspec

from ...proto.messages import Command, FromRank, Heartbeat, Start
from .deployment import Deployment
from .members import MemberRecord
from .specs import DeploymentSpec, FleetSpec
from .waiting import names

SENT_AGAIN_MAX = 16
"""Commands that are sent again to one rank at a time."""
CROSSING_MS = 50
"""How long a command and a heartbeat may cross on the way."""
_NOBODY = "0" * 16


class Commanded(Deployment):
    """Numbers, addresses, sends and sends again. What to command is decided in `Lockstep`."""

    def __init__(self, spec: DeploymentSpec, fleet: FleetSpec, term: int, now_ms: int) -> None:
        super().__init__(spec, fleet, term, now_ms)
        self._log: dict[int, Command] = {}
        self._phase_seq = 0
        """Number of the command that the present phase waits for."""
        self._resend_ms = max(20, fleet.timing.start_ack_timeout_ms // 8)

    def _heard(self, record: MemberRecord, message: FromRank, now_ms: int) -> None:
        """A heartbeat that acknowledges less than was sent a while ago: what was sent is lost, so send it again."""
        if isinstance(message, Heartbeat) and record.applied < self.seq and now_ms - record.sent_ms >= CROSSING_MS:
            self._send_from(record, record.applied + 1, now_ms)
        super()._heard(record, message, now_ms)

    def next_deadline_ms(self, now_ms: int) -> int:
        """When `tick` must be called again at the latest."""
        again = (record.sent_ms + self._resend_ms for record in self.members if record.applied < self.seq)
        return min([super().next_deadline_ms(now_ms), *again])

    def _command(self, kind: type[Command], **fields: Any) -> Command:
        """The next command, not yet addressed."""
        identity: dict[str, Any] = {"deployment": self.spec.name, "rank": 0, "incarnation": _NOBODY, "term": self.term}
        return kind(**identity, epoch=self.epoch, seq=self.seq + 1, **fields)

    def _append(self, command: Command, now_ms: int) -> None:
        self.seq = command.seq
        self._log[command.seq] = command
        self._phase_seq = command.seq
        for record in self.members:
            self._send_from(record, max(record.sent_seq, record.applied) + 1, now_ms)

    def _is_placed(self, record: MemberRecord) -> bool:
        """Whether this rank has said in this term where it stands: its registration may be a copy of long ago."""
        return record.at.term == self.term

    def _behind(self) -> list[int]:
        """Ranks that have not acknowledged the command that the present phase stands on."""
        return [record.rank for record in self.members.group() if record.applied < self._phase_seq]

    def _not_acknowledged(self, what: str, now_ms: int) -> bool:
        """Break the group if some rank has not acknowledged in time, busy ones excepted; True if so."""
        late = self._behind()
        waited_ms = now_ms - self.phase_since_ms
        if not late or waited_ms < self.timing.start_ack_timeout_ms or now_ms < self.members.busy_until_ms(late):
            return False
        self._break(late[0], f"rank {names(late)} did not acknowledge {what} within {waited_ms} ms", now_ms)
        return True

    def _break(self, lost: int, reason: str, now_ms: int) -> None:
        """The group is over; `Lockstep` says what follows."""
        raise NotImplementedError

    def _resend(self, now_ms: int) -> None:
        for record in self.members:
            if record.applied < self.seq and now_ms - record.sent_ms >= self._resend_ms:
                self._send_from(record, record.applied + 1, now_ms)
        self._prune()

    def _send_from(self, record: MemberRecord, seq: int, now_ms: int) -> None:
        for number in range(seq, min(self.seq, seq + SENT_AGAIN_MAX - 1) + 1):
            command = self._log[number]
            if isinstance(command, Start):
                self.wave_messages += 1
            self._send(record, msgspec.structs.replace(command, rank=record.rank, incarnation=record.incarnation))
        record.sent_seq, record.sent_ms = self.seq, now_ms

    def _prune(self) -> None:
        """Forget commands that everybody has acknowledged, but not the one that the present phase stands on."""
        oldest = min([self._phase_seq - 1, *(record.applied for record in self.members)])
        while self._log and (first := next(iter(self._log))) <= oldest:
            del self._log[first]
