"""Holds: an operator's pause of a lockstep deployment, for a weight update or for sleep. One operation at a time.

    (IDLE, STARTING, RUNNING) --hold--> HOLDING --every rank held at the same wave, its device idle--> HELD
    --resume--> RESUMING --> IDLE

The law of this file: an operation is refused with a reason or it is done to its end; asking for the same one again
(by its key) tells where it stands. What a hold means for waves is decided in `lockstep`; here is who asked for what,
and what is said to whom.
"""

from typing import Annotated

import msgspec

from ...proto.messages import HoldMode, HoldOrder, Phase

AWAKE = (Phase.IDLE, Phase.STARTING, Phase.RUNNING)
"""Phases in which a formed deployment serves: the ones that a hold leads out of and a resume leads back to."""


class HoldWish(msgspec.Struct, frozen=True):
    """An operator wants the deployment held."""

    mode: HoldMode = HoldMode.WAIT
    key: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """The operator's own name of this operation: asking again with it is not a second operation."""
    refuse: bool = False
    """What happens to starts that are asked for meanwhile: refused with a reason, or (False) remembered and served
    after.
    """


class ResumeWish(msgspec.Struct, frozen=True):
    """An operator wants the deployment to go on."""

    operation: int | None = None
    """The hold that is meant; absent: whichever is in force."""


class Operation(msgspec.Struct, frozen=True):
    """A hold that is in force, or coming into force, or ending."""

    number: int
    wish: HoldWish
    since_ms: int
    regroup: bool = False
    """Made by a change of ranks, not by an operator."""
    over: bool = False
    """Found at the start of a term, and nobody wants it any more: ranks that are still under it must be told so."""
    refused: int = 0
    """Starts that were refused because of it."""


def order_of(operation: Operation) -> HoldOrder:
    """As ranks are told it."""
    wish = operation.wish
    return HoldOrder(operation.number, wish.mode, wish.key, wish.refuse, operation.regroup)


def operation_of(order: HoldOrder, now_ms: int) -> Operation:
    """As ranks remember it, when a coordinator finds it at its start: a change of ranks has ended with the last one."""
    wish = HoldWish(order.hold_mode, order.key, order.refuse)
    return Operation(order.operation, wish, now_ms, order.regroup, over=order.regroup)


class Refusal(msgspec.Struct, frozen=True):
    """Why an operator's wish had no effect."""

    reason: str
    """`busy`, `not_held`, `not_formed`, `dense`, `other_operation` or `unknown_deployment`."""
    detail: str


def judge_hold(wish: HoldWish, operation: Operation | None, phase: Phase, waits_for: str) -> Operation | Refusal | None:
    """The operation that this wish already is, or why there can be none now; None: it may begin."""
    if operation is not None and not operation.over:
        if wish.key and wish.key == operation.wish.key:
            return operation
        return Refusal("busy", f"hold operation {operation.number} is in progress ({phase}); resume it first")
    if phase not in AWAKE:
        return Refusal("not_formed", f"the deployment is {phase}: {waits_for}")
    return None


def judge_resume(wish: ResumeWish, operation: Operation | None, phase: Phase) -> Refusal | None:
    """Why there is nothing to resume, or None."""
    if operation is None:
        return Refusal("not_held", f"no hold is in force; the deployment is {phase}")
    if wish.operation not in (None, operation.number):
        return Refusal("other_operation", f"hold operation {operation.number} is in force, not {wish.operation}")
    return None
