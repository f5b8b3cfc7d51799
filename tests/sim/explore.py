"""Every interleaving of a small system, with the production cores.

A state is one coordinator core, two or three rank cores with an engine each that is a counter, and what is on the way
between them. From each state every action is tried: a message arrives (in order on each link), a rank posts its row,
takes the rows, says where it stands, is thrown out of a broken exchange; the coordinator sends again; a request
comes, with or without a front-end's word to the coordinator. A budget of misfortunes may be spent anywhere: a message
lost, doubled, or overtaken, a coordinator that restarts, a rank that dies and is replaced.

Safety is asserted in every state. Liveness: from every state in which nothing more can go wrong, a state with all
work done and everybody idle in one wave can be reached. Time does not pass: what a timer would do (heartbeats,
sending again, noticing a death) is an action.

    python -m tests.sim.explore RANKS REQUESTS [--lost N] [--doubled N] [--overtaken N] [--restarts N] [--deaths N]
    [--states MAX]
"""

import argparse
import copy
import hashlib
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import msgspec

from wavekeeper.coordinator.core import DeploymentSpec, Fleet, FleetSpec, Publish, Received, Tick
from wavekeeper.coordinator.core import Send as CoordinatorSend
from wavekeeper.coordinator.core.lockstep import Lockstep
from wavekeeper.proto.messages import At, FirstRequest, Form, FromRank, Kind, Message, Mode, Phase, Timing, Update
from wavekeeper.proto.rows import Position, Row
from wavekeeper.worker_agent import events
from wavekeeper.worker_agent.core import RankCore
from wavekeeper.worker_agent.plan import PlanSettings, decide

NOW_MS = 1_000_000
NEVER_MS = 1 << 40
NAME = "moe"
SETTINGS = PlanSettings()


class Budget(msgspec.Struct, frozen=True):
    """What may still happen from outside. Everything in it is finite, so the state space is."""

    requests: int = 0
    words: int = 1
    """Front-ends that tell the coordinator of their request; the others only send it."""
    lost: int = 0
    doubled: int = 0
    overtaken: int = 0
    restarts: int = 0
    deaths: int = 0


class Half:
    """A generator without a state."""

    def random(self) -> float:
        return 0.5


@dataclass
class Rank:
    """One rank's process."""

    core: RankCore
    life: int = 0
    work: int = 0
    group: str = ""
    count: int = 0
    posted: bool = False
    thrown: bool = False
    building: Form | None = None


@dataclass
class State:
    """Everything, at one moment."""

    fleet: Fleet
    ranks: list[Rank]
    budget: Budget
    links: dict[str, list[Message]] = field(default_factory=dict)
    """What is on the way, by link: `c0` from the coordinator to the rank of incarnation 0..., `r0` back, `f` from a
    front-end.
    """
    rows: dict[tuple[str, int], dict[int, tuple[Row, Position]]] = field(default_factory=dict)
    asks: int = 0
    lives: int = 0

    def clone(self) -> "State":
        fresh: State = fork(self, {})
        return fresh


def fork(value: Any, twins: dict[int, Any]) -> Any:
    """A copy that shares nothing that changes. `twins` are the objects copied so far: one held twice stays one."""
    kind: Any = type(value)
    if kind in (int, str, bool, float, bytes, type(None), tuple) or isinstance(value, msgspec.Struct | Enum | Half):
        return value
    if isinstance(value, dict):
        fresh = kind()
        for name, item in value.items():
            dict.__setitem__(fresh, name, fork(item, twins))
        return fresh
    if isinstance(value, list | deque):
        return kind(fork(item, twins) for item in value)
    twin = twins.get(id(value))
    if twin is None:
        if not hasattr(value, "__dict__"):
            twin = twins[id(value)] = copy.copy(value)  # a record whose fields are values
        else:
            twin = twins[id(value)] = kind.__new__(kind)
            twin.__dict__ = {name: fork(item, twins) for name, item in value.__dict__.items()}
    return twin


