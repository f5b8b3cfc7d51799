"""A world of one coordinator, its ranks and front-ends, in virtual time: the production cores, no sockets, no threads.

Everything that happens is drawn from one seeded generator, so a seed is a story that can be told again. Messages of
the control plane are delayed, and, where the world is told so, lost, doubled and reordered. The exchange is exact: it
either gives every rank all rows or fails. After every event the invariants of DESIGN.md section 10 are checked.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random

import msgspec

from wavekeeper.coordinator.core import DeploymentSpec, Fleet, FleetSpec, Publish
from wavekeeper.coordinator.core import Received as CoordinatorReceived
from wavekeeper.coordinator.core import Send as CoordinatorSend
from wavekeeper.coordinator.core import Tick as CoordinatorTick
from wavekeeper.proto.codec import decode, encode
from wavekeeper.proto.messages import Kind, Message, Mode, Phase, Timing, Update
from wavekeeper.proto.rows import Position, Row
from wavekeeper.worker_agent import events as rank_events
from wavekeeper.worker_agent import front_end_core
from wavekeeper.worker_agent.core import RankCore
from wavekeeper.worker_agent.plan import Plan, PlanSettings, decide

SETTINGS = PlanSettings()
TIMING = Timing(
    heartbeat_ms=100,
    stall_after_ms=1_000,
    dead_after_ms=1_500,
    step_deadline_ms=5_000,
    start_ack_timeout_ms=1_000,
    form_timeout_ms=3_000,
)


@dataclass
class Weather:
    """How bad the control plane's network is. Probabilities a message; delays in ms."""

    loss: float = 0.0
    doubling: float = 0.0
    delay_ms: tuple[int, int] = (0, 5)
    straggler: float = 0.0
    """Share of messages that take up to a second: they are overtaken."""


@dataclass
class Request:
    """So many steps of work for one rank."""

    number: int
    left: int
    rank: int = -1


@dataclass
class Group:
    """One exchange of one epoch: rows by count of exchange."""

    dp_size: int
    joined: set[int] = field(default_factory=set)
    rows: dict[int, dict[int, tuple[Row, Position]]] = field(default_factory=dict)
    plans: dict[int, Plan] = field(default_factory=dict)
    operations: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.operations = [[] for _ in range(self.dp_size)]


