"""Whoever talks to the coordinator in the simulated world: ranks with their engines, and front-ends.

A peer is a process: it has a clock of its own, and it can be cut off, frozen and killed. What happens to a frozen one
happens when it goes on. The engine of a rank is a queue of requests and a thread that can be frozen, slowed down and
thrown out of an exchange by itself, while its control thread lives.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from wavekeeper.coordinator.core import DeploymentSpec
from wavekeeper.coordinator.core.lockstep import Lockstep
from wavekeeper.proto.messages import FirstRequest, Halted, Load, Message, Mode, Register, Timing
from wavekeeper.proto.rows import Position, Row, gathered
from wavekeeper.worker_agent import events as rank_events
from wavekeeper.worker_agent import front_end_core
from wavekeeper.worker_agent.core import RankCore
from wavekeeper.worker_agent.events import Hook
from wavekeeper.worker_agent.plan import Outcome, Plan, PlanSettings, decide

if TYPE_CHECKING:
    from .world import World

SETTINGS = PlanSettings()
TIMING = Timing(
    heartbeat_ms=100,
    stall_after_ms=1_000,
    dead_after_ms=1_500,
    step_deadline_ms=5_000,
    start_ack_timeout_ms=1_000,
    form_timeout_ms=3_000,
)
NEVER_MS = 1 << 61
THROWN_OUT_MS = 50
"""An exchange is left that soon after it was interrupted."""


@dataclass
class Request:
    """So many steps of work for one rank."""

    number: int
    left: int
    done: Callable[[], None] = lambda: None


@dataclass(eq=False)
class Group:
    """One exchange of one epoch: rows by count of exchange."""

    ranks: tuple[int, ...]
    joined: set[int] = field(default_factory=set)
    rows: dict[int, dict[int, tuple[Row, Position]]] = field(default_factory=dict)
    plans: dict[int, Plan] = field(default_factory=dict)
    operations: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.operations = {rank: [] for rank in self.ranks}


class Peer:
    """A process: alive or not, frozen or not, with a clock of its own that begins anywhere."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.offset_ms = world.random.randint(0, 1 << 40) if world.clocks_differ else 0
        self.frozen_until_ms = 0
        self.cut_until_ms = 0
        self._backlog: list[Callable[[], None]] = []
        self._tick_ms: int | None = None

    @property
    def clock_ms(self) -> int:
        return self.world.now_ms + self.offset_ms

    @property
    def is_cut(self) -> bool:
        return self.world.now_ms < self.cut_until_ms

    def due_ms(self) -> int:
        """When this process must look at its clock."""
        raise NotImplementedError

    def tick(self) -> None:
        """Time has passed."""
        raise NotImplementedError

    def happens(self, action: Callable[[], None]) -> None:
        """Do this now, or as soon as this process is not frozen any more; never when it is dead."""
        if not self.alive:
            return
        if self.world.now_ms < self.frozen_until_ms:
            self._backlog.append(action)
        else:
            action()

    def freeze(self, for_ms: int) -> None:
        """Stop the whole process, as SIGSTOP does."""
        self.frozen_until_ms = max(self.frozen_until_ms, self.world.now_ms + for_ms)
        self.world.plan(for_ms, self.thaw)

    def thaw(self) -> None:
        if self.world.now_ms >= self.frozen_until_ms:
            backlog, self._backlog = self._backlog, []
            for action in backlog:
                self.happens(action)

    def cut(self, duration_ms: int) -> None:
        """Nothing of the control plane reaches or leaves this process for so long; the exchange goes on."""
        self.cut_until_ms = max(self.cut_until_ms, self.world.now_ms + duration_ms)

    def jump(self, by_ms: int) -> None:
        """This clock runs ahead of all the others."""
        self.offset_ms += by_ms
        self.happens(self.tick)

    def calm(self) -> None:
        """Nothing is wrong with this process any more."""
        self.cut_until_ms = self.frozen_until_ms = 0
        self.thaw()

    def plan_tick(self) -> None:
        """Look at the clock when the core has asked for it, not later."""
        due_ms = self.due_ms()
        if due_ms < NEVER_MS and (self._tick_ms is None or due_ms < self._tick_ms):
            self._tick_ms = due_ms
            self.world.plan(max(0, due_ms - self.clock_ms), partial(self._tick_is_due, due_ms))

    def _tick_is_due(self, due_ms: int) -> None:
        if self._tick_ms == due_ms:
            self.happens(self._tick_now)

    def _tick_now(self) -> None:
        self._tick_ms = None
        self.tick()

    def later(self) -> None:
        """After an event: the next look must lie ahead, or the process would spin."""
        assert self.due_ms() > self.clock_ms, f"{self.name} wants to be called at once, again and again"


