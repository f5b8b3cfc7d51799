"""What the core is told at its birth: the deployments, the time budget, and who it is."""

import msgspec

from ...proto.messages import Kind, Setting, Timing


class DeploymentSpec(msgspec.Struct, frozen=True):
    """One deployment, as configured."""

    name: str
    kind: Kind
    dp_size: int
    exchange: str = "auto"
    settings: dict[str, Setting] = {}
    """Values that every rank must have; keys that are not named here are compared between the ranks."""


class FleetSpec(msgspec.Struct, frozen=True):
    """Everything the core needs to know of its surroundings."""

    boot: str
    """Random id of this life of the coordinator, 16 hexadecimal digits; it makes group tokens unique."""
    term: int
    deployments: tuple[DeploymentSpec, ...]
    feed: str = ""
    timing: Timing = Timing()
    publish_interval_ms: int = 100
    publish_keepalive_ms: int = 1_000
