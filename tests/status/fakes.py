"""A small fleet as the coordinator would tell it, and sources of it, named for their fault."""

import asyncio
from typing import Any

import httpx2
import msgspec
from starlette.applications import Starlette

from wavekeeper.coordinator.core.view import DeploymentView, ExchangeView, FleetView, RankView, WaitingStart
from wavekeeper.coordinator.status.app import ServiceInfo, StatusUnavailableError
from wavekeeper.proto.messages import Activity, Counters, Kind, Load, Mode, Phase

HOSTILE = '<img src=x onerror="alert(1)">\'&\x1b[2J'


class Service:
    """Tells a fleet, and counts what it was asked."""

    def __init__(self, fleet: FleetView | None = None, **info: Any) -> None:
        self.view = busy_fleet() if fleet is None else fleet
        self.told = service_info(**info)
        self.asked: list[str] = []

    async def fleet(self) -> FleetView:
        self.asked.append("fleet")
        return self.view

    def info(self) -> ServiceInfo:
        self.asked.append("info")
        return self.told


class StuckService(Service):
    """Its loop hangs: the deadline passes, and that is told."""

    async def fleet(self) -> FleetView:
        await super().fleet()
        raise StatusUnavailableError("the coordinator's loop did not answer within 1 s")


class BrokenService(Service):
    """A bug, on whatever it is asked."""

    async def fleet(self) -> FleetView:
        raise KeyError("a secret of the coordinator")


def service_info(**changed: Any) -> ServiceInfo:
    usual: dict[str, Any] = {
        "version": "0.1.0",
        "started_at": "2026-12-01T03:26:00Z",
        "uptime_s": 754.2,
        "control": "tcp://127.0.0.1:29560",
        "feed": "tcp://127.0.0.1:29561",
        "http": "http://127.0.0.1:9257",
        "config_hash": "0123456789ab",
        "stopping": False,
    }
    return ServiceInfo(**(usual | changed))


def rank_view(rank: int, **changed: Any) -> RankView:
    usual: dict[str, Any] = {
        "rank": rank,
        "up": True,
        "incarnation": f"{rank:016x}",
        "host": "node-a",
        "serve": f"tcp://127.0.0.1:{5550 + rank}",
        "attributes": {"pid": str(4200 + rank)},
        "mode": Mode.SERVING,
        "activity": Activity.IDLE,
        "activity_s": 4.0,
        "heard_s": 0.2,
        "load_age_s": 0.1,
    }
    return RankView(**(usual | changed))


def deployment_view(name: str, kind: Kind, ranks: list[RankView], **changed: Any) -> DeploymentView:
    up = [rank for rank in ranks if rank.up]
    usual: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "lockstep": kind.lockstep,
        "dp_size": len(ranks),
        "ranks_up": len(up),
        "ready": True,
        "phase": Phase.IDLE if kind.lockstep else Phase.SERVING,
        "phase_s": 12.3,
        "waits_for": "",
        "epoch": int(kind.lockstep),
        "wave": 0,
        "waves": 0,
        "empty_waves": 0,
        "group_operations": max((rank.counters.group_operations for rank in up), default=0),
        "process_groups": 0,
        "wave_messages": 0,
        "dummy_steps": sum(rank.counters.dummy_steps for rank in up),
        "exchange": ExchangeView("shm", "the first that all ranks offer; they are on 1 host")
        if kind.lockstep
        else None,
        "fault": "",
        "hold": None,
        "group_ranks": list(range(len(ranks))),
        "regroup": None,
        "waiting_starts": [],
        "lost_ranks": 0,
        "load": Load(
            running=sum(rank.load.running for rank in up),
            waiting=sum(rank.load.waiting for rank in up),
            kv_cache_usage=max((rank.load.kv_cache_usage for rank in up), default=0.0),
        ),
        "longest_feed_gap_s": 1.0,
        "dropped": {},
        "ranks": ranks,
    }
    return DeploymentView(**(usual | changed))