class Rank(Peer):
    """One rank's process: its core, and an engine that is a queue."""

    def __init__(self, world: "World", spec: DeploymentSpec, rank: int, life: int) -> None:
        super().__init__(world, f"{spec.name}/{rank}/{life}")
        self.spec = spec
        self.rank = rank
        self.life = life
        self.queue: deque[Request] = deque()
        self.group: Group | None = None
        self.count = 0
        self.turn_planned = False
        self.waiting_in: tuple[Group, int] | None = None
        self.thrown = False
        self.engine_frozen_until_ms = 0
        self.slow_until_ms = 0
        self.exchange_breaks = False
        self.step_fails = False
        self.last = (0, 0, 0)
        self.registers: list[Register] = []
        """What this life has sent to be registered, for copies that turn up late."""
        identity = rank_events.Identity(
            deployment=spec.name,
            rank=rank,
            incarnation=f"{world.random.getrandbits(64):016x}",
            kind=spec.kind,
            dp_size=spec.dp_size,
            settings=SETTINGS.compared(),
            host="one",
            exchanges=("shm",) if spec.kind.lockstep else (),
            serve=self.name,
        )
        self.core = RankCore(identity, Random(world.random.getrandbits(32)), self.clock_ms)
        self.peer = identity.incarnation.encode()
        self.plan_tick()

    # --- the control thread ------------------------------------------------------------------------------------------

    def due_ms(self) -> int:
        return self.core.next_deadline_ms()

    def tick(self) -> None:
        self._handle(rank_events.Tick())

    def receive(self, message: Message) -> None:
        self.happens(partial(self._handle, rank_events.Received(message)))

    def _handle(self, event: rank_events.Event) -> None:
        effects = self.core.handle(event, self.clock_ms)
        self.later()
        self.do(effects)

    def do(self, effects: list[rank_events.Effect]) -> None:
        for effect in effects:
            match effect:
                case rank_events.Send(message=message):
                    if isinstance(message, Register):
                        self.registers.append(message)
                    self.world.seen["halted"] += isinstance(message, Halted)
                    if not self.is_cut:
                        self.world.to_coordinator(self, message)
                case rank_events.Build():
                    self.world.plan(self.world.random.randint(0, 20), partial(self.build, effect))
                case rank_events.Interrupt():
                    self._interrupt()
                case rank_events.Note(text=text):
                    self.world.tell(self.name, text)
                case _:
                    pass
        self.plan_turn(0)
        self.plan_tick()
        self._remember()
        if self.core.refused is not None and not self.core.refused.retry:
            self.world.refused(self)

    def build(self, effect: rank_events.Build) -> None:
        """The builder's thread: wait for the others, try, hand over."""
        form = effect.form
        group = self.world.groups.setdefault(form.group, Group(tuple(member.rank for member in form.members)))
        if self.alive:
            group.joined.add(self.rank)
        began_ms = self.world.now_ms

        def look() -> None:
            if len(group.joined) == len(group.ranks):
                effects = self.core.handle(rank_events.Built(form.group, "shm", 0), self.clock_ms)
                if self.core.group == form.group:
                    self.group, self.count = group, 0
                self.do(effects)
            elif self.world.now_ms - began_ms >= TIMING.form_timeout_ms:
                self._handle(rank_events.BuildFailed(form.group, "some rank did not come"))
            else:
                self.world.plan(self.world.random.randint(5, 40), partial(self.happens, look))

        self.happens(look)

    def _interrupt(self) -> None:
        self.group = None
        if self.waiting_in is not None and not self.thrown:
            self.thrown = True
            delay_ms = self.world.random.randint(0, THROWN_OUT_MS)
            self.world.plan(delay_ms, partial(self.engine, partial(self.thrown_out, self.waiting_in)))

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def engine(self, action: Callable[[], None]) -> None:
        """Do this on the engine's thread: not while it is frozen."""
        wait_ms = self.engine_frozen_until_ms - self.world.now_ms
        if wait_ms > 0:
            self.world.plan(wait_ms, partial(self.engine, action))
        else:
            self.happens(action)

    def submit(self, request: Request) -> None:
        """A front-end's request has come to this process."""
        if not self.alive:
            self.world.fail(request)
        else:
            self.queue.append(request)
            self.happens(self._work_arrived)

    def _work_arrived(self) -> None:
        self.do(self.core.work_arrived())
        self._report()

    def _report(self) -> None:
        self._handle(rank_events.LoadChanged(Load(running=len(self.queue))))

    def plan_turn(self, delay_ms: int) -> None:
        if not self.turn_planned and self.waiting_in is None:
            self.turn_planned = True
            slow_ms = self.world.random.randint(50, 300) if self.world.now_ms < self.slow_until_ms else 0
            self.world.plan(delay_ms + slow_ms, partial(self.engine, self.turn))

    def turn(self) -> None:
        self.turn_planned = False
        if self.waiting_in is not None:
            return
        lost, effects = self.core.leave_for_fault()
        if lost is not None:
            self.world.seen["RankLost"] += 1
            self.do(effects)
        elif (hook := self.core.take_hook()) is not None:
            delay_ms = self.world.random.randint(0, 30)  # the engine waits for its device, or gives its weights back
            self.turn_planned = True
            self.world.plan(delay_ms, partial(self.engine, partial(self._hook_done, hook)))
        elif not self.core.must_step:
            pass
        elif not self.spec.kind.lockstep:
            self.advance()
            self.core.stepper.alone(Row(num_tokens=len(self.queue), has_work=bool(self.queue)))
            self.plan_turn(self.world.random.randint(1, 10))
        else:
            self.post()

    def _hook_done(self, hook: Hook) -> None:
        self.turn_planned = False
        if hook is Hook.SPARE:
            self.give_back()
        self.do(self.core.hook_done(hook))

    def give_back(self) -> None:
        """Nothing will run here: whoever sent these requests sends them to another rank."""
        requests, self.queue = self.queue, deque()
        for request in requests:
            self.world.seen["given back"] += 1
            request.done()
            self.world.plan(self.world.random.randint(0, 10), partial(self.world.send, request, self.spec.name))
        self._report()

    def post(self) -> None:
        failing, self.step_fails = self.step_fails, False
        self.world.seen["step failed"] += failing
        row = Row(num_tokens=len(self.queue), has_work=bool(self.queue), dummy=not self.queue, local_error=failing)
        row, position = self.core.begin(row)
        group = self.group
        if group is None:  # given up between two looks
            self._left(None)
            return
        self.count += 1
        self.waiting_in = waiting = group, self.count
        posted = group.rows.setdefault(self.count, {})
        assert all(other == position for _, other in posted.values()), f"{self.name} is at {position}: {posted}"
        posted[self.rank] = row, position
        group.operations[self.rank].append(str(position))
        if self.exchange_breaks:
            self.exchange_breaks = False
            self.world.plan(self.world.random.randint(0, 30), partial(self.engine, partial(self.broken, waiting)))
        self.world.plan(TIMING.step_deadline_ms, partial(self.engine, partial(self.timed_out, waiting)))
        if len(posted) == len(group.ranks):
            for peer in self.world.everybody(self.spec.name):
                if peer.waiting_in == waiting:
                    delay_ms = self.world.random.randint(0, 3)
                    self.world.plan(delay_ms, partial(peer.engine, partial(peer.arrived, waiting)))

    def arrived(self, waiting: tuple[Group, int]) -> None:
        """All rows are there for this rank; it may be that it is just being thrown out."""
        if self.waiting_in != waiting or (self.thrown and self.world.random.random() < 0.5):
            return
        group, number = waiting
        self.waiting_in, self.thrown = None, False
        rows = group.rows[number]
        position = next(iter(rows.values()))[1]
        plan = decide(gathered([rows[rank][0] for rank in group.ranks], position), position, SETTINGS)
        assert group.plans.setdefault(number, plan) == plan, "two ranks made different plans of the same rows"
        if plan.runs_forward:
            assert self.core.mode is Mode.RUNNING, f"a forward in mode {self.core.mode}"
            self.world.check_forward(self)
        empty = self.core.stepper.counters().empty_waves
        self.do(self.core.finish(plan, 5.0))
        if plan.outcome is Outcome.WAVE_ENDED and self.core.stepper.counters().empty_waves > empty:
            self.world.check_empty(self, plan.epoch, plan.wave)
        if plan.runs_forward:
            self.advance()
        self.plan_turn(self.world.random.choice((0, 1, 2, 10)))

    def timed_out(self, waiting: tuple[Group, int]) -> None:
        group, number = waiting
        missing = sorted(set(group.ranks) - set(group.rows[number]))
        if missing and self.waiting_in == waiting:
            self.world.seen["timed out"] += 1
            self.thrown_out(waiting, missing[0])

    def broken(self, waiting: tuple[Group, int]) -> None:
        """The exchange fails for this rank alone, and its own word of it is lost."""
        self.cut(60)
        self.thrown_out(waiting)

    def thrown_out(self, waiting: tuple[Group, int], blamed: int | None = None) -> None:
        if self.waiting_in == waiting:
            self.waiting_in, self.thrown = None, False
            self._left(blamed)

    def _left(self, blamed: int | None) -> None:
        lost, effects = self.core.leave_for_fault()
        if lost is None:
            effects = self.core.fail("the exchange gave no rows", blamed)
        self.world.seen["RankLost"] += 1
        self.group = None
        self.do(effects)

    def advance(self) -> None:
        for request in list(self.queue):
            request.left -= 1
            if request.left <= 0:
                self.queue.remove(request)
                self.world.finish(request)
        self._report()

    def is_inside(self, deployment: Lockstep) -> bool:
        """Whether this life, as a member of the deployment, waits in an exchange."""
        record = deployment.members.get(self.rank)
        member = record is not None and record.incarnation == self.core.identity.incarnation
        return member and self.waiting_in is not None

    def _remember(self) -> None:
        """Term, epoch and wave never go back; a dense rank has none of them."""
        stepper = self.core.stepper
        now = self.core.term, stepper.epoch, stepper.wave
        assert all(new >= old for new, old in zip(now, self.last, strict=True)), f"{self.name}: {self.last} -> {now}"
        self.last = now

    # --- its end -----------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        if self.alive:
            self.alive = False
            for request in self.queue:
                self.world.fail(request)
            self.queue.clear()

    def leave(self) -> None:
        """Stop on purpose."""
        self.happens(self._leave)

    def _leave(self) -> None:
        self.do(self.core.handle(rank_events.Closing("told to"), self.clock_ms))
        self.crash()

    def busy(self, for_ms: int) -> None:
        """A long operation that was announced: nothing is heard of the engine."""
        self.happens(partial(self._handle, rank_events.BusyUntil(self.clock_ms + for_ms)))
        self.engine_frozen_until_ms = max(self.engine_frozen_until_ms, self.world.now_ms + for_ms)

    def calm(self) -> None:
        self.engine_frozen_until_ms = self.slow_until_ms = 0
        super().calm()
        self.happens(partial(self.plan_turn, 0))


