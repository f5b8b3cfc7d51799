"""Regroups: an operator changes which ranks make up a lockstep deployment. What may be asked for, and how it stands.

    scale --to N      the first N places, up to the configured dp_size; prepared while the old group serves, then held,
                      then formed anew
    recover --shrink  those who are left after a fault

An operation has a deadline and ends as `done` or as `rolled_back` with the reason, which names who did not come or
did not answer.
"""

from enum import StrEnum
from typing import Annotated

import msgspec

from ...proto.messages import DP_SIZE_MAX


class ScaleWish(msgspec.Struct, frozen=True):
    """An operator wants the first `to` ranks to make up the group."""

    to: Annotated[int, msgspec.Meta(ge=1, le=DP_SIZE_MAX)]
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 60.0
    """When it has not come true by then, the old group goes on."""


class RecoverWish(msgspec.Struct, frozen=True):
    """An operator wants a faulted deployment to go on with the ranks that are left."""

    shrink: bool = True


class RegroupState(StrEnum):
    """How far an operation is."""

    PREPARING = "preparing"  # waits for ranks to register; the old group serves
    DRAINING = "draining"  # those who leave get no more requests, and finish what they have; the old group serves
    STOPPING = "stopping"  # the running wave ends, every rank is held
    FORMING = "forming"
    DONE = "done"
    ROLLED_BACK = "rolled_back"

    @property
    def is_over(self) -> bool:
        """Whether it stays so."""
        return self in (RegroupState.DONE, RegroupState.ROLLED_BACK)


class Regroup(msgspec.Struct, frozen=True):
    """One operation; the last one stays to be seen."""

    number: int
    target: tuple[int, ...]
    before: tuple[int, ...]
    """What to go back to; the same as `target` where there is no way back."""
    since_ms: int
    deadline_ms: int
    state: RegroupState
    detail: str = ""

    @property
    def leaving(self) -> frozenset[int]:
        """Ranks that will be spares."""
        return frozenset(self.before).difference(self.target)

    @property
    def unrouted(self) -> frozenset[int]:
        """Ranks that will be spares, from when nobody sends to them any more."""
        return self.leaving if self.state in (RegroupState.DRAINING, RegroupState.STOPPING) else frozenset()
