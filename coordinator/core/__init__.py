"""The coordinator's decisions: pure, no sockets, clocks, threads or logging.

Reading order: `events` (what goes in and out), `specs`, `fleet` (the one door), `deployment` (what both kinds share),
`lockstep`, `independent`, `members` (registration and liveness), `feed`, `view` (what people see).
"""

from .events import Effect, Event, Junk, Level, Note, Publish, Received, Send, Tick
from .fleet import Fleet
from .specs import DeploymentSpec, FleetSpec

__all__ = [
    "DeploymentSpec",
    "Effect",
    "Event",
    "Fleet",
    "FleetSpec",
    "Junk",
    "Level",
    "Note",
    "Publish",
    "Received",
    "Send",
    "Tick",
]