class FrontEnd(Peer):
    """One front-end's process."""

    def __init__(self, world: "World", deployment: str) -> None:
        name = f"{world.random.getrandbits(64):016x}"
        super().__init__(world, f"front-end {name[:4]} of {deployment}")
        self.core = front_end_core.FrontEndCore(deployment, name, Random(world.random.getrandbits(32)), self.clock_ms)
        self.peer = name.encode()
        self.subscribed = False
        self.plan_tick()

    def due_ms(self) -> int:
        return self.core.next_deadline_ms(self.clock_ms)

    def tick(self) -> None:
        self._handle(front_end_core.Tick())

    def receive(self, message: Message) -> None:
        if not self.is_cut:
            self.happens(partial(self._handle, front_end_core.Received(message)))

    def _handle(self, event: front_end_core.Received | front_end_core.Tick) -> None:
        before = self.core.term, self.core.seq
        effects = self.core.handle(event, self.clock_ms)
        assert before <= (self.core.term, self.core.seq), f"{self.name} went back from {before}"
        self.later()
        self.do(effects)

    def do(self, effects: list[front_end_core.Effect]) -> None:
        for effect in effects:
            match effect:
                case front_end_core.Send(message=message):
                    if isinstance(message, FirstRequest):
                        self.world.seen["asked"] += 1
                    if not self.is_cut:
                        self.world.to_coordinator(self, message)
                case front_end_core.Subscribe():
                    self.subscribed = True
                case _:
                    pass
        self.plan_tick()

    def send(self, request: Request) -> None:
        """Route one request; try again later while no rank is known to be up."""
        choice, effects = self.core.pick(self.clock_ms)
        self.do(effects)
        if choice is None:
            self.world.plan(50, partial(self.world.send, request, self.core.deployment))
            return
        request.done = partial(self.core.done, choice)
        life = next(rank for rank in self.world.everybody(self.core.deployment) if rank.name == choice.serve)
        self.world.tell(self.name, f"sends request {request.number} ({request.left} steps) to {life.name}")
        self.world.plan(self.world.random.randint(0, 10), partial(life.submit, request))