def spec_of(ranks: int, term: int) -> FleetSpec:
    timing = Timing(
        heartbeat_ms=60_000,
        stall_after_ms=3_600_000,
        dead_after_ms=3_600_000,
        step_deadline_ms=86_400_000,
        start_ack_timeout_ms=600_000,
        form_timeout_ms=3_600_000,
    )
    deployment = DeploymentSpec(name=NAME, kind=Kind.MOE, dp_size=ranks)
    return FleetSpec(boot=f"{term:016x}", term=term, deployments=(deployment,), feed="feed", timing=timing)


def new_rank(state: State, rank: int, dp_size: int) -> Rank:
    state.lives += 1
    identity = events.Identity(
        deployment=NAME,
        rank=rank,
        incarnation=f"{state.lives:016x}",
        kind=Kind.MOE,
        dp_size=dp_size,
        host="one",
        exchanges=("shm",),
    )
    core = RankCore(identity, Half(), NOW_MS)  # type: ignore[arg-type]
    quiet(core)
    return Rank(core, life=state.lives)


def first(ranks: int, budget: Budget) -> State:
    """All ranks are registered and formed, idle in wave 0: where the interesting part begins."""
    state = State(Fleet(spec_of(ranks, 1), NOW_MS), [], budget)
    coordinator(state, Tick())
    for rank in range(ranks):
        state.ranks.append(new_rank(state, rank, ranks))
        tick(state, rank, register=True)
    calm = msgspec.structs.replace(budget, requests=0, lost=0, doubled=0, overtaken=0, restarts=0, deaths=0)
    state.budget = calm
    while True:
        for name, action in sorted(actions(state), key=lambda each: each[0]):
            if not name.startswith(("heartbeat", "again")):
                action(state)
                break
        else:
            break
    state.budget = budget
    assert lockstep(state).phase is Phase.IDLE, lockstep(state).phase
    return state


# --- what happens
# ------------------------------------------------------------------------------------------------------


def actions(state: State) -> Iterator[tuple[str, Callable[[State], None]]]:
    """All that can happen next. Each name says what; each action changes a state that is its own."""
    yield from _links(state)
    yield from _coordinator(state)
    for index in range(len(state.ranks)):
        yield from _rank(state, index)


MISFORTUNES = ("lose", "double", "overtake", "restart", "die", "request")


def _links(state: State) -> Iterator[tuple[str, Callable[[State], None]]]:
    for link, queue in state.links.items():
        if not queue:
            continue
        what = type(queue[0]).__name__
        yield f"deliver {link} {what}", partial(deliver, link=link, index=0)
        if state.budget.lost:
            yield f"lose {link} {what}", partial(lose, link=link)
        if state.budget.doubled:
            yield f"double {link} {what}", partial(double, link=link)
        if state.budget.overtaken and len(queue) > 1:
            yield f"overtake {link} {type(queue[1]).__name__}", partial(overtake, link=link)


def _coordinator(state: State) -> Iterator[tuple[str, Callable[[State], None]]]:
    deployment = lockstep(state)
    for record in deployment.members:
        life = int(record.incarnation, 16)
        # A command that is sent again while it, or its acknowledgement, is on the way is one that was doubled.
        if record.applied < deployment.seq and not state.links.get(f"c{life}") and not state.links.get(f"r{life}"):
            yield f"again to rank {record.rank}", partial(send_again, rank=record.rank)
        living = state.ranks[record.rank].core.identity.incarnation
        if record.incarnation != living:
            yield f"notice the death of rank {record.rank}", partial(notice_death, rank=record.rank)
    if state.budget.restarts:
        yield "restart the coordinator", restart


