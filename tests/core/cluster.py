"""A whole deployment of production cores on both sides, moved by hand: message by message, row by row.

Whatever order a network could deliver, a test can. The exchange is exact: it gives every rank all rows, or it fails.
"""

from collections import deque
from collections.abc import Callable
from random import Random

from wavekeeper.coordinator.core import Effect, Ended, Fleet, Publish, Received, Send, Tick
from wavekeeper.coordinator.core.lockstep import Lockstep
from wavekeeper.coordinator.core.specs import DeploymentSpec
from wavekeeper.proto import messages as m
from wavekeeper.proto.rows import DUMMY, Position, Row
from wavekeeper.worker_agent import events as rank_events
from wavekeeper.worker_agent.core import RankCore
from wavekeeper.worker_agent.plan import Plan

from .stories import make_fleet, moe, planned, wire


class Engine:
    """One production rank core, its queue of work (steps left), and its place in the exchange."""

    def __init__(self, rank: int, spec: DeploymentSpec, now_ms: int, life: int = 0) -> None:
        identity = rank_events.Identity(
            deployment=spec.name,
            rank=rank,
            incarnation=f"{rank + 1:08x}{life:08x}",
            kind=spec.kind,
            dp_size=spec.dp_size,
            host="one",
            exchanges=("shm",) if spec.kind.lockstep else (),
        )
        self.core = RankCore(identity, Random(rank), now_ms)
        self.rank = rank
        self.work = 0
        self.done = 0
        self.posted: tuple[Row, Position] | None = None
        self.count = 0
        self.group = ""
        self.building: m.Form | None = None
        self.operations: list[str] = []
        self.starts = 0
        self.hooks: list[rank_events.Hook] = []
        self.given_back = 0
        self.device_idle = True
        """Whether the device comes to rest when it is asked to."""


