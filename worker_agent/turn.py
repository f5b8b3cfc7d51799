"""One turn of an engine's loop, so that a step cannot be left out unnoticed."""

from collections.abc import Callable

from ..proto.rows import DUMMY, Row
from .plan import Plan


class Turn:
    """One turn of the engine's loop. Leaving it without `step` while a wave runs is an error that all ranks learn
    of.
    """

    def __init__(self, step: Callable[[Row], Plan]) -> None:
        self._step = step
        self.stepped = False

    def step(self, row: Row = DUMMY) -> Plan:
        """See `RankAgent.step`."""
        self.stepped = True  # also when it raises: the others then know by the exchange
        return self._step(row)
