"""A scenario: who is there, what the weather is, which requests come, and what goes wrong when. Drawn from a seed.

The law of this file: a scenario is a value. Playing it twice gives the same story, and taking something away from it
gives another scenario, so that a failure can be shrunk to the few things that it needs.
"""

import signal
import time
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from functools import partial
from random import Random
from types import FrameType

import msgspec

from wavekeeper.coordinator.core import DeploymentSpec
from wavekeeper.coordinator.core.holds import HoldWish, ResumeWish
from wavekeeper.coordinator.core.lockstep import Lockstep
from wavekeeper.coordinator.core.regroups import RecoverWish, ScaleWish
from wavekeeper.proto.messages import HoldMode, Phase

from .peers import Rank, Request
from .world import Weather, World, specs, summary

FAULTS_MS = 6_000
"""Everything that goes wrong begins within this time; it all ends soon after."""
CALM_MS = 9_000
"""From here on nothing is wrong any more."""
LIVENESS_MS = 60_000
"""So long after that, all work is done at the latest: a group that could not be formed for a while waits 30 s."""
SHRINK_S = 30.0
PLAY_S_MAX = 60.0
"""Real seconds of one story, a hundred times what it takes: a core that never comes back from an event is a failure."""


class What(StrEnum):
    """What can go wrong."""

    RESTART = "the coordinator dies and comes back"
    PAUSE = "the coordinator is stopped for a while"
    COORDINATOR_CLOCK = "the coordinator's clock jumps"
    CRASH = "a rank dies and is replaced"
    LEAVE = "a rank leaves on purpose and is replaced"
    CUT = "a rank is cut off"
    FREEZE = "a rank's whole process is stopped for a while"
    ZOMBIE = "a rank's process is stopped, replaced, and goes on"
    ENGINE = "a rank's engine is stuck for a while"
    BUSY = "a rank announces a long operation"
    SLOW = "a rank is slow for a while"
    EXCHANGE = "a rank's exchange fails by itself"
    STEP = "a rank's step fails"
    CLOCK = "a rank's clock jumps"
    LATE_REGISTER = "a copy of an old registration arrives"
    FRONT_END = "a front-end is replaced"
    DEAF = "a front-end is cut off"
    HOLD = "an operator holds the deployment, and resumes it"
    SCALE = "an operator changes the number of ranks"
    SHRINK = "a rank dies, an operator goes on without it, and it is replaced"


_OF_COORDINATOR = (What.RESTART, What.PAUSE, What.COORDINATOR_CLOCK)
_OF_FRONT_ENDS = (What.FRONT_END, What.DEAF)
_OF_OPERATORS = (What.HOLD, What.SCALE)
_HARMLESS = (
    *_OF_COORDINATOR,
    *_OF_FRONT_ENDS,
    *_OF_OPERATORS,
    What.STEP,
    What.BUSY,
    What.SLOW,
    What.LATE_REGISTER,
)
"""Nothing of this may break a running wave."""


_STUBBORN = ((What.RESTART, (1, 5, 50, 300)), (What.PAUSE, (50, 300, 1_700, 3_000)))
"""Troubles that are worth a scenario of their own, and how long they last."""


class Trouble(msgspec.Struct, frozen=True):
    """One thing that goes wrong."""

    what: What
    at_ms: int
    for_ms: int
    deployment: str = ""
    rank: int = 0

    def __str__(self) -> str:
        whose = f" ({self.deployment}/{self.rank})" if self.deployment else ""
        return f"after {self.at_ms} ms, for {self.for_ms} ms: {self.what.value}{whose}"


class Arrival(msgspec.Struct, frozen=True):
    """One request."""

    at_ms: int
    deployment: str
    steps: int


class Scenario(msgspec.Struct, frozen=True):
    """Everything that is decided before a story begins."""

    seed: int
    moe: int
    dense: int
    front_ends: int
    weather: Weather
    clocks_differ: bool
    arrivals: tuple[Arrival, ...]
    troubles: tuple[Trouble, ...]

    def lines(self) -> list[str]:
        """The scenario in words."""
        weather = self.weather
        said = [
            f"seed {self.seed}: {self.moe} lockstep and {self.dense} dense ranks, {self.front_ends} front-ends each"
            f"{', clocks that differ' if self.clocks_differ else ''}",
            f"messages: {weather.loss:.0%} lost, {weather.doubling:.0%} doubled, "
            f"{weather.straggler:.0%} up to 1 s late, others {weather.delay_ms[0]}-{weather.delay_ms[1]} ms",
            *(f"after {a.at_ms} ms: a request of {a.steps} steps to {a.deployment}" for a in self.arrivals),
        ]
        return said + [str(trouble) for trouble in self.troubles]