class Cluster:
    """One lockstep deployment: production cores on both sides, links moved by hand, an exact exchange."""

    def __init__(self, dp_size: int = 2) -> None:
        self.spec = moe(dp_size)
        self.now_ms = 1_000
        self.fleet: Fleet | None = make_fleet(self.spec, now_ms=self.now_ms)
        self.term = 1
        self.lives = 0
        self.asks = 0
        self.dead: set[int] = set()
        self.refuses_to_build: set[int] = set()
        self.up: list[deque[m.Message]] = [deque() for _ in range(dp_size)]
        self.down: list[deque[m.Message]] = [deque() for _ in range(dp_size)]
        self.rows: dict[tuple[str, int], dict[int, tuple[Row, Position]]] = {}
        self.plans: dict[tuple[str, int], Plan] = {}
        self.phases: list[m.Phase] = []
        """Phases as published."""
        self.said: list[m.Message] = []
        """All that the coordinator has sent to ranks, whether it arrived or not."""
        self.engines = [Engine(rank, self.spec, self.now_ms) for rank in range(dp_size)]
        for engine in self.engines:
            self.tick(engine)

    @property
    def lockstep(self) -> Lockstep:
        """The coordinator's side."""
        assert self.fleet is not None
        deployment = self.fleet.deployments["moe"]
        assert isinstance(deployment, Lockstep)
        return deployment

    def is_in(self, phase: m.Phase) -> bool:
        """Whether the deployment is in this phase now."""
        return self.lockstep.phase is phase

    # --- the network, by hand ----------------------------------------------------------------------------------------

    def hear(self, rank: int) -> None:
        """The coordinator receives the oldest message of one rank."""
        self.coordinator(Received(str(rank).encode(), wire(self.up[rank].popleft())))

    def obey(self, rank: int) -> None:
        """A rank receives the oldest message of the coordinator."""
        engine = self.engines[rank]
        self.perform(engine, engine.core.handle(rank_events.Received(wire(self.down[rank].popleft())), self.now_ms))

    def coordinator(self, event: Received | Tick) -> None:
        """One event at the coordinator; nothing happens while it is down."""
        if self.fleet is None:
            return
        for effect in self.fleet.handle(event, self.now_ms):
            self.do(effect)
        self.fleet.check()

    def do(self, effect: Effect) -> None:
        """What the coordinator asks for."""
        if isinstance(effect, Send) and effect.peer != b"fe" and int(effect.peer) not in self.dead:
            self.down[int(effect.peer)].append(effect.message)
            self.said.append(effect.message)
        elif isinstance(effect, Publish) and isinstance(effect.message, m.Update):
            self.phases.append(effect.message.phase)

    def coordinator_hears_first_request(self, wave: int) -> None:
        """A front-end asks for a start."""
        self.asks += 1
        word = m.FirstRequest(front_end="f" * 16, deployment="moe", ask=self.asks, wave=wave)
        self.coordinator(Received(b"fe", wire(word)))

    def coordinator_ticks(self) -> None:
        """Time passes at the coordinator and the ranks' control threads; the engines stand still."""
        self.coordinator(Tick())
        for engine in self.engines:
            self.tick(engine)
        self.flow()

    def tick(self, engine: Engine) -> None:
        """Time passes at one rank."""
        if engine.rank in self.dead:
            return
        self.perform(engine, engine.core.handle(rank_events.Tick(), self.now_ms))

    def flow(self, alive: Callable[[int], bool] = lambda rank: True) -> None:
        """Deliver everything, in order, and let exchanges form, until nothing is on its way."""
        while any(alive(r) and (self.up[r] or self.down[r]) for r in range(self.spec.dp_size)) or self._built():
            for rank in range(self.spec.dp_size):
                while alive(rank) and self.up[rank]:
                    self.hear(rank)
                while alive(rank) and self.down[rank]:
                    self.obey(rank)

    def pass_time(self, wait_ms: int, step_ms: int = 50) -> None:
        """Let time pass for everybody; everything is delivered, every engine turns."""
        until_ms = self.now_ms + wait_ms
        while self.now_ms < until_ms:
            self.now_ms += step_ms
            self.coordinator(Tick())
            for engine in self.engines:
                self.tick(engine)
            self.flow()
            self.turn_all()

    # --- the engines -------------------------------------------------------------------------------------------------

    def request(self, rank: int, steps: int = 1) -> None:
        """A request reaches a rank."""
        engine = self.engines[rank]
        engine.work += steps
        self.perform(engine, engine.core.work_arrived())

    def post(self, rank: int) -> bool:
        """The engine writes its row, if it has to; True if it did."""
        engine = self.engines[rank]
        lost, effects = engine.core.leave_for_fault()
        self.perform(engine, effects)
        self._call_hooks(engine)
        if lost is not None or engine.posted is not None or not engine.core.must_step:
            return False
        row = Row(num_tokens=engine.work, has_work=True) if engine.work else DUMMY
        engine.posted = engine.core.begin(row)
        engine.count += 1
        self.rows.setdefault((engine.group, engine.count), {})[rank] = engine.posted
        engine.operations.append(str(engine.posted[1]))
        return True

    def _call_hooks(self, engine: Engine) -> None:
        """What the engine's wait() does first."""
        while (hook := engine.core.take_hook()) is not None and engine.posted is None:
            if hook is rank_events.Hook.DEVICE_IDLE and not engine.device_idle:
                return
            engine.hooks.append(hook)
            if hook is rank_events.Hook.SPARE:
                engine.given_back, engine.work = engine.work, 0
            self.perform(engine, engine.core.hook_done(hook))

    def read(self, rank: int) -> bool:
        """The engine reads the rows of its exchange, if all are there; True if it did."""
        engine = self.engines[rank]
        key = engine.group, engine.count
        rows = self.rows.get(key, {})
        group = engine.core.group_ranks
        if engine.posted is None or len(rows) < len(group):
            return False
        assert len({position for _, position in rows.values()}) == 1, f"the ranks met at different positions: {rows}"
        plan = planned([rows[r][0] for r in group], engine.posted[1])
        assert self.plans.setdefault(key, plan) == plan
        engine.posted = None
        self.perform(engine, engine.core.finish(plan, 1.0))
        if plan.runs_forward and engine.work:
            engine.work -= 1
            engine.done += 1
        return True

    def turn_all(self) -> None:
        """Let every engine do what it can, until none can."""
        ranks = range(self.spec.dp_size)
        while any([self.post(rank) for rank in ranks] + [self.read(rank) for rank in ranks]):
            pass

    def settle(self) -> None:
        """Deliver and step until nothing moves."""
        while True:
            self.flow()
            before = [engine.count for engine in self.engines]
            self.turn_all()
            if before == [engine.count for engine in self.engines] and not any(self.up) and not any(self.down):
                return

    def perform(self, engine: Engine, effects: list[rank_events.Effect]) -> None:
        """Do what a rank's core asks for."""
        for effect in effects:
            match effect:
                case rank_events.Send(message=message):
                    self.up[engine.rank].append(message)
                    engine.starts += isinstance(message, m.Started)
                case rank_events.Build(form=form):
                    engine.building = form
                case rank_events.Interrupt():
                    engine.group, engine.count = "", 0
                    if engine.posted is not None:
                        engine.posted = None
                        lost, more = engine.core.leave_for_fault()
                        self.perform(engine, more if lost is not None else engine.core.fail("interrupted", None))
                case _:
                    pass

    def _built(self) -> bool:
        """The exchange stands as soon as all ranks of the group build it, and those that are up are all there are."""
        for form in [engine.building for engine in self.engines if engine.building is not None]:
            ranks = [self.engines[member.rank] for member in form.members]
            if self.refuses_to_build.isdisjoint(form_rank.rank for form_rank in form.members) and all(
                engine.building is not None and engine.building.group == form.group for engine in ranks
            ):
                for engine in ranks:
                    engine.building, engine.group, engine.count = None, form.group, 0
                    built = rank_events.Built(form.group, "shm", 0)
                    self.perform(engine, engine.core.handle(built, self.now_ms))
                return True
        return False

    # --- what is true now --------------------------------------------------------------------------------------------

    def waves(self) -> list[tuple[m.Mode, int]]:
        """Mode and wave of every rank."""
        return [(engine.core.mode, engine.core.stepper.wave) for engine in self.engines]

    def crash(self) -> None:
        """The coordinator dies; what it has sent and not delivered dies with it, as does what was sent to it."""
        self.fleet = None
        for link in [*self.up, *self.down]:
            link.clear()

    def kill(self, rank: int) -> None:
        """A rank's process dies, and nobody takes its place; the coordinator notices."""
        incarnation = self.engines[rank].core.identity.incarnation
        self.dead.add(rank)
        self.up[rank].clear()
        self.down[rank].clear()
        assert self.fleet is not None
        for effect in self.fleet.handle(Ended("moe", rank, incarnation), self.now_ms):
            self.do(effect)

    def replace(self, rank: int) -> None:
        """A rank's process dies with all that it holds, and another life of it begins."""
        self.up[rank].clear()
        self.down[rank].clear()
        self.lives += 1
        self.dead.discard(rank)
        self.engines[rank] = Engine(rank, self.spec, self.now_ms, life=self.lives)
        self.tick(self.engines[rank])

    def restart(self) -> None:
        """A new coordinator, one term higher."""
        self.term += 1
        self.fleet = make_fleet(self.spec, term=self.term, now_ms=self.now_ms)


def formed_cluster(dp_size: int = 2) -> Cluster:
    """A cluster that is formed and idle, with nothing on its way."""
    cluster = Cluster(dp_size)
    cluster.settle()
    assert cluster.waves() == [(m.Mode.IDLE, 0)] * dp_size
    return cluster