def _rank(state: State, index: int) -> Iterator[tuple[str, Callable[[State], None]]]:
    rank = state.ranks[index]
    core = rank.core
    link = f"r{rank.life}"
    if state.budget.requests:
        yield f"request to rank {index}", partial(request, index=index, told=False)
        if state.budget.words:
            yield f"request to rank {index}, told", partial(request, index=index, told=True)
    if state.budget.deaths:
        yield f"die rank {index}", partial(die, index=index)
    if not state.links.get(link):
        if not core.registered:
            yield f"register rank {index}", partial(tick, index=index, register=True)
        elif has_news(state, rank):
            yield f"heartbeat of rank {index}", partial(tick, index=index, register=False)
    if rank.building is not None and all(rank.building.group in _tokens(each) for each in state.ranks):
        yield f"build rank {index}", partial(build, index=index)
    if rank.thrown:
        yield f"throw out rank {index}", partial(throw_out, index=index)
    elif rank.posted:
        if len(state.rows[rank.group, rank.count]) == len(state.ranks):
            yield f"take rank {index}", partial(take, index=index)
    elif core.lost is not None:
        yield f"tell rank {index} of the fault", partial(throw_out, index=index)
    elif core.must_step and rank.group:
        yield f"post rank {index}", partial(post, index=index)


def _tokens(rank: Rank) -> tuple[str, ...]:
    """Groups that this rank is in, or is coming to."""
    return (rank.group, rank.building.group) if rank.building is not None else (rank.group,)


def request(state: State, index: int, told: bool) -> None:
    rank = state.ranks[index]
    rank.work += 1
    state.budget = msgspec.structs.replace(state.budget, requests=state.budget.requests - 1)
    rank_does(state, index, rank.core.work_arrived())
    if told:
        state.budget = msgspec.structs.replace(state.budget, words=state.budget.words - 1)
        state.asks += 1
        word = FirstRequest(front_end="f" * 16, deployment=NAME, ask=state.asks, wave=lockstep(state).wave, rank=index)
        state.links.setdefault("f", []).append(word)


def deliver(state: State, link: str, index: int) -> None:
    message = state.links[link].pop(index)
    if link[0] in "rf":
        coordinator(state, Received(f"c{link[1:]}".encode(), message))
    else:
        for number, rank in enumerate(state.ranks):
            if link == f"c{rank.life}":
                rank_does(state, number, rank.core.handle(events.Received(message), NOW_MS))
                quiet(rank.core)


def lose(state: State, link: str) -> None:
    state.budget = msgspec.structs.replace(state.budget, lost=state.budget.lost - 1)
    state.links[link].pop(0)


def double(state: State, link: str) -> None:
    """The copy comes last: after everything that is on the way now."""
    state.budget = msgspec.structs.replace(state.budget, doubled=state.budget.doubled - 1)
    state.links[link].append(state.links[link][0])


def overtake(state: State, link: str) -> None:
    state.budget = msgspec.structs.replace(state.budget, overtaken=state.budget.overtaken - 1)
    deliver(state, link, 1)


def restart(state: State) -> None:
    state.budget = msgspec.structs.replace(state.budget, restarts=state.budget.restarts - 1)
    state.fleet = Fleet(spec_of(len(state.ranks), state.fleet.term + 1), NOW_MS)
    state.links = {link: queue for link, queue in state.links.items() if link[0] == "c"}  # what it had sent still comes
    coordinator(state, Tick())


def die(state: State, index: int) -> None:
    """A process is gone, and its replacement has started; its work is gone with it."""
    state.budget = msgspec.structs.replace(state.budget, deaths=state.budget.deaths - 1)
    old = state.ranks[index]
    state.links.pop(f"c{old.life}", None)
    state.ranks[index] = new_rank(state, index, len(state.ranks))


def notice_death(state: State, rank: int) -> None:
    record = lockstep(state).members.get(rank)
    assert record is not None
    record.heard_ms = -NEVER_MS
    lockstep(state).members.look_again_ms = 0
    coordinator(state, Tick())


def send_again(state: State, rank: int) -> None:
    record = lockstep(state).members.get(rank)
    assert record is not None
    record.sent_ms = -NEVER_MS
    coordinator(state, Tick())


