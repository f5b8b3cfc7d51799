"""What people see: plain structs, made from the core's state on request, ready for JSON.

Ages and durations are seconds by the coordinator's own monotonic clock; no time stamp of another machine is ever used.
"""

import msgspec

from ...proto.messages import Activity, Counters, HoldMode, Kind, Load, Mode, Phase
from .deployment import Deployment
from .fleet import Fleet
from .lockstep import Lockstep
from .members import MemberRecord
from .regroups import RegroupState


class RankView(msgspec.Struct, frozen=True):
    """One rank of a deployment; everything but `rank` and `up` is empty while it is not registered."""

    rank: int
    up: bool
    incarnation: str = ""
    host: str = ""
    serve: str = ""
    attributes: dict[str, str] = {}
    mode: Mode | None = None
    """`serving`, or where it stands in its group: joining, forming, idle, running, held, halted."""
    activity: Activity | None = None
    activity_s: float = 0.0
    """How long its engine's thread has been in `activity`."""
    heard_s: float = 0.0
    """Since it was last heard of."""
    epoch: int = 0
    wave: int = 0
    step: int = 0
    has_work: bool = False
    load: Load = Load()
    load_age_s: float | None = None
    """None: it has never reported a load."""
    counters: Counters = Counters()


class ExchangeView(msgspec.Struct, frozen=True):
    """How the ranks of a lockstep deployment exchange their rows."""

    backend: str
    reason: str


class WaitingStart(msgspec.Struct, frozen=True):
    """A start that was asked for and cannot be served yet."""

    asked_by: str
    waiting_s: float


class HoldView(msgspec.Struct, frozen=True):
    """The hold that is in force, coming or ending."""

    operation: int
    mode: HoldMode
    key: str
    refuse: bool
    """Whether starts that are asked for meanwhile are refused; otherwise they are remembered."""
    refused: int
    since_s: float
    held_ranks: list[int]


class RegroupView(msgspec.Struct, frozen=True):
    """The change of ranks that is in progress, or was the last."""

    number: int
    to: list[int]
    state: RegroupState
    detail: str
    since_s: float


class DeploymentView(msgspec.Struct, frozen=True):
    """One deployment."""

    name: str
    kind: Kind
    lockstep: bool
    dp_size: int
    ranks_up: int
    ready: bool
    phase: Phase
    phase_s: float
    waits_for: str
    """One sentence, or empty: what this deployment waits for, and since when."""
    epoch: int
    wave: int
    waves: int
    """Waves that have run in this term."""
    empty_waves: int
    group_operations: int
    """Exchanges of steps, all ranks together, as their agents counted them; 0 for a dense deployment."""
    process_groups: int
    wave_messages: int
    """Wave messages that the coordinator has sent and received plus those that the agents counted on their side."""
    dummy_steps: int
    exchange: ExchangeView | None
    fault: str
    hold: HoldView | None
    group_ranks: list[int]
    """Ranks that make up the group, of a dense deployment all; any other that is up is a spare."""
    regroup: RegroupView | None
    waiting_starts: list[WaitingStart]
    lost_ranks: int
    load: Load
    """Sum over the ranks; `kv_cache_usage` is the highest."""
    longest_feed_gap_s: float
    dropped: dict[str, int]
    ranks: list[RankView]


class FleetView(msgspec.Struct, frozen=True):
    """Everything."""

    term: int
    boot: str
    ready: bool
    not_ready: list[str]
    """One sentence for each deployment that cannot serve."""
    deployments: list[DeploymentView]
    received: dict[str, int]
    dropped: dict[str, int]


def fleet_view(fleet: Fleet, now_ms: int) -> FleetView:
    """Everything, as of `now_ms`. Changes nothing."""
    deployments = [deployment_view(deployment, now_ms) for deployment in fleet.deployments.values()]
    return FleetView(
        term=fleet.term,
        boot=fleet.spec.boot,
        ready=all(deployment.ready for deployment in deployments),
        not_ready=[f"{d.name} {d.waits_for or 'is ' + d.phase}" for d in deployments if not d.ready],
        deployments=deployments,
        received=dict(fleet.received),
        dropped=dict(fleet.dropped),
    )