def moe(**changed: Any) -> DeploymentView:
    """Four ranks in wave 12; only rank 2 has requests."""
    counters = Counters(
        waves=12, steps=480, dummy_steps=300, group_operations=480, exchange_p50_us=9, exchange_p99_us=80
    )
    usual = {
        "mode": Mode.RUNNING,
        "activity": Activity.EXCHANGING,
        "activity_s": 0.0,
        "epoch": 1,
        "wave": 12,
        "step": 34,
    }
    ranks = [rank_view(rank, counters=counters, **usual) for rank in range(4)]
    load = Load(running=3, waiting=1, kv_cache_usage=0.42)
    ranks[2] = msgspec.structs.replace(ranks[2], activity=Activity.STEPPING, has_work=True, load=load)
    story = {"phase": Phase.RUNNING, "wave": 12, "waves": 13, "empty_waves": 1, "wave_messages": 140}
    return deployment_view("demo-moe", Kind.MOE, ranks, **(story | changed))


def dense(**changed: Any) -> DeploymentView:
    """Four independent ranks; only rank 2 has requests."""
    ranks = [rank_view(rank) for rank in range(4)]
    load = Load(running=5, waiting=0, kv_cache_usage=0.9)
    ranks[2] = msgspec.structs.replace(ranks[2], has_work=True, load=load, activity=Activity.STEPPING)
    return deployment_view("demo-dense", Kind.DENSE, ranks, **changed)


def without(deployment: DeploymentView, lost: int, **changed: Any) -> DeploymentView:
    """The same deployment after it has lost a rank."""
    ranks = [RankView(rank=r.rank, up=False) if r.rank == lost else r for r in deployment.ranks]
    return msgspec.structs.replace(
        deployment,
        ranks=ranks,
        ranks_up=sum(rank.up for rank in ranks),
        waits_for=f"waits for rank {lost} to register, since 2.0 s",
        **changed,
    )


def faulted_moe() -> DeploymentView:
    """Rank 3 has died in the middle of a wave, and a start waits."""
    reason = "rank 3 fell silent for 5.0 s"
    return msgspec.structs.replace(
        without(moe(), 3, ready=False, phase=Phase.FAULTED, fault=reason, lost_ranks=1),
        waits_for=f"faulted ({reason}); waits for rank 3 to register, since 2.0 s",
        waiting_starts=[WaitingStart("front-end 00000000000000aa", 1.5)],
    )


def fleet_view(*deployments: DeploymentView, **changed: Any) -> FleetView:
    usual: dict[str, Any] = {
        "term": 3,
        "boot": "00000000000000ff",
        "ready": all(d.ready for d in deployments),
        "not_ready": [f"{d.name} {d.waits_for or 'is ' + d.phase}" for d in deployments if not d.ready],
        "deployments": list(deployments),
        "received": {"Heartbeat": 1000, "LoadReport": 400, "Started": 52},
        "dropped": {"malformed": 2},
    }
    return FleetView(**(usual | changed))


def busy_fleet() -> FleetView:
    return fleet_view(moe(dropped={"stale": 7}), dense())


def hostile_fleet() -> FleetView:
    """Every text that a stranger may write holds what would hurt a page or a terminal."""
    rank = rank_view(0, host=HOSTILE, serve=HOSTILE, incarnation=HOSTILE, attributes={HOSTILE: HOSTILE})
    waiting = [WaitingStart(HOSTILE, 1.0)]
    exchange = ExchangeView(HOSTILE, HOSTILE)
    deployment = deployment_view("demo-moe", Kind.MOE, [rank], ready=False, waits_for=HOSTILE, fault=HOSTILE + "2")
    return fleet_view(msgspec.structs.replace(deployment, waiting_starts=waiting, exchange=exchange))


def ask(app: Starlette, path: str, *, method: str = "GET", **headers: str) -> httpx2.Response:
    """One request through the application, without a socket. `Accept` is written `Accept=...`."""

    async def send() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://coordinator") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(send())
