"""A world of one coordinator, its ranks and front-ends, in virtual time: the production cores, no sockets, no threads.

Everything that happens is drawn from one seeded generator, so a seed is a story that can be told again. Messages of
the control plane are delayed, and, where the world is told so, lost, doubled and reordered. The exchange is exact: it
gives a rank all rows, or fails. After every event the invariants of DESIGN.md section 10 are checked: here, what
concerns all; in `peers`, what a single process can see.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random

import msgspec

from wavekeeper.coordinator.core import DeploymentSpec, Effect, Event, Fleet, FleetSpec, Note, Publish
from wavekeeper.coordinator.core import Received as CoordinatorReceived
from wavekeeper.coordinator.core import Send as CoordinatorSend
from wavekeeper.coordinator.core import Tick as CoordinatorTick
from wavekeeper.coordinator.core.events import Answer, Wish, Wished
from wavekeeper.coordinator.core.lockstep import Lockstep
from wavekeeper.proto.codec import decode, encode
from wavekeeper.proto.messages import (
    FirstRequest,
    Heartbeat,
    Kind,
    LoadReport,
    Message,
    Mode,
    Phase,
    Pulse,
    RefusalReason,
    Snapshot,
    Start,
    Update,
)

from .peers import TIMING, FrontEnd, Group, Peer, Rank, Request

WAVE_MESSAGES_MAX = 12
"""Of one wave for each rank, all of it together: the question, the start, its answer, the end, and repetitions."""
QUIET_MESSAGES_MAX = 120
"""Of one process in one virtual second, whatever else goes on."""
_HUM = Heartbeat | Pulse | LoadReport | Update | Snapshot
"""Not worth a line in the story."""


class Weather(msgspec.Struct, frozen=True):
    """How bad the control plane's network is. Probabilities a message; delays in ms."""

    loss: float = 0.0
    doubling: float = 0.0
    delay_ms: tuple[int, int] = (0, 5)
    straggler: float = 0.0
    """Share of messages that take up to a second: they are overtaken."""


class Coordinator(Peer):
    """The coordinator's process, in one term."""

    def __init__(self, world: "World") -> None:
        super().__init__(world, f"coordinator of term {world.term}")
        boot = f"{world.random.getrandbits(64):016x}"
        spec = FleetSpec(boot=boot, term=world.term, deployments=world.specs, feed="feed", timing=TIMING)
        self.fleet = Fleet(spec, self.clock_ms)
        self.asked: set[str] = set()
        """Deployments of which a front-end wants a wave that has not begun."""
        self.commanded: set[tuple[str, int, int]] = set()
        """Starts that were sent: to another rank, or once before."""
        self._asks: dict[str, int] = {}
        self.happens(self.tick)

    def due_ms(self) -> int:
        return self.fleet.next_deadline_ms(self.clock_ms)

    def tick(self) -> None:
        self._handle(CoordinatorTick())
        self.later()

    def receive(self, peer: bytes, message: Message) -> None:
        self.happens(partial(self._handle, CoordinatorReceived(peer, message)))

    def wish(self, wish: Wish, deployment: str) -> None:
        """An operator wants something."""
        self.happens(partial(self._handle, Wished(0, deployment, wish)))

    def _handle(self, event: Event) -> None:
        fleet = self.fleet
        if isinstance(event, CoordinatorReceived) and isinstance(event.message, FirstRequest):
            self._note_ask(event.message)
        before = {name: deployment.phase for name, deployment in fleet.deployments.items()}
        self.world.perform(self, fleet.handle(event, self.clock_ms))
        fleet.check()
        for name, deployment in fleet.deployments.items():
            if not isinstance(deployment, Lockstep):
                assert deployment.wave_messages == 0, f"{deployment.wave_messages} wave messages of a dense deployment"
                continue
            check_lockstep(deployment)
            assert not deployment.dropped["impossible"], f"a rank of {name} acknowledges what was never commanded"
            if before[name] is Phase.FAULTED and deployment.phase is Phase.FORMING:
                inside = [rank.name for rank in self.world.everybody(name) if rank.alive and rank.is_inside(deployment)]
                assert not inside, f"a group is formed while {inside} sit in the broken exchange"
        self.plan_tick()

    def _note_ask(self, message: FirstRequest) -> None:
        deployment = self.fleet.deployments.get(message.deployment)
        if deployment is None or message.ask <= self._asks.get(message.front_end, -1):
            return
        self._asks[message.front_end] = message.ask
        if deployment.phase not in (Phase.STARTING, Phase.RUNNING):
            self.asked.add(message.deployment)