class Rank:
    """One rank's process: its core, and an engine that is a queue."""

    def __init__(self, world: "World", spec: DeploymentSpec, rank: int, life: int) -> None:
        self.world = world
        self.spec = spec
        self.rank = rank
        self.alive = True
        self.queue: deque[Request] = deque()
        self.group: Group | None = None
        self.count = 0
        self.turn_planned = False
        self.waiting_in: int | None = None
        self.last: tuple[int, int, int] = (0, 0, 0)
        self.cut_until_ms = 0
        identity = rank_events.Identity(
            deployment=spec.name,
            rank=rank,
            incarnation=f"{world.random.getrandbits(64):016x}",
            kind=spec.kind,
            dp_size=spec.dp_size,
            settings=SETTINGS.compared(),
            host="one",
            exchanges=("shm",) if spec.kind.lockstep else (),
            serve=f"{spec.name}/{rank}/{life}",
        )
        self.core = RankCore(identity, Random(world.random.getrandbits(32)), world.now_ms)
        self.peer = identity.incarnation.encode()
        world.plan(0, self.tick)

    # --- the control thread ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        if self.alive:
            self.do(self.core.handle(rank_events.Tick(), self.world.now_ms))
            self.world.plan(max(1, self.core.next_deadline_ms() - self.world.now_ms), self.tick)

    def receive(self, message: Message) -> None:
        if self.alive:
            self.do(self.core.handle(rank_events.Received(message), self.world.now_ms))

    def do(self, effects: list[rank_events.Effect]) -> None:
        for effect in effects:
            match effect:
                case rank_events.Send(message=message):
                    if not self.is_cut:
                        self.world.to_coordinator(self.peer, message)
                case rank_events.Build():
                    self.world.plan(self.world.random.randint(0, 20), partial(self.build, effect))
                case rank_events.Interrupt():
                    self.group = None
                    if self.waiting_in is not None:
                        self.waiting_in = None
                        self.world.plan(self.world.random.randint(0, 50), self.thrown_out)
                case _:
                    pass
        self.plan_turn(0)
        self.remember()

    def build(self, effect: rank_events.Build) -> None:
        if not self.alive:
            return
        form = effect.form
        group = self.world.groups.setdefault(form.group, Group(self.spec.dp_size))
        group.joined.add(self.rank)
        began_ms = self.world.now_ms

        def look() -> None:
            if not self.alive or self.core.stepper.epoch != form.epoch:
                return
            if len(group.joined) == group.dp_size:
                built = rank_events.Built(form.group, "shm", 0)
                if self.core.mode is Mode.FORMING:
                    self.group, self.count = group, 0
                self.do(self.core.handle(built, self.world.now_ms))
            elif self.world.now_ms - began_ms >= TIMING.form_timeout_ms:
                failed = rank_events.BuildFailed(form.group, "some rank did not come")
                self.do(self.core.handle(failed, self.world.now_ms))
            else:
                self.world.plan(self.world.random.randint(1, 20), look)

        look()

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        request.rank = self.rank
        if not self.alive:
            self.world.failed.append(request.number)
            return
        self.queue.append(request)
        self.do(self.core.work_arrived())

    def plan_turn(self, delay_ms: int) -> None:
        if not self.turn_planned and self.waiting_in is None:
            self.turn_planned = True
            self.world.plan(delay_ms, self.turn)

    def turn(self) -> None:
        self.turn_planned = False
        if not self.alive or self.waiting_in is not None:
            return
        lost, effects = self.core.leave_for_fault()
        if lost is not None:
            self.world.seen["RankLost"] += 1
            self.do(effects)
            return
        if not self.core.must_step:
            return
        if not self.spec.kind.lockstep:
            self.advance(self.queue)
            self.core.stepper.alone(Row(num_tokens=len(self.queue), has_work=bool(self.queue)))
            self.plan_turn(self.world.random.randint(1, 10))
            return
        group = self.group
        if group is None:
            return
        row = Row(num_tokens=len(self.queue), has_work=bool(self.queue), dummy=not self.queue)
        row, position = self.core.begin(row)
        self.count += 1
        self.waiting_in = self.count
        group.rows.setdefault(self.count, {})[self.rank] = (row, position)
        group.operations[self.rank].append(str(position))
        if len(group.rows[self.count]) == group.dp_size:
            for peer in self.world.ranks[self.spec.name].values():
                if peer.group is group and peer.waiting_in == self.count:
                    self.world.plan(self.world.random.randint(0, 3), partial(peer.arrived, group, self.count))

    def arrived(self, group: Group, number: int) -> None:
        """All rows are there for this rank."""
        if not self.alive or self.waiting_in != number or self.group is not group:
            return
        self.waiting_in = None
        rows = group.rows[number]
        positions = {position for _, position in rows.values()}
        assert len(positions) == 1, f"the ranks met at different positions: {positions}"
        plan = decide([rows[rank][0] for rank in range(group.dp_size)], positions.pop(), SETTINGS)
        assert group.plans.setdefault(number, plan) == plan, "two ranks made different plans of the same rows"
        self.do(self.core.finish(plan, 5.0))
        if plan.runs_forward:
            assert self.core.mode is Mode.RUNNING, f"a forward in mode {self.core.mode}"
            self.advance(self.queue)
        self.plan_turn(self.world.random.choice((0, 1, 2, 10)))

    def thrown_out(self) -> None:
        if self.alive:
            lost, effects = self.core.leave_for_fault()
            if lost is None:
                effects = self.core.fail("interrupted", None)
            self.do(effects)

    def advance(self, queue: deque[Request]) -> None:
        for request in list(queue):
            request.left -= 1
            if request.left <= 0:
                queue.remove(request)
                self.world.done.append(request.number)

    def remember(self) -> None:
        """Term, epoch and wave never go back."""
        stepper = self.core.stepper
        now = self.core.term, stepper.epoch, stepper.wave
        assert now[0] >= self.last[0] and now[1:] >= self.last[1:], f"rank {self.rank} went from {self.last} to {now}"
        self.last = now

    def cut(self, duration_ms: int) -> None:
        """Nothing of the control plane reaches or leaves this rank for so long; the exchange goes on."""
        self.cut_until_ms = self.world.now_ms + duration_ms

    @property
    def is_cut(self) -> bool:
        return self.world.now_ms < self.cut_until_ms

    def crash(self) -> None:
        self.alive = False
        self.world.failed += [request.number for request in self.queue]