def deployment_view(deployment: Deployment, now_ms: int) -> DeploymentView:
    """One deployment, as of `now_ms`."""
    spec = deployment.spec
    records = deployment.members.sorted()
    lockstep = deployment if isinstance(deployment, Lockstep) else None
    totals = deployment.members.totals()
    return DeploymentView(
        name=spec.name,
        kind=spec.kind,
        lockstep=spec.kind.lockstep,
        dp_size=spec.dp_size,
        ranks_up=len(records),
        ready=deployment.ready(now_ms),
        phase=deployment.phase,
        phase_s=_seconds(now_ms - deployment.phase_since_ms),
        waits_for=deployment.waits_for(now_ms),
        epoch=deployment.epoch,
        wave=deployment.wave,
        waves=lockstep.waves_run if lockstep else 0,
        empty_waves=totals.empty_waves,
        group_operations=totals.group_operations,
        process_groups=totals.process_groups,
        wave_messages=deployment.wave_messages + totals.wave_messages,
        dummy_steps=totals.dummy_steps,
        exchange=ExchangeView(lockstep.exchange, lockstep.exchange_reason) if lockstep and lockstep.exchange else None,
        fault=lockstep.fault if lockstep and lockstep.phase is Phase.FAULTED else "",
        hold=_hold_view(lockstep, now_ms) if lockstep else None,
        group_ranks=list(deployment.members.places),
        regroup=_regroup_view(lockstep, now_ms) if lockstep else None,
        waiting_starts=_waiting_starts(lockstep, now_ms) if lockstep else [],
        lost_ranks=deployment.lost_ranks,
        load=_sum([record.load for record in records]),
        longest_feed_gap_s=_seconds(deployment.longest_feed_gap_ms),
        dropped=dict(deployment.dropped),
        ranks=[_rank_view(rank, deployment.members.get(rank), now_ms) for rank in range(spec.dp_size)],
    )


def _hold_view(deployment: Lockstep, now_ms: int) -> HoldView | None:
    operation = deployment.operation
    if operation is None:
        return None
    return HoldView(
        operation=operation.number,
        mode=operation.wish.mode,
        key=operation.wish.key,
        refuse=operation.wish.refuse,
        refused=operation.refused,
        since_s=_seconds(now_ms - operation.since_ms),
        held_ranks=[record.rank for record in deployment.members if record.at.mode is Mode.HELD],
    )


def _regroup_view(deployment: Lockstep, now_ms: int) -> RegroupView | None:
    regroup = deployment.regroup
    if regroup is None:
        return None
    since_s = _seconds(now_ms - regroup.since_ms)
    return RegroupView(regroup.number, list(regroup.target), regroup.state, regroup.detail, since_s)


def _waiting_starts(deployment: Lockstep, now_ms: int) -> list[WaitingStart]:
    """Who asked for a start that has not come: front-ends, and ranks that hold work."""
    if deployment.phase in (Phase.STARTING, Phase.RUNNING):
        return []
    asked = list(deployment.asks.items())
    asked += [(f"rank {r.rank}", r.work_since_ms) for r in deployment.members if r.work_since_ms is not None]
    return [WaitingStart(asked_by, _seconds(now_ms - since_ms)) for asked_by, since_ms in asked]


def _rank_view(rank: int, record: MemberRecord | None, now_ms: int) -> RankView:
    if record is None:
        return RankView(rank=rank, up=False)
    return RankView(
        rank=rank,
        up=True,
        incarnation=record.incarnation,
        host=record.register.host,
        serve=record.register.serve,
        attributes=record.register.attributes,
        mode=record.at.mode,
        activity=record.activity,
        activity_s=_seconds(now_ms - record.activity_since_ms),
        heard_s=_seconds(now_ms - record.heard_ms),
        epoch=record.at.epoch,
        wave=record.at.wave,
        step=record.at.step,
        has_work=record.at.has_work,
        load=record.load,
        load_age_s=_seconds(now_ms - record.load_ms) if record.load_number else None,
        counters=record.counters,
    )


def _sum(loads: list[Load]) -> Load:
    return Load(
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        kv_cache_usage=max((load.kv_cache_usage for load in loads), default=0.0),
        waiting_tokens=sum(load.waiting_tokens for load in loads),
    )


def _seconds(milliseconds: int) -> float:
    return milliseconds / 1000
