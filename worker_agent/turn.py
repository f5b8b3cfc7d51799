"""One turn of an engine's loop, so that a step cannot be left out unnoticed."""

from typing import Protocol

from ..proto.rows import DUMMY, Row
from .plan import Plan


class Steps(Protocol):
    """Whoever makes steps: see `RankAgent`."""

    def begin_step(self, row: Row = DUMMY) -> None:
        """Send the row."""

    def end_step(self) -> Plan:
        """Wait for the others."""
        ...


class Turn:
    """One turn of the engine's loop. Leaving it without `step` while a wave runs is an error that all ranks learn
    of. `begin` and `end` are a step in two halves, with the engine's own work between them.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.stepped = False

    def step(self, row: Row = DUMMY) -> Plan:
        """See `RankAgent.step`."""
        self.begin(row)
        return self.end()

    def begin(self, row: Row = DUMMY) -> None:
        """See `RankAgent.begin_step`."""
        self.stepped = True  # also when it raises: the others then know by the exchange
        self._steps.begin_step(row)

    def end(self) -> Plan:
        """See `RankAgent.end_step`."""
        return self._steps.end_step()