class FrontEnd:
    """One front-end's process."""

    def __init__(self, world: "World", deployment: str) -> None:
        self.world = world
        name = f"{world.random.getrandbits(64):016x}"
        self.core = front_end_core.FrontEndCore(deployment, name, Random(world.random.getrandbits(32)), world.now_ms)
        self.peer = name.encode()
        self.subscribed = False
        world.plan(0, self.tick)

    def tick(self) -> None:
        self.do(self.core.handle(front_end_core.Tick(), self.world.now_ms))
        self.world.plan(max(1, self.core.next_deadline_ms(self.world.now_ms) - self.world.now_ms), self.tick)

    def receive(self, message: Message) -> None:
        self.do(self.core.handle(front_end_core.Received(message), self.world.now_ms))

    def do(self, effects: list[front_end_core.Effect]) -> None:
        for effect in effects:
            match effect:
                case front_end_core.Send(message=message):
                    self.world.to_coordinator(self.peer, message)
                case front_end_core.Subscribe():
                    self.subscribed = True
                case _:
                    pass

    def send(self, request: Request) -> None:
        """Route one request; try again later while no rank is known to be up."""
        choice, effects = self.core.pick(self.world.now_ms)
        self.do(effects)
        if choice is None:
            self.world.plan(50, partial(self.send, request))
            return
        rank = self.world.ranks[self.core.deployment].get(choice.rank)
        assert rank is not None
        self.world.plan(self.world.random.randint(0, 10), partial(rank.submit, request))
        self.world.plan(200, partial(self.core.done, choice))


class World:
    """Virtual time, the network, and everybody in it."""

    def __init__(self, seed: int, specs: tuple[DeploymentSpec, ...], weather: Weather | None = None) -> None:
        self.random = Random(seed)
        self.now_ms = 1_000
        self.weather = weather or Weather()
        self.specs = specs
        self.term = 1
        self.events = 0
        self.groups: dict[str, Group] = {}
        self.done: list[int] = []
        self.failed: list[int] = []
        self.seen: Counter[str] = Counter()
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._published: dict[str, Update] = {}
        self.fleet: Fleet | None = None
        self.ranks: dict[str, dict[int, Rank]] = {spec.name: {} for spec in specs}
        self.front_ends: list[FrontEnd] = []
        self.start_coordinator()
        for spec in specs:
            for rank in range(spec.dp_size):
                self.start_rank(spec, rank)
            self.front_ends += [FrontEnd(self, spec.name), FrontEnd(self, spec.name)]

    # --- what a test does --------------------------------------------------------------------------------------------

    def plan(self, delay_ms: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now_ms + delay_ms, next(self._order), action))

    def run(self, until: Callable[[], bool], limit_ms: int) -> bool:
        """Let things happen until `until()` or for `limit_ms` of virtual time. True: `until()` holds."""
        deadline_ms = self.now_ms + limit_ms
        while self._heap and self._heap[0][0] <= deadline_ms:
            self.now_ms, _, action = heapq.heappop(self._heap)
            action()
            self.events += 1
            if self.fleet is not None:
                self.fleet.check()
            if until():
                return True
        return until()

    def start_rank(self, spec: DeploymentSpec, rank: int) -> None:
        old = self.ranks[spec.name].get(rank)
        self.ranks[spec.name][rank] = Rank(self, spec, rank, 0 if old is None else 1)

    def start_coordinator(self) -> None:
        spec = FleetSpec(boot=f"{self.term:016x}", term=self.term, deployments=self.specs, feed="feed", timing=TIMING)
        self.fleet = Fleet(spec, self.now_ms)
        self.coordinator_tick(self.fleet)

    def crash_coordinator(self) -> None:
        self.fleet = None
        self.term += 1

    def quiet(self) -> bool:
        """No request is queued anywhere and every lockstep rank is idle in the same wave."""
        for spec in self.specs:
            ranks = self.ranks[spec.name].values()
            if any(rank.queue or rank.core.stepper.has_work for rank in ranks):
                return False
            if spec.kind.lockstep:
                places = {(rank.core.mode, rank.core.stepper.epoch, rank.core.stepper.wave) for rank in ranks}
                if len(places) != 1 or next(iter(places))[0] is not Mode.IDLE:
                    return False
        return True

    # --- the network -------------------------------------------------------------------------------------------------

    def to_coordinator(self, peer: bytes, message: Message) -> None:
        self.carry(message, partial(self.at_coordinator, peer))

    def carry(self, message: Message, deliver: Callable[[Message], None]) -> None:
        weather = self.weather
        message = decode(encode(message))  # nothing travels that the codec cannot carry
        copies = 2 if self.random.random() < weather.doubling else 1
        for _ in range(copies):
            if self.random.random() < weather.loss:
                self.seen["lost"] += 1
                continue
            delay_ms = self.random.randint(*weather.delay_ms)
            if self.random.random() < weather.straggler:
                delay_ms = self.random.randint(0, 1_000)
            self.plan(delay_ms, partial(deliver, message))

    def at_coordinator(self, peer: bytes, message: Message) -> None:
        if self.fleet is not None:
            self.perform(self.fleet, CoordinatorReceived(peer, message))

    def coordinator_tick(self, fleet: Fleet) -> None:
        if self.fleet is fleet:
            self.perform(fleet, CoordinatorTick())
            self.plan(max(1, fleet.next_deadline_ms(self.now_ms) - self.now_ms), partial(self.coordinator_tick, fleet))

    def perform(self, fleet: Fleet, event: CoordinatorReceived | CoordinatorTick) -> None:
        before_ms = fleet.next_deadline_ms(self.now_ms)
        for effect in fleet.handle(event, self.now_ms):
            match effect:
                case CoordinatorSend(peer=peer, message=message):
                    self.carry(message, partial(self.at_peer, peer))
                case Publish(deployment=name, message=message):
                    assert isinstance(message, Update)
                    self.published(name, message)
                    for front_end in self.front_ends:
                        if front_end.core.deployment == name and front_end.subscribed:
                            self.carry(message, front_end.receive)
                case _:
                    pass
        after_ms = fleet.next_deadline_ms(self.now_ms)
        if after_ms < before_ms and isinstance(event, CoordinatorReceived):
            self.plan(max(1, after_ms - self.now_ms), partial(self.extra_tick, fleet))

    def extra_tick(self, fleet: Fleet) -> None:
        """An event has brought the next deadline forward."""
        if self.fleet is fleet:
            self.perform(fleet, CoordinatorTick())

    def at_peer(self, peer: bytes, message: Message) -> None:
        for ranks in self.ranks.values():
            for rank in ranks.values():
                if rank.peer == peer and not rank.is_cut:
                    rank.receive(message)
        for front_end in self.front_ends:
            if front_end.peer == peer:
                front_end.receive(message)

    def published(self, name: str, update: Update) -> None:
        """Running is never published without evidence, and nothing published goes back."""
        before = self._published.get(name)
        if before is not None:
            order = (before.term, before.seq), (update.term, update.seq)
            assert order[0] < order[1], f"the feed went from {order[0]} to {order[1]}"
            if before.term == update.term:
                assert (before.epoch, before.wave) <= (update.epoch, update.wave), f"{before} -> {update}"
        self._published[name] = update
        if update.phase is Phase.RUNNING:
            self.seen["running"] += 1
            assert self.fleet is not None
            for rank in self.ranks[name].values():
                member = self.fleet.deployments[name].members.get(rank.rank)
                if member is None or member.incarnation != rank.core.identity.incarnation:
                    continue  # the life that acknowledged has died since, and nobody knows it yet
                stepper = rank.core.stepper
                began = stepper.wave > update.wave or (stepper.wave == update.wave and stepper.running)
                assert began or stepper.epoch > update.epoch, (
                    f"wave {update.wave} of {name} was published as running, but rank {rank.rank} has not begun it"
                )


