"""What the stories of this folder are told with. No sockets, no threads, no sleeping: time is a number.

`Puppet` is a rank that says whatever a test wants, with the numbers and the position of a real one. `Stage` is the
coordinator's core with puppets in front of it. See `cluster` for production cores on both sides.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

import msgspec

from wavekeeper.coordinator.core import DeploymentSpec, Effect, Event, Fleet, FleetSpec, Publish, Received, Send, Tick
from wavekeeper.proto import messages as m
from wavekeeper.proto.codec import decode, encode
from wavekeeper.proto.rows import Position, Row, gathered
from wavekeeper.worker_agent.plan import Plan, PlanSettings, decide

TIMING = m.Timing(
    heartbeat_ms=100,
    stall_after_ms=1_000,
    dead_after_ms=1_500,
    step_deadline_ms=5_000,
    start_ack_timeout_ms=800,
    form_timeout_ms=3_000,
)
BOOT = "b007" * 4
FRONT_END = "f" * 16
MessageT = TypeVar("MessageT", bound=m.Message)


def make_fleet(*specs: DeploymentSpec, term: int = 1, now_ms: int = 0, timing: m.Timing = TIMING) -> Fleet:
    """The coordinator's core, newly begun."""
    return Fleet(FleetSpec(boot=BOOT, term=term, deployments=specs, feed="tcp://feed:1", timing=timing), now_ms)


def moe(dp_size: int = 2, **more: Any) -> DeploymentSpec:
    """A lockstep deployment named `moe`."""
    return DeploymentSpec(name="moe", kind=m.Kind.MOE, dp_size=dp_size, **more)


def dense(dp_size: int = 2, **more: Any) -> DeploymentSpec:
    """An independent deployment named `dense`."""
    return DeploymentSpec(name="dense", kind=m.Kind.DENSE, dp_size=dp_size, **more)


def wire(message: m.Message) -> m.Message:
    """The same message after a journey: nothing may travel that the codec cannot carry."""
    return decode(encode(message))


def planned(rows: Sequence[Row], position: Position, settings: PlanSettings | None = None) -> Plan:
    """The plan of these rows, after a perfect exchange."""
    return decide(gathered(rows, position), position, settings or PlanSettings())


def picture(thing: object) -> object:
    """All that a core remembers, as plain values, to compare before and after; what it only counts is left out."""
    if isinstance(thing, dict):
        return {key: picture(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple | deque):
        return [picture(value) for value in thing]
    if is_dataclass(thing) and not isinstance(thing, type):
        return {field.name: picture(getattr(thing, field.name)) for field in fields(thing)}
    if type(thing).__module__.startswith("wavekeeper") and hasattr(thing, "__dict__") and not isinstance(thing, Enum):
        counted = ("dropped", "received", "story", "wave_messages")
        return {name: picture(value) for name, value in vars(thing).items() if name not in counted}
    return thing


def sent(effects: Iterable[Effect], kind: type[MessageT], rank: int | None = None) -> list[MessageT]:
    """The messages of one type among effects, to one rank or to all."""
    messages = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]
    return [message for message in messages if rank is None or getattr(message, "rank", None) == rank]


def published(effects: Iterable[Effect]) -> list[m.Phase]:
    """The phases of the updates among effects."""
    return [e.message.phase for e in effects if isinstance(e, Publish) and isinstance(e.message, m.Update)]


class Puppet:
    """A rank that says what the test wants: right numbers, a position, and no will of its own."""

    def __init__(self, rank: int, spec: DeploymentSpec, life: int = 0, **register: Any) -> None:
        self.rank = rank
        self.spec = spec
        self.incarnation = f"{rank + 1:08x}{life:08x}"
        self.peer = f"peer-{rank}-{life}".encode()
        self.number = 0
        mode = m.Mode.JOINING if spec.kind.lockstep else m.Mode.SERVING
        self.at = m.At(mode=mode)
        self.register: dict[str, Any] = {
            "kind": spec.kind,
            "dp_size": spec.dp_size,
            "host": "one",
            "exchanges": ["shm"] if spec.kind.lockstep else [],
            **register,
        }

    def move(self, **changes: Any) -> "Puppet":
        """Change the position that every later message carries."""
        self.at = msgspec.structs.replace(self.at, **changes)
        return self

    def says(self, kind: type[m.FromRank], /, **fields: Any) -> Received:
        """The next message of this rank."""
        self.number += 1
        identity: dict[str, Any] = {"deployment": self.spec.name, "rank": self.rank, "incarnation": self.incarnation}
        message = kind(**identity, number=self.number, at=self.at, **fields)
        return Received(self.peer, wire(message))

    def registers(self) -> Received:
        """A registration."""
        return self.says(m.Register, **self.register)


