"""What the status endpoint tells, who gives it, and the words that the page and the command line share.

The law of this file: plain data, no HTTP. The client of the command line loads it, and must stay quick to start.
"""

from typing import Protocol

import msgspec

from ..core.view import DeploymentView, FleetView, RankView

API_VERSION = "v1"


class StatusUnavailableError(Exception):
    """The coordinator's loop did not answer in time; `detail` says how long was waited. The process itself lives."""

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(detail)

    def __str__(self) -> str:
        return self.detail


class ServiceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's own process; known without asking its loop."""

    version: str
    started_at: str
    """RFC 3339, UTC. The only wall-clock time that is told."""
    uptime_s: float
    control: str
    feed: str
    http: str
    config_hash: str
    stopping: bool


class Status(FleetView, frozen=True, kw_only=True):
    """The body of `/v1/status`: the whole fleet, and the process that coordinates it."""

    api_version: str = API_VERSION
    coordinator: ServiceInfo


class StatusSource(Protocol):
    """Who knows. Its methods are called on the HTTP server's thread and must change nothing."""

    async def fleet(self) -> FleetView:
        """Everything, as of now.

        Raises:
            StatusUnavailableError: The loop did not answer within its deadline, which is 1 s at most.
        """
        ...

    def info(self) -> ServiceInfo:
        """What is true of the process, whatever its loop does. Never waits."""
        ...


class Readiness(msgspec.Struct, frozen=True):
    """Whether every deployment can serve. `degraded` ones can, but miss ranks."""

    ready: bool
    reasons: list[str]
    degraded: list[str]


def status_of(fleet: FleetView, info: ServiceInfo) -> Status:
    """Both halves in one struct."""
    return Status(coordinator=info, **msgspec.structs.asdict(fleet))


def readiness(status: Status) -> Readiness:
    """Judge a status. A coordinator that stops is not ready, whatever its deployments are."""
    stopping = ["the coordinator is stopping"] if status.coordinator.stopping else []
    return Readiness(
        ready=status.ready and not stopping,
        reasons=[*stopping, *status.not_ready],
        degraded=[f"{d.name} {degraded}" for d in status.deployments if d.ready and (degraded := degradation(d))],
    )


def degradation(deployment: DeploymentView) -> str:
    """`has 3 of 4 ranks`, or empty if it has all."""
    missing = deployment.ranks_up < deployment.dp_size
    return f"has {deployment.ranks_up} of {deployment.dp_size} ranks" if missing else ""


def coordination_cost(deployment: DeploymentView) -> str:
    """What the group costs; a dense deployment shows three counted zeros."""
    return (
        f"group operations {deployment.group_operations}, process groups {deployment.process_groups}, "
        f"wave messages {deployment.wave_messages}"
    )


def exchange_words(deployment: DeploymentView) -> str:
    """`shm (why)`, or that there is none yet."""
    exchange = deployment.exchange
    return f"{exchange.backend} ({exchange.reason})" if exchange else "none yet"


def last_share(rank: RankView) -> str:
    """In how many of its exchanges the others waited for this rank: `42 %`, or `-` if there was none."""
    counters = rank.counters
    return percent(counters.costs.last_arrivals / counters.group_operations) if counters.group_operations else "-"


def duration(seconds: float) -> str:
    """`0.2 s`, `45 s`, `12 min`, `5 h`, `3 d`: short enough for a table."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for unit, unit_s, limit_s in (("s", 1, 120), ("min", 60, 7_200), ("h", 3_600, 172_800)):
        if seconds < limit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def percent(ratio: float) -> str:
    """`42 %`."""
    return f"{ratio * 100:.0f} %"