def tick(state: State, index: int, register: bool) -> None:
    core = state.ranks[index].core
    if register:
        core._register_ms = NOW_MS
    else:
        core._heartbeat_ms = NOW_MS
    rank_does(state, index, core.handle(events.Tick(), NOW_MS))
    quiet(core)


def build(state: State, index: int) -> None:
    rank = state.ranks[index]
    form, rank.building = rank.building, None
    assert form is not None
    effects = rank.core.handle(events.Built(form.group, "shm", 0), NOW_MS)
    if rank.core.group == form.group:
        rank.group, rank.count = form.group, 0
    rank_does(state, index, effects)
    quiet(rank.core)


def post(state: State, index: int) -> None:
    rank = state.ranks[index]
    row, position = rank.core.begin(Row(num_tokens=rank.work, has_work=rank.work > 0, dummy=rank.work == 0))
    rank.count += 1
    rank.posted = True
    state.rows.setdefault((rank.group, rank.count), {})[index] = (row, position)


def take(state: State, index: int) -> None:
    rank = state.ranks[index]
    rows = state.rows[rank.group, rank.count]
    positions = {position for _, position in rows.values()}
    assert len(positions) == 1, f"the ranks met at different positions: {positions}"
    plan = decide([rows[each][0] for each in range(len(state.ranks))], positions.pop(), SETTINGS)
    rank.posted = False
    rank_does(state, index, rank.core.finish(plan, 1.0))
    if plan.runs_forward:
        assert rank.core.mode is Mode.RUNNING, "a forward outside a wave"
        rank.work = max(0, rank.work - 1)


def throw_out(state: State, index: int) -> None:
    rank = state.ranks[index]
    rank.thrown = False
    lost, effects = rank.core.leave_for_fault()
    if lost is None and rank.core.stepper.running:
        effects = rank.core.fail("interrupted", None)
    rank_does(state, index, effects)


# --- effects
# -----------------------------------------------------------------------------------------------------------


def rank_does(state: State, index: int, effects: list[events.Effect]) -> None:
    rank = state.ranks[index]
    for effect in effects:
        match effect:
            case events.Send(message=message):
                state.links.setdefault(f"r{rank.life}", []).append(message)
            case events.Build(form=form):
                rank.building = form
            case events.Interrupt():
                rank.group, rank.thrown, rank.posted = "", rank.thrown or rank.posted, False
            case _:
                pass
    rank.core.dropped.clear()


def coordinator(state: State, event: Received | Tick) -> None:
    for effect in state.fleet.handle(event, NOW_MS):
        match effect:
            case CoordinatorSend(peer=peer, message=message):
                if peer != b"c" and any(peer.decode() == f"c{rank.life}" for rank in state.ranks):
                    state.links.setdefault(peer.decode(), []).append(message)
            case Publish(message=Update(phase=Phase.RUNNING) as update):
                published_running(state, update)
            case _:
                pass
    state.fleet.check()
    state.fleet.story.clear()
    state.fleet.dropped.clear()
    state.fleet.received.clear()
    lockstep(state).dropped.clear()


def published_running(state: State, update: Update) -> None:
    """Invariant 6: running is never published without evidence."""
    for rank in state.ranks:
        record = lockstep(state).members.get(rank.core.identity.rank)
        if record is None or record.incarnation != rank.core.identity.incarnation:
            continue  # whoever acknowledged has died since
        stepper = rank.core.stepper
        begun = (stepper.epoch, stepper.wave) > (update.epoch, update.wave) or (
            stepper.wave == update.wave and (stepper.running or rank.core.mode is Mode.HALTED)
        )
        who = core_name(rank)
        assert begun, f"wave {update.wave} was published as running, but {who} has not begun it"


def core_name(rank: Rank) -> str:
    return f"rank {rank.core.identity.rank}"


def quiet(core: RankCore) -> None:
    """No timer of its own: time does not pass here."""
    core._heartbeat_ms = core._register_ms = NEVER_MS
    core._load_dirty = False


