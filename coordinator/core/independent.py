"""Life of an independent (dense) deployment: who is up, and how loaded. Nothing else.

The law of this file: no command is ever sent, no rank waits for another, and a rank's death changes only its own row.
A wave message about such a deployment is a mistake of its sender: counted where everybody can see it, and dropped.
"""

from ...proto.messages import FirstRequest, FromRank, Halted, NeedWave, Phase, Started, WaveComplete
from .deployment import Deployment
from .members import MemberRecord


class Independent(Deployment):
    """A deployment of replicas that share nothing but a name."""

    def _heard(self, record: MemberRecord, message: FromRank, now_ms: int) -> None:
        if isinstance(message, Started | NeedWave | WaveComplete | Halted):
            self.wave_messages += 1
            self._drop("wave_message_to_dense")
        else:
            super()._heard(record, message, now_ms)

    def _asked(self, message: FirstRequest, now_ms: int) -> None:
        self.wave_messages += 1
        self._drop("wave_message_to_dense")

    def ready(self, now_ms: int) -> bool:
        """Whether requests can be served: any replica will do."""
        return len(self.members) > 0

    def check(self) -> None:
        """Raise AssertionError if an invariant of this deployment is broken."""
        super().check()
        assert self.phase is Phase.SERVING, f"a dense deployment is in phase {self.phase}"
        assert self.seq == 0 and self.wave == 0 and self.epoch == 0, "a dense deployment was given a command"