class Stage:
    """The coordinator's core, a clock, and puppets. `tell` is the only way in."""

    def __init__(self, *specs: DeploymentSpec, term: int = 1, timing: m.Timing = TIMING) -> None:
        self.now_ms = 1_000
        self.fleet = make_fleet(*specs, term=term, now_ms=self.now_ms, timing=timing)
        self.spec = specs[0]
        self.ranks = [Puppet(rank, self.spec) for rank in range(self.spec.dp_size)]
        self.asks = 0
        self.tell(Tick())  # the first update of the feed is out

    @property
    def deployment(self) -> Any:
        """The first deployment; Any, because tests look at the two kinds alike."""
        return self.fleet.deployments[self.spec.name]

    @property
    def place(self) -> tuple[m.Phase, int, int]:
        """Phase, epoch and wave."""
        return self.deployment.phase, self.deployment.epoch, self.deployment.wave

    def is_in(self, phase: m.Phase) -> bool:
        """Whether the deployment is in this phase now."""
        return bool(self.deployment.phase is phase)

    def tell(self, *events: Event, wait_ms: int = 0) -> list[Effect]:
        """Let events happen at one moment; what came of them."""
        self.now_ms += wait_ms
        effects = [effect for event in events or (Tick(),) for effect in self.fleet.handle(event, self.now_ms)]
        self.fleet.check()
        return effects

    def join(self, *ranks: Puppet) -> list[Effect]:
        """Let ranks register and then, welcomed in this term, say where they stand."""
        effects: list[Effect] = []
        for rank in ranks:
            answer = self.tell(rank.registers())
            for welcome in sent(answer, m.Welcome, rank.rank):
                rank.move(term=welcome.term, applied=welcome.seq)
            effects += answer + self.tell(rank.says(m.Heartbeat))
        return effects

    def live(self, wait_ms: int, *ranks: Puppet) -> list[Effect]:
        """Let time pass in heartbeats of these ranks (all, if none is named)."""
        effects: list[Effect] = []
        until_ms = self.now_ms + wait_ms
        while self.now_ms < until_ms:
            beats = [rank.says(m.Heartbeat) for rank in ranks or self.ranks]
            effects += self.tell(*beats, Tick(), wait_ms=min(TIMING.heartbeat_ms, until_ms - self.now_ms))
        return effects

    def asks_for_start(self, wave: int, **fields: Any) -> Received:
        """A front-end's first request."""
        self.asks += 1
        fields = {"front_end": FRONT_END, "ask": self.asks, **fields}
        return Received(b"fe", wire(m.FirstRequest(deployment=self.spec.name, wave=wave, **fields)))

    def form(self, wave: int = 0) -> None:
        """Register all ranks and let them say that they have formed, at `wave`."""
        for rank in self.ranks:
            self.join(rank.move(wave=wave))
        lockstep = self.deployment
        for rank in self.ranks:
            rank.move(mode=m.Mode.IDLE, term=self.fleet.term, epoch=lockstep.epoch, applied=lockstep.seq, wave=wave)
            self.tell(rank.says(m.Formed, exchange="shm"))
        assert lockstep.phase is m.Phase.IDLE

    def run(self) -> None:
        """From idle to running: somebody asks, everybody acknowledges."""
        self.tell(self.asks_for_start(self.deployment.wave))
        self.run_acknowledged()

    def run_acknowledged(self) -> None:
        """Everybody acknowledges the start that is out."""
        for rank in self.ranks:
            rank.move(mode=m.Mode.RUNNING, applied=self.deployment.seq, wave=self.deployment.wave, step=0)
            self.tell(rank.says(m.Started))
        assert self.deployment.phase is m.Phase.RUNNING

    def end(self) -> list[Effect]:
        """The running wave ends on every rank."""
        wave = self.deployment.wave + 1
        return self.tell(
            *(
                r.move(mode=m.Mode.IDLE, wave=wave, step=0, has_work=False).says(m.WaveComplete, steps=1)
                for r in self.ranks
            )
        )