def has_news(state: State, rank: Rank) -> bool:
    """Whether a heartbeat would tell the coordinator anything."""
    record = lockstep(state).members.get(rank.core.identity.rank)
    if record is None or record.incarnation != rank.core.identity.incarnation:
        return True
    return _without_step(record.at) != _without_step(rank.core.at())


def lockstep(state: State) -> Lockstep:
    deployment = state.fleet.deployments[NAME]
    assert isinstance(deployment, Lockstep)
    return deployment


# --- the search
# --------------------------------------------------------------------------------------------------------


def key(state: State) -> bytes:
    """Equal for states that behave alike: counters, message numbers and names of lives are taken out."""
    deployment = lockstep(state)
    lives = {rank.life: index for index, rank in enumerate(state.ranks)}
    members = tuple(
        (r.rank, lives.get(int(r.incarnation, 16), -1), _without_step(r.at), r.applied, r.sent_seq, r.register.group)
        for r in deployment.members
    )
    fleet = (
        state.fleet.term,
        deployment.phase,
        deployment.epoch,
        deployment.wave,
        deployment.seq,
        deployment._phase_seq,
        tuple(deployment._log),
        bool(deployment.asks),
        tuple(deployment._served_asks.values()),
        deployment._wave_broken,
        members,
    )
    ranks = tuple(_rank_key(rank) for rank in state.ranks)
    links = tuple(
        (link[0], lives.get(int(link[1:] or 0), -1), tuple(_message_key(m) for m in queue))
        for link, queue in sorted(state.links.items())
        if queue
    )
    used = {(rank.group, rank.count) for rank in state.ranks if rank.posted}
    rows = tuple((at, tuple(sorted(state.rows[at]))) for at in sorted(used))
    whole = (fleet, ranks, links, rows, state.budget, _stale(state))
    return hashlib.blake2b(pickle.dumps(whole, pickle.HIGHEST_PROTOCOL), digest_size=16).digest()


def _rank_key(rank: Rank) -> tuple[object, ...]:
    core, stepper = rank.core, rank.core.stepper
    return (
        _without_step(core.at()),
        core.registered,
        core.group,
        stepper.inside,
        stepper._arrived,
        stepper._row_work,
        core.lost,
        tuple(core._pending),
        core._build_waits,
        rank.work,
        rank.group,
        rank.count,
        rank.posted,
        rank.thrown,
        rank.building.epoch if rank.building else 0,
    )


def _without_step(at: At) -> tuple[object, ...]:
    """Nothing that a core decides depends on the step; it is there to be shown."""
    return at.mode, at.term, at.epoch, at.applied, at.wave, at.has_work, at.hold


def _message_key(message: Message) -> tuple[object, ...]:
    facts: list[object] = [type(message).__name__]
    for name in ("term", "epoch", "seq", "wave", "ask", "group"):
        facts.append(getattr(message, name, None))
    if isinstance(message, FromRank):
        facts.append(_without_step(message.at))
    return tuple(facts)


def _stale(state: State) -> tuple[bool, ...]:
    """Which messages on the way are already overtaken: their numbers matter only in that."""
    stale = []
    for link, queue in sorted(state.links.items()):
        for message in queue:
            if link[0] == "r":
                record = lockstep(state).members.get(getattr(message, "rank", -1))
                known = record is not None and record.incarnation == getattr(message, "incarnation", "")
                number = getattr(message, "number", 0)
                stale.append(bool(known and record is not None and number <= record.number))
    return tuple(stale)


def good(state: State) -> bool:
    """All work done, and everybody idle in one wave."""
    if any(rank.work or rank.core.stepper.has_work for rank in state.ranks):
        return False
    places = {(rank.core.mode, rank.core.stepper.epoch, rank.core.stepper.wave) for rank in state.ranks}
    return len(places) == 1 and next(iter(places))[0] is Mode.IDLE


