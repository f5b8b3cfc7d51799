"""What can happen to a rank's core, and what it can ask for; the counterpart of `coordinator/core/events.py`."""

from enum import StrEnum
from typing import Any

import msgspec

from ..proto.messages import Form, FromRank, Kind, Load, Message, Setting


class Identity(msgspec.Struct, frozen=True):
    """What a rank says of itself when it registers; see `Register`."""

    deployment: str
    rank: int
    incarnation: str
    kind: Kind
    dp_size: int
    settings: dict[str, Setting] = {}
    host: str = ""
    process: str = ""
    rendezvous: str = ""
    exchanges: tuple[str, ...] = ()
    serve: str = ""
    attributes: dict[str, str] = {}

    def of_registration(self) -> dict[str, Any]:
        """Fields of `Register` that stay the same for a whole life."""
        return {
            "kind": self.kind,
            "dp_size": self.dp_size,
            "settings": self.settings,
            "host": self.host,
            "process": self.process,
            "rendezvous": self.rendezvous,
            "exchanges": list(self.exchanges),
            "serve": self.serve,
            "attributes": self.attributes,
        }


class Received(msgspec.Struct, frozen=True):
    """A message of the coordinator."""

    message: Message


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class LoadChanged(msgspec.Struct, frozen=True):
    """The engine's queue has changed."""

    load: Load


class BusyUntil(msgspec.Struct, frozen=True):
    """The engine has announced a long operation; 0 ends it."""

    until_ms: int


class Built(msgspec.Struct, frozen=True):
    """The exchange of this group stands and its pre-flight exchange has passed."""

    group: str
    exchange: str
    process_groups: int


class BuildFailed(msgspec.Struct, frozen=True):
    """The exchange of this group could not be built."""

    group: str
    reason: str


class Closing(msgspec.Struct, frozen=True):
    """The engine stops."""

    reason: str


Event = Received | Tick | LoadChanged | BusyUntil | Built | BuildFailed | Closing


class Send(msgspec.Struct, frozen=True):
    """Send to the coordinator; if there is no connection the message is dropped, a later one makes up for it."""

    message: FromRank


class Build(msgspec.Struct, frozen=True):
    """Build the exchange of this command and run its pre-flight exchange; comes back as `Built` or `BuildFailed`."""

    form: Form


class Interrupt(msgspec.Struct, frozen=True):
    """Interrupt and give up the present exchange, whatever goes on in it."""


class Alarm(msgspec.Struct, frozen=True):
    """The engine may sit in a collective of its own that nobody will complete: call `EngineHooks.rank_lost`."""

    lost: "LostRank"


class Wake(msgspec.Struct, frozen=True):
    """Whoever waits on this rank's state should look again."""


class Note(msgspec.Struct, frozen=True):
    """For the log."""

    text: str


Effect = Send | Build | Interrupt | Alarm | Wake | Note


class Hook(StrEnum):
    """What the engine's thread is called for; see `EngineHooks`."""

    HOLD = "hold"
    DEVICE_IDLE = "device_idle"
    RESUME = "resume"
    SPARE = "spare"


class LostRank(msgspec.Struct, frozen=True):
    """Why the engine must leave its step."""

    rank: int | None
    wave: int
    step: int
    reason: str