class Told(msgspec.Struct, frozen=True):
    """What came of a scenario."""

    failure: str
    """Empty: everything held."""
    events: int
    served: int
    failed: int
    calm_after_ms: int
    """From the end of all faults until everything was done."""
    busiest: float
    seen: dict[str, int]
    story: list[str]


def draw(seed: int) -> Scenario:
    """The scenario of this seed."""
    random = Random(seed)
    moe, dense = random.choice((1, 2, 2, 3, 3, 4, 5)), random.choice((0, 1, 1, 2, 3))
    names = [("moe", moe)] * 3 + ([("dense", dense)] if dense else [])
    stormy = random.random() < 0.6
    weather = Weather(
        loss=random.choice((0.0, 0.02, 0.1, 0.3)) if stormy else 0.0,
        doubling=random.choice((0.0, 0.05, 0.2)) if stormy else 0.0,
        delay_ms=(0, random.choice((0, 2, 10, 50))),
        straggler=random.choice((0.0, 0.02, 0.1)) if stormy else 0.0,
    )
    gap_ms = random.choice((20, 100, 300))
    at_ms, arrivals = random.choice((0, 0, 500)), []
    for _ in range(random.randint(1, 40)):
        at_ms += round(random.expovariate(1 / gap_ms)) + (random.randint(0, 1_500) if random.random() < 0.1 else 0)
        arrivals.append(Arrival(min(at_ms, CALM_MS), random.choice(names)[0], random.randint(1, 8)))
    kinds = random.sample(list(What), random.randint(1, 4))
    troubles = []
    for _ in range(random.choice((0, 1, 1, 2, 3, 5))):
        what = random.choice(kinds)
        for_ms = random.choice((1, 50, 300, 1_000, 1_700, 3_000))
        name, size = ("", len(names)) if what in _OF_COORDINATOR else random.choice(names)
        troubles.append(Trouble(what, random.randint(0, FAULTS_MS), for_ms, name, random.randrange(size)))
        if random.random() < 0.3:  # two things at almost the same time
            again = random.choice(list(What)), troubles[-1].at_ms + random.randint(0, 60)
            name, size = ("", 1) if again[0] in _OF_COORDINATOR else random.choice(names)
            troubles.append(Trouble(*again, random.choice((1, 300, 2_000)), name, random.randrange(size)))
    if random.random() < 0.3:  # one thing only, again and again
        what, lasts_ms = random.choice(_STUBBORN)
        times = [random.randint(0, FAULTS_MS) for _ in range(random.randint(2, 10))]
        troubles = [Trouble(what, at_ms, random.choice(lasts_ms)) for at_ms in times]
    troubles.sort(key=lambda trouble: trouble.at_ms)
    differ = random.random() < 0.7
    return Scenario(seed, moe, dense, random.randint(1, 2), weather, differ, tuple(arrivals), tuple(troubles))


def play(scenario: Scenario, *, telling: bool = False) -> Told:
    """Let it happen, and say what came of it."""
    world = World(
        scenario.seed,
        specs(scenario.moe, scenario.dense),
        scenario.weather,
        front_ends=scenario.front_ends,
        clocks_differ=scenario.clocks_differ,
    )
    world.story = [] if telling else None
    failure, calm_ms = "", CALM_MS
    try:
        signal.signal(signal.SIGALRM, _never_comes_back)
        signal.setitimer(signal.ITIMER_REAL, PLAY_S_MAX)
        _plan(world, scenario)
        world.run(lambda: False, CALM_MS)
        calm_ms = world.now_ms
        world.tell("all", "everything is mended")
        world.calm()
        wanted = len(scenario.arrivals)
        finished = world.run(partial(_all_done, world, wanted), LIVENESS_MS)
        _judge(world, scenario, finished)
    except AssertionError as error:
        failure = f"{error}" or "an assertion of the cores"
    except Exception as error:  # a traceback of the cores is a failure like any other
        failure = f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Told(
        failure,
        world.events,
        len(world.done),
        len(world.failed),
        world.now_ms - calm_ms,
        world.busiest,
        dict(world.seen),
        world.story or [],
    )