@dataclass
class Result:
    """What a search has found."""

    states: int
    transitions: int
    complete: bool
    stuck: list[str] | None
    """The story of a state from which work cannot finish, if there is one."""
    broken: tuple[str, list[str]] | None
    """An invariant that does not hold, and the story that leads there."""
    seconds: float


def explore(ranks: int, budget: Budget, states_max: int, progress: Callable[[str], None] = lambda text: None) -> Result:
    """Visit all states, breadth first, up to `states_max`."""
    began = time.monotonic()
    start = first(ranks, budget)
    seen = {key(start): 0}
    parents: list[tuple[int, str]] = [(-1, "")]
    back: list[list[int]] = [[]]
    goals: list[int] = [0] if good(start) else []
    queue: deque[tuple[int, State]] = deque([(0, start)])
    transitions = 0
    complete = True
    while queue:
        number, state = queue.popleft()
        for name, action in actions(state):
            then = state.clone()
            transitions += 1
            try:
                action(then)
            except AssertionError as error:
                story = [*_story(parents, number), name]
                return Result(
                    len(seen), transitions, False, None, (str(error).splitlines()[0], story), time.monotonic() - began
                )
            digest = key(then)
            target = seen.get(digest)
            if target is None:
                if len(seen) >= states_max:
                    complete = False
                    goals.append(number)  # what lies beyond is not known to be bad
                    continue
                target = seen[digest] = len(parents)
                parents.append((number, name))
                back.append([])
                if good(then) and not then.budget.requests:
                    goals.append(target)
                queue.append((target, then))
                if len(seen) % 10_000 == 0:
                    progress(f"{len(seen):,} states, {transitions:,} transitions, {len(queue):,} to visit")
            if not name.startswith(MISFORTUNES) or name.startswith("request"):
                back[target].append(number)
    stuck = _unreachable(len(parents), back, goals)
    story_of_stuck = _story(parents, stuck) if stuck is not None else None
    return Result(len(seen), transitions, complete, story_of_stuck, None, time.monotonic() - began)


def _unreachable(count: int, back: list[list[int]], goals: list[int]) -> int | None:
    """A state from which no goal can be reached, the first one found; None if there is none."""
    reached = set(goals)
    queue = deque(goals)
    while queue:
        for before in back[queue.popleft()]:
            if before not in reached:
                reached.add(before)
                queue.append(before)
    return next((number for number in range(count) if number not in reached), None)


def _story(parents: list[tuple[int, str]], number: int) -> list[str]:
    story = []
    while number > 0:
        number, name = parents[number]
        story.append(name)
    return story[::-1]


def main() -> int:
    parser = argparse.ArgumentParser(description="Visit every state of a small system.")
    parser.add_argument("ranks", type=int)
    parser.add_argument("requests", type=int)
    for name in ("lost", "doubled", "overtaken", "restarts", "deaths"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--words", type=int, default=1, help="requests that a front-end tells the coordinator of")
    parser.add_argument("--states", type=int, default=200_000, help="stop after so many")
    asked: Any = parser.parse_args()
    budget = Budget(
        asked.requests, asked.words, asked.lost, asked.doubled, asked.overtaken, asked.restarts, asked.deaths
    )
    result = explore(asked.ranks, budget, asked.states, lambda text: print(text, file=sys.stderr, flush=True))
    print(
        f"{asked.ranks} ranks, {budget}: {result.states:,} states, {result.transitions:,} transitions, "
        f"{'all of them' if result.complete else 'stopped at the limit'}, {result.seconds:.0f} s"
    )
    for title, story in (("broken", result.broken and result.broken[1]), ("stuck", result.stuck)):
        if story:
            print(f"{title}: {result.broken[0] if result.broken else 'work cannot finish'}")
            print("\n".join(f"  {number}. {name}" for number, name in enumerate(story, 1)))
    return 1 if result.broken or result.stuck else 0


if __name__ == "__main__":
    sys.exit(main())