def specs(moe: int = 4, dense: int = 2) -> tuple[DeploymentSpec, ...]:
    """The usual fleet: one deployment of each kind."""
    made = []
    if moe:
        made.append(DeploymentSpec(name="moe", kind=Kind.MOE, dp_size=moe))
    if dense:
        made.append(DeploymentSpec(name="dense", kind=Kind.DENSE, dp_size=dense))
    return tuple(made)


def arrivals(world: World, requests: int, mean_gap_ms: float, steps: int = 8) -> list[int]:
    """Plan random arrivals at random front-ends, with a long gap now and then so that waves end; return their
    numbers.
    """
    at_ms = 0.0
    for number in range(requests):
        at_ms += world.random.expovariate(1 / mean_gap_ms)
        if world.random.random() < 0.05:
            at_ms += 20 * mean_gap_ms
        front_end = world.random.choice(world.front_ends)
        request = Request(number, world.random.randint(1, steps))
        world.plan(round(at_ms), partial(front_end.send, request))
    return list(range(requests))


def summary(world: World) -> dict[str, object]:
    """For a failing test's message."""
    return {
        "now_ms": world.now_ms,
        "fleet": repr(world.fleet),
        "ranks": [msgspec.to_builtins(rank.core.at()) for ranks in world.ranks.values() for rank in ranks.values()],
        "seen": dict(world.seen),
    }