def _never_comes_back(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the story has not come to its end within {PLAY_S_MAX:g} s of real time")


def _all_done(world: World, wanted: int) -> bool:
    return len(world.done) + len(world.failed) >= wanted and world.quiet() and _everybody_knows(world)


def _everybody_knows(world: World) -> bool:
    """The coordinator and all front-ends know that it is over."""
    assert world.fleet is not None
    for deployment in world.fleet.deployments.values():
        if not deployment.members.full:
            return False
        if isinstance(deployment, Lockstep) and (
            deployment.phase is not Phase.IDLE or deployment.regroup_in_progress is not None
        ):
            return False
    for front_end in world.front_ends:
        state, truth = front_end.core.state, world.fleet.deployments[front_end.core.deployment]
        if not front_end.core.synced or state is None:
            return False
        if (front_end.core.term, state.phase, state.wave) != (truth.term, truth.phase, truth.wave):
            return False
        members = truth.members
        lives = [record.incarnation if record.rank in members.places else "" for record in members]
        if [rank.incarnation for rank in state.ranks] != lives:
            return False
    return True


def _judge(world: World, scenario: Scenario, finished: bool) -> None:
    """What must be true at the end."""
    numbers = Counter(world.done + world.failed)
    twice = [number for number, times in numbers.items() if times > 1]
    assert not twice, f"requests {twice} were served or failed more than once"
    missing = sorted(set(range(len(scenario.arrivals))) - set(numbers))
    assert finished, f"not done {LIVENESS_MS} ms after the last fault; requests {missing} wait; {summary(world)}"
    assert not missing, f"requests {missing} were lost"
    world.check_waves()
    world.check_operations()
    if any(trouble.what not in _HARMLESS for trouble in scenario.troubles):
        return
    # A start that is lost while nobody is there to send it again is waited for in vain; the group forms anew after it.
    absent = scenario.weather.loss > 0 and any(trouble.what in _OF_COORDINATOR for trouble in scenario.troubles)
    assert absent or scenario.weather.loss > 0.1 or not world.seen["timed out"], (
        "a rank waited for one that was never told to come"
    )
    if not scenario.weather.loss and not scenario.weather.straggler:
        assert not world.failed and not world.seen["halted"], "a group broke, with all its ranks in the best health"


def _plan(world: World, scenario: Scenario) -> None:
    for number, arrival in enumerate(scenario.arrivals):
        request = Request(number, arrival.steps)
        world.plan(arrival.at_ms, partial(world.send, request, arrival.deployment))
    for trouble in scenario.troubles:
        world.plan(trouble.at_ms, partial(_happen, world, trouble))


def _happen(world: World, trouble: Trouble) -> None:
    world.tell("trouble", f"{trouble.what.value} {trouble.deployment}/{trouble.rank}, {trouble.for_ms} ms")
    world.seen[trouble.what.name] += 1
    if trouble.what in _OF_COORDINATOR:
        _of_coordinator(world, trouble)
    elif trouble.what in _OF_FRONT_ENDS:
        index = trouble.rank % len(world.front_ends)
        if trouble.what is What.FRONT_END:
            world.restart_front_end(index)
        else:
            world.front_ends[index].cut(trouble.for_ms)
    elif trouble.what is What.HOLD:
        _hold(world, trouble)
    elif trouble.what is What.SCALE:
        _scale(world, trouble)
    else:
        spec = next((spec for spec in world.specs if spec.name == trouble.deployment), None)
        if spec is not None and trouble.rank < spec.dp_size:
            _of_rank(world, spec, world.ranks[spec.name][trouble.rank], trouble)


def _of_coordinator(world: World, trouble: Trouble) -> None:
    if world.coordinator is None:
        return
    match trouble.what:
        case What.RESTART:
            world.crash_coordinator()
            world.plan(trouble.for_ms, world.start_coordinator)
        case What.PAUSE:
            world.coordinator.freeze(trouble.for_ms)
        case _:
            world.coordinator.jump(trouble.for_ms)


def _hold(world: World, trouble: Trouble) -> None:
    """Ask until it is in force, and after `for_ms` ask for its end until nothing is left of it, whoever leads then."""
    mode = (HoldMode.WAIT, HoldMode.NOW, HoldMode.KEEP)[trouble.for_ms % 3]
    until_ms = world.now_ms + trouble.for_ms
    wish = HoldWish(mode=mode, key=f"operator {trouble.at_ms}", refuse=trouble.for_ms == 50)

    def ask() -> None:
        over = world.now_ms > until_ms
        if world.coordinator is not None:
            world.coordinator.wish(ResumeWish() if over else wish, "moe")
        if world.now_ms < CALM_MS + 10_000:
            world.plan(100, ask)

    ask()


def _scale(world: World, trouble: Trouble) -> None:
    """Ask for a number of ranks again and again for so long; whoever leads then is asked."""
    wish = ScaleWish(to=1 + trouble.rank % world.specs[0].dp_size, deadline_s=max(trouble.for_ms, 300) / 1_000)
    until_ms = world.now_ms + trouble.for_ms

    def ask() -> None:
        if world.coordinator is not None:
            world.coordinator.wish(wish, "moe")
        if world.now_ms < until_ms:
            world.plan(100, ask)

    ask()


def _shrink(world: World, spec: DeploymentSpec, life: Rank, trouble: Trouble) -> None:
    """Nobody waits for the replacement, which is a spare when it comes, or comes first."""
    life.crash()
    world.plan(trouble.for_ms, partial(_replace, world, spec, life))

    def ask() -> None:
        deployment = None if world.fleet is None else world.fleet.deployments[spec.name]
        if world.coordinator is not None and isinstance(deployment, Lockstep):
            world.coordinator.wish(RecoverWish(), spec.name)
        if world.ranks[spec.name][life.rank] is life:
            world.plan(100, ask)

    ask()


def _of_rank(world: World, spec: DeploymentSpec, life: Rank, trouble: Trouble) -> None:
    for_ms = trouble.for_ms
    until_ms = world.now_ms + for_ms
    match trouble.what:
        case What.CRASH:
            life.crash()
            world.plan(for_ms, partial(_replace, world, spec, life))
        case What.SHRINK:
            _shrink(world, spec, life, trouble)
        case What.LEAVE:
            life.leave()
            world.plan(for_ms, partial(_replace, world, spec, life))
        case What.CUT:
            life.cut(for_ms)
        case What.FREEZE:
            life.freeze(for_ms)
        case What.ZOMBIE:
            life.freeze(for_ms + 1_500)
            world.plan(for_ms, partial(_replace, world, spec, life))
        case What.ENGINE:
            life.engine_frozen_until_ms = until_ms
        case What.BUSY:
            life.busy(for_ms)
        case What.SLOW:
            life.slow_until_ms = until_ms
        case What.EXCHANGE:
            life.exchange_breaks = True
        case What.STEP:
            life.step_fails = True
        case What.CLOCK:
            life.jump(for_ms)
        case What.LATE_REGISTER:
            for register in [each for old in world.everybody(spec.name) for each in old.registers[-1:]]:
                world.plan(for_ms, partial(world.at_coordinator, register.incarnation.encode(), register))
        case _:
            raise ValueError(trouble.what)


def _replace(world: World, spec: DeploymentSpec, life: Rank) -> None:
    if world.ranks[spec.name][life.rank] is life:
        world.start_rank(spec, life.rank)


# --- shrinking -------------------------------------------------------------------------------------------------------


def shrink(scenario: Scenario, limit_s: float = SHRINK_S) -> Scenario:
    """The smallest scenario that was found to fail as well: nothing of it can be left out any more, or time is up."""
    deadline_s = time.monotonic() + limit_s
    again = True
    while again:
        again = False
        for smaller in _smaller(scenario):
            if time.monotonic() > deadline_s:
                return scenario
            if play(smaller).failure:
                scenario, again = smaller, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with something less, the biggest pieces first."""
    change = partial(msgspec.structs.replace, scenario)
    if scenario.weather != Weather():
        yield change(weather=Weather())
    for name in ("arrivals", "troubles"):
        whole = getattr(scenario, name)
        size = len(whole)
        while size:
            for begin in range(0, len(whole), size):
                yield change(**{name: whole[:begin] + whole[begin + size :]})
            size //= 2
    weather = scenario.weather
    for one in ({"loss": 0.0}, {"doubling": 0.0}, {"straggler": 0.0}, {"delay_ms": (0, 0)}):
        calmer = msgspec.structs.replace(weather, **one)
        if calmer != weather:
            yield change(weather=calmer)
    if scenario.clocks_differ:
        yield change(clocks_differ=False)
    if scenario.dense and not any(a.deployment == "dense" for a in scenario.arrivals):
        yield change(dense=0)
    if scenario.front_ends > 1:
        yield change(front_ends=1)
    if scenario.moe > 1:
        yield change(moe=scenario.moe - 1)
