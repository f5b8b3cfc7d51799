"""What can happen to the core, and what it can ask for. Nothing else goes in or out.

An event is a decoded message, a frame that could not be decoded, or the passing of time. An effect is
"send this to that peer", "publish this", or "say this to the operator".
"""

from enum import StrEnum

import msgspec

from ...proto.messages import Message
from .holds import HoldWish, Operation, Refusal, ResumeWish
from .regroups import RecoverWish, Regroup, ScaleWish

Wish = HoldWish | ResumeWish | ScaleWish | RecoverWish


class Received(msgspec.Struct, frozen=True):
    """A decoded message; `peer` is the transport's name for the way back."""

    peer: bytes
    message: Message


class Junk(msgspec.Struct, frozen=True):
    """A frame that is not part of the protocol. `answerable`: the header was ours, so the sender may be told."""

    peer: bytes
    reason: str
    detail: str
    answerable: bool = False


class Wished(msgspec.Struct, frozen=True):
    """An operator wants something; comes back as `Answer` with the same token."""

    token: int
    deployment: str
    wish: Wish


class Ended(msgspec.Struct, frozen=True):
    """The process of this incarnation has ended; seen by a coordinator on the same machine."""

    deployment: str
    rank: int
    incarnation: str


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Event = Received | Junk | Wished | Ended | Tick


class Level(StrEnum):
    """How loud a note is."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Send(msgspec.Struct, frozen=True):
    """Send `message` to `peer` on the control socket."""

    peer: bytes
    message: Message


class Publish(msgspec.Struct, frozen=True):
    """Publish `message` on the feed, under the deployment's topic."""

    deployment: str
    message: Message


class Note(msgspec.Struct, frozen=True):
    """A decision, with its reason: goes to the log, once."""

    level: Level
    text: str
    deployment: str = ""


class Answer(msgspec.Struct, frozen=True):
    """What became of an operator's wish."""

    token: int
    answer: Operation | Regroup | Refusal


Effect = Send | Publish | Note | Answer
