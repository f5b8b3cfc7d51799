"""The coordinator's decisions: pure, no sockets, clocks, threads or logging.

Reading order: `events` (what goes in and out), `specs`, `fleet` (the one door), `deployment` (what both kinds share),
`commanded` (one history for all ranks), `holding` and `regrouping` (what an operator makes of it), `lockstep`,
`independent`, `holds` and `regroups` (what an operator may ask for), `members` (registration and liveness), `replies`
(who cannot be followed is told why), `waiting` (who waits for whom, in words), `feed`, `view` (what people see).
"""

from .events import Answer, Effect, Ended, Event, Junk, Level, Note, Publish, Received, Send, Tick, Wished
from .fleet import Fleet
from .specs import DeploymentSpec, FleetSpec

__all__ = [
    "Answer",
    "DeploymentSpec",
    "Effect",
    "Ended",
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
    "Wished",
]