def check_lockstep(deployment: Lockstep) -> None:
    """What the coordinator has heard, and what it makes of it."""
    behind = [record.rank for record in deployment.members if record.applied < deployment.seq]
    assert deployment.phase is not Phase.STARTING or behind, "running is not told, with all the evidence"
    if deployment.phase in (Phase.IDLE, Phase.STARTING, Phase.RUNNING):
        out = [r.rank for r in deployment.members if r.at.mode is Mode.HALTED and r.at.epoch == deployment.epoch]
        assert not out, f"ranks {out} have left the exchange of epoch {deployment.epoch}, which is called whole"


class World:
    """Virtual time, the network, and everybody in it."""

    def __init__(
        self,
        seed: int,
        specs: tuple[DeploymentSpec, ...],
        weather: Weather | None = None,
        *,
        front_ends: int = 2,
        clocks_differ: bool = True,
    ) -> None:
        self.random = Random(seed)
        self.now_ms = 1_000
        self.weather = weather or Weather()
        self.specs = specs
        self.clocks_differ = clocks_differ
        self.term = 1
        self.events = 0
        self.groups: dict[str, Group] = {}
        self.done: list[int] = []
        self.failed: list[int] = []
        self.seen: Counter[str] = Counter()
        self.story: list[str] | None = None
        """What happened, in lines, if somebody wants to know."""
        self.busiest = 0.0
        """The highest share of the allowed messages that was sent in one virtual second."""
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._published: dict[str, Update] = {}
        self._asked_for: set[tuple[str, int, int]] = set()
        """Waves that a front-end asked for: these may be empty."""
        self._first_waves: dict[tuple[str, int], int] = {}
        self._loads: dict[tuple[str, str], int] = {}
        self._second = 0
        self._sent: Counter[str] = Counter()
        self._started: set[tuple[str, int, int, int]] = set()
        self.coordinator: Coordinator | None = None
        self.ranks: dict[str, dict[int, Rank]] = {spec.name: {} for spec in specs}
        self.former: dict[str, list[Rank]] = {spec.name: [] for spec in specs}
        """Lives whose place was given to another one; some of them do not know."""
        self.front_ends: list[FrontEnd] = []
        self.start_coordinator()
        for spec in specs:
            for rank in range(spec.dp_size):
                self.start_rank(spec, rank)
            self.front_ends += [FrontEnd(self, spec.name) for _ in range(front_ends)]

    # --- what a test does --------------------------------------------------------------------------------------------

    @property
    def fleet(self) -> Fleet | None:
        return None if self.coordinator is None else self.coordinator.fleet

    def plan(self, delay_ms: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now_ms + delay_ms, next(self._order), action))

    def run(self, until: Callable[[], bool], limit_ms: int) -> bool:
        """Let things happen until `until()` or for `limit_ms` of virtual time. True: `until()` holds."""
        deadline_ms = self.now_ms + limit_ms
        while self._heap and self._heap[0][0] <= deadline_ms:
            self.now_ms, _, action = heapq.heappop(self._heap)
            action()
            self.events += 1
            if until():
                return True
        self.now_ms = deadline_ms
        return until()

    def tell(self, who: str, text: str) -> None:
        if self.story is not None:
            self.story.append(f"{self.now_ms / 1000:9.3f} s  {who}: {text}")

    def everybody(self, deployment: str) -> list[Rank]:
        """Each life of each rank."""
        return [*self.ranks[deployment].values(), *self.former[deployment]]

    def start_rank(self, spec: DeploymentSpec, rank: int) -> None:
        old = self.ranks[spec.name].get(rank)
        if old is not None:
            self.former[spec.name].append(old)
        self.ranks[spec.name][rank] = Rank(self, spec, rank, 0 if old is None else old.life + 1)

    def start_coordinator(self) -> None:
        if self.coordinator is None:
            self.coordinator = Coordinator(self)

    def crash_coordinator(self) -> None:
        if self.coordinator is not None:
            self.coordinator.alive = False
            self.term = max(self.term, self.coordinator.fleet.term) + 1
            self.coordinator = None

    def restart_front_end(self, index: int) -> None:
        old = self.front_ends[index]
        old.alive = False
        self.front_ends[index] = FrontEnd(self, old.core.deployment)

    def calm(self) -> None:
        """Everything that was wrong is mended: from here on, work must be done in bounded time."""
        self.weather = Weather()
        self.start_coordinator()
        for spec in self.specs:
            for former in self.former[spec.name]:
                former.crash()  # whoever starts processes sees to it that there is one for each rank
            for rank, life in list(self.ranks[spec.name].items()):
                life.calm()
                if not life.alive:
                    self.start_rank(spec, rank)
        for peer in [*self.front_ends, self.coordinator]:
            assert peer is not None
            peer.calm()

    def quiet(self) -> bool:
        """No request is queued anywhere and every rank of a lockstep group is idle in the same wave."""
        for spec in self.specs:
            ranks = self.ranks[spec.name]
            if any(rank.queue or rank.core.stepper.has_work for rank in ranks.values()):
                return False
            if spec.kind.lockstep and self.fleet is not None:
                group = [ranks[place].core for place in self.fleet.deployments[spec.name].members.places]
                places = {(core.mode, core.stepper.epoch, core.stepper.wave) for core in group}
                if len(places) != 1 or next(iter(places))[0] is not Mode.IDLE:
                    return False
        return True

    # --- requests ----------------------------------------------------------------------------------------------------

    def send(self, request: Request, deployment: str) -> None:
        """Give the request to one of the front-ends that live now."""
        front_ends = [each for each in self.front_ends if each.core.deployment == deployment]
        self.random.choice(front_ends).send(request)

    def finish(self, request: Request) -> None:
        self.done.append(request.number)
        request.done()

    def fail(self, request: Request) -> None:
        self.failed.append(request.number)
        request.done()

    # --- the network -------------------------------------------------------------------------------------------------

    def to_coordinator(self, sender: Peer, message: Message) -> None:
        assert isinstance(sender, Rank | FrontEnd)
        self._count(sender.core.deployment if isinstance(sender, FrontEnd) else sender.spec.name)
        self.carry(sender.name, message, partial(self.at_coordinator, sender.peer))

    def carry(self, who: str, message: Message, deliver: Callable[[Message], None]) -> None:
        weather = self.weather
        carried = decode(encode(message))  # nothing travels that the codec cannot carry
        assert carried == message, f"{message} arrives as {carried}"
        copies = 2 if self.random.random() < weather.doubling else 1
        for _ in range(copies):
            lost = self.random.random() < weather.loss
            delay_ms = self.random.randint(*weather.delay_ms)
            if self.random.random() < weather.straggler:
                delay_ms = self.random.randint(0, 1_000)
            if self.story is not None and not isinstance(message, _HUM):
                fate = "is lost" if lost else f"takes {delay_ms} ms"
                self.tell(who, f"{_short(message)} {fate}")
            if lost:
                self.seen["lost"] += 1
            else:
                self.plan(delay_ms, partial(deliver, carried))

    def at_coordinator(self, peer: bytes, message: Message) -> None:
        if self.coordinator is not None:
            self.coordinator.receive(peer, message)

    def perform(self, coordinator: Coordinator, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case CoordinatorSend(peer=peer, message=message):
                    if isinstance(message, Start):
                        self._note_start(coordinator, message)
                    self._count(getattr(message, "deployment", ""))
                    self.carry(coordinator.name, message, partial(self.at_peer, peer))
                case Publish(deployment=name, message=message):
                    assert isinstance(message, Update)
                    self.published(name, message)
                    for front_end in self.front_ends:
                        if front_end.core.deployment == name and front_end.subscribed:
                            self.carry(coordinator.name, message, front_end.receive)
                case Note(text=text, deployment=name):
                    self.tell(coordinator.name, f"{name} {text}")
                case Answer(answer=answer):
                    self.tell(coordinator.name, f"answers the operator: {answer}")

    def at_peer(self, peer: bytes, message: Message) -> None:
        for spec in self.specs:
            for rank in self.everybody(spec.name):
                if rank.peer == peer and not rank.is_cut:
                    rank.receive(message)
        for front_end in self.front_ends:
            if front_end.peer == peer:
                front_end.receive(message)

    # --- invariants --------------------------------------------------------------------------------------------------

    def published(self, name: str, update: Update) -> None:
        """Running is never published without evidence, and nothing published goes back."""
        before = self._published.get(name)
        if before is not None:
            order = (before.term, before.seq), (update.term, update.seq)
            assert order[0] < order[1], f"the feed went from {order[0]} to {order[1]}"
            if before.term == update.term:
                assert before.epoch <= update.epoch and before.wave <= update.wave, f"{before} -> {update}"
        for state in update.ranks:
            if state.load_number:  # 0: this term has not heard any yet
                number = self._loads.get((name, state.incarnation), 0)
                assert number <= state.load_number, f"an older load of rank {state.rank} was published"
                self._loads[name, state.incarnation] = state.load_number
        self._published[name] = update
        if update.phase is not Phase.RUNNING:
            return
        self.seen["running"] += 1
        assert self.fleet is not None
        members = self.fleet.deployments[name].members
        for rank in self.ranks[name].values():
            member = members.get(rank.rank) if rank.rank in members.places else None
            if member is None or member.incarnation != rank.core.identity.incarnation:
                continue  # the life that acknowledged has died since, and nobody knows it yet
            stepper = rank.core.stepper
            began = stepper.wave > update.wave or stepper.epoch > update.epoch
            halted = rank.core.mode is Mode.HALTED  # it has begun, and left since; its word is on the way
            assert began or (stepper.wave == update.wave and (stepper.running or halted)), (
                f"wave {update.wave} of {name} was published as running, but {rank.name} has not begun it"
            )

    def _note_start(self, coordinator: Coordinator, start: Start) -> None:
        self._started.add((start.deployment, start.term, start.epoch, start.wave))
        self._first_waves.setdefault((start.deployment, start.epoch), start.wave)
        if (start.deployment, start.term, start.seq) in coordinator.commanded:
            return  # sent again: it answers what was asked before it only
        coordinator.commanded.add((start.deployment, start.term, start.seq))
        if start.deployment in coordinator.asked:
            coordinator.asked.discard(start.deployment)
            self._asked_for.add((start.deployment, start.epoch, start.wave))

    def check_empty(self, rank: Rank, epoch: int, wave: int) -> None:
        """Front-ends' wishes are the only cause of waves in which nothing runs, one each.

        Not so the first of an epoch: a rank that was thrown out of a step knows not whether its work was done.
        """
        name = rank.spec.name
        known = (name, epoch, wave) in self._asked_for or wave <= self._first_waves.get((name, epoch), wave)
        self.seen["empty"] += 1
        assert known, f"wave {wave} of {name} was empty, and no front-end had asked for it"

    def check_forward(self, rank: Rank) -> None:
        """Once it is said that a deployment is held, no model runs until it is resumed."""
        update = self._published.get(rank.spec.name)
        newest = self.ranks[rank.spec.name][rank.rank] is rank  # a zombie may end the step that it was stopped in
        held = update is not None and update.phase is Phase.HELD and newest
        assert not held, f"{rank.name} runs its model, and {rank.spec.name} is published as held"

    def refused(self, rank: Rank) -> None:
        """A process that is refused for good ends; only one whose place was taken may be, and another is started."""
        refusal = rank.core.refused
        others = [life for life in self.former[rank.spec.name] if life.rank == rank.rank and life is not rank]
        newest = self.ranks[rank.spec.name][rank.rank] is rank
        fenced = refusal is not None and refusal.reason is RefusalReason.FENCED
        assert not newest or (fenced and others), f"{rank.name} is the only life of its rank, and refused: {refusal}"
        if rank.alive and newest:  # an older life has come back while this one was given up
            self.plan(200, partial(self.start_rank, rank.spec, rank.rank))
        rank.crash()

    def check_waves(self) -> None:
        """A wave ends with the exchange after its last work; dense ranks have no waves."""
        for spec in self.specs:
            for rank in self.everybody(spec.name):
                counters = rank.core.stepper.counters()
                if spec.kind is Kind.DENSE:
                    traces = counters.group_operations, counters.process_groups, counters.wave_messages, counters.waves
                    assert not any(traces), f"{rank.name} is dense and has done {counters}"
                else:
                    late = counters.steps_after_last_work
                    assert late <= 1 + self.seen["step failed"], f"{rank.name}: {late} exchanges after the last work"

    def check_operations(self) -> None:
        """The ranks of a group have done the same operations in the same order; some may not have come to the end."""
        for name, group in self.groups.items():
            longest = max(group.operations.values(), key=len)
            for operations in group.operations.values():
                assert operations == longest[: len(operations)], f"two ranks of group {name} did different things"

    def _count(self, deployment: str) -> None:
        """No storm: what is sent in one virtual second is bounded by who there is and by the waves that begin."""
        if self.now_ms // 1000 != self._second:
            self._second = self.now_ms // 1000
            self._sent.clear()
            self._started.clear()
        self._sent[deployment] += 1
        peers = len(self.front_ends) + sum(rank.alive for rank in self.everybody(deployment)) if deployment else 99
        waves = sum(each[0] == deployment for each in self._started)
        allowed = peers * (QUIET_MESSAGES_MAX + WAVE_MESSAGES_MAX * waves)
        self.busiest = max(self.busiest, self._sent[deployment] / allowed)
        assert self._sent[deployment] <= allowed, f"{self._sent[deployment]} messages of {deployment} in one second"


def _short(message: Message) -> str:
    """One line of a message, without what everybody knows."""
    known = {"t", "deployment", "incarnation", "settings", "attributes", "counters", "timing", "members", "at", "feed"}
    facts = msgspec.to_builtins(message)
    told = " ".join(f"{key}={value}" for key, value in facts.items() if key not in known)
    at = facts.get("at")
    where = f" at {at['mode']} {at.get('epoch', 0)}.{at.get('wave', 0)}.{at.get('step', 0)}" if at else ""
    more = f" applied={at.get('applied', 0)}{' has work' if at.get('has_work') else ''}" if at else ""
    return f"{type(message).__name__} {told}{where}{more}"


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
        deployment = world.random.choice(world.front_ends).core.deployment
        request = Request(number, world.random.randint(1, steps))
        world.plan(round(at_ms), partial(world.send, request, deployment))
    return list(range(requests))


def summary(world: World) -> dict[str, object]:
    """For a failing test's message."""
    ranks = [rank for spec in world.specs for rank in world.ranks[spec.name].values()]
    return {
        "now_ms": world.now_ms,
        "fleet": repr(world.fleet),
        "ranks": {rank.name: (msgspec.to_builtins(rank.core.at()), len(rank.queue)) for rank in ranks},
        "seen": dict(world.seen),
    }
