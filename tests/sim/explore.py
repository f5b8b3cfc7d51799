"""Every interleaving of a small system, with the production cores.

From each state every action is tried: a message arrives (in order on each link), a rank posts its row, takes the
rows, says where it stands, is thrown out of a broken exchange; the coordinator sends again; a request comes, with or
without a front-end's word to the coordinator. A budget of misfortunes may be spent anywhere: a message lost, doubled,
or overtaken, a coordinator that restarts, a rank that dies and is replaced.

Safety is asserted in every state. Liveness: from every state in which nothing more can go wrong, a state with all
work done and everybody idle in one wave can be reached. Time does not pass: what a timer would do (heartbeats,
sending again, noticing a death) is an action.

`make explore` visits the systems of `SYSTEMS`; with numbers of ranks and requests, only that one.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec

from wavekeeper.coordinator.core import Fleet, Publish, Received, Tick, Wished
from wavekeeper.coordinator.core import Send as CoordinatorSend
from wavekeeper.coordinator.core.events import Wish
from wavekeeper.coordinator.core.holds import AWAKE, HoldWish, ResumeWish
from wavekeeper.coordinator.core.lockstep import Lockstep
from wavekeeper.coordinator.core.regroups import ScaleWish
from wavekeeper.proto.messages import FirstRequest, HoldMode, Mode, Phase, Update
from wavekeeper.proto.rows import Row, gathered
from wavekeeper.worker_agent import events
from wavekeeper.worker_agent.events import Hook
from wavekeeper.worker_agent.plan import decide

from .system import (
    NAME,
    NEVER_MS,
    NOW_MS,
    SETTINGS,
    Budget,
    Rank,
    State,
    good,
    has_news,
    key,
    new_rank,
    quiet,
    spec_of,
)
from .world import check_lockstep

SYSTEMS: tuple[tuple[int, Budget, int], ...] = (
    # ranks, what may happen, and after how many states it is enough
    (2, Budget(requests=1, lost=1), 40_000),
    (2, Budget(requests=1, doubled=1), 40_000),
    (2, Budget(requests=2), 40_000),
    (2, Budget(requests=1, overtaken=1), 40_000),
    (2, Budget(requests=1, restarts=1), 40_000),
    (2, Budget(requests=1, deaths=1), 40_000),
    (2, Budget(requests=1, holds=1), 40_000),
    (2, Budget(requests=1, scales=1, deadlines=1), 40_000),
    (2, Budget(scales=2, deaths=1), 40_000),
    (3, Budget(requests=1), 40_000),
    (2, Budget(requests=1, lost=1, doubled=1, overtaken=1), 30_000),
    (3, Budget(requests=1, lost=1, deaths=1, restarts=1), 30_000),
)


def first(ranks: int, budget: Budget) -> State:
    """All ranks are registered and formed, idle in wave 0: where the interesting part begins."""
    state = State(Fleet(spec_of(ranks, 1), NOW_MS), [], Budget(words=0))
    coordinator(state, Tick())
    for rank in range(ranks):
        state.ranks.append(new_rank(state, rank, ranks))
        tick(state, rank, register=True)
    while True:
        for name, action in sorted(actions(state), key=lambda each: each[0]):
            if not name.startswith(("heartbeat", "again")):
                action(state)
                break
        else:
            break
    state.budget = budget
    assert state.lockstep().phase is Phase.IDLE, state.lockstep().phase
    return state


# --- what happens ----------------------------------------------------------------------------------------------------


Action = Callable[[State], None]
MISFORTUNES = ("lose", "double", "overtake", "restart", "die", "hold", "scale", "deadline")
"""What nobody may count on to happen; names of actions begin so."""


def actions(state: State) -> Iterator[tuple[str, Action]]:
    """All that can happen next. Each name says what; each action changes the state that it is given."""
    yield from _links(state)
    yield from _coordinator(state)
    yield from _operator(state)
    for index in range(len(state.ranks)):
        yield from _control(state, index)
        yield from _engine(state, index)


def _links(state: State) -> Iterator[tuple[str, Action]]:
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


def _coordinator(state: State) -> Iterator[tuple[str, Action]]:
    deployment = state.lockstep()
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


def _operator(state: State) -> Iterator[tuple[str, Action]]:
    """Whoever holds a deployment resumes it: that is no misfortune, and may be counted on."""
    deployment, budget = state.lockstep(), state.budget
    regrouping = deployment.regroup is not None and deployment.regroup.in_progress
    if deployment.operation is not None and not deployment.operation.regroup and not deployment.operation.over:
        yield "resume", partial(wish, what=ResumeWish())
    elif deployment.phase in AWAKE and not regrouping:
        if budget.holds:
            for mode in (HoldMode.WAIT, HoldMode.KEEP):
                yield f"hold {mode}", partial(wish, what=HoldWish(mode), budget="holds")
        if budget.scales:
            for size in range(1, len(state.ranks) + 1):
                if size != len(deployment.members.places):
                    yield f"scale to {size}", partial(wish, what=ScaleWish(size), budget="scales")
    if regrouping and budget.deadlines:
        yield "deadline", deadline


def _control(state: State, index: int) -> Iterator[tuple[str, Action]]:
    rank = state.ranks[index]
    if state.budget.requests:
        yield f"request to rank {index}", partial(request, index=index, told=False)
        if state.budget.words:
            yield f"request to rank {index}, told", partial(request, index=index, told=True)
    if state.budget.deaths:
        yield f"die rank {index}", partial(die, index=index)
    if not state.links.get(f"r{rank.life}"):
        if not rank.core.registered:
            yield f"register rank {index}", partial(tick, index=index, register=True)
        elif has_news(state, rank):
            yield f"heartbeat of rank {index}", partial(tick, index=index, register=False)
    form = rank.building
    if form is not None and all(form.group in _tokens(state.ranks[member.rank]) for member in form.members):
        yield f"build rank {index}", partial(build, index=index)


def _engine(state: State, index: int) -> Iterator[tuple[str, Action]]:
    rank = state.ranks[index]
    if rank.waits_in is not None:
        if len(state.rows[rank.waits_in]) == rank.size:
            yield f"take rank {index}", partial(take, index=index)
        if rank.thrown:
            yield f"throw out rank {index}", partial(throw_out, index=index)
    elif rank.core.lost is not None:
        yield f"tell rank {index} of the fault", partial(throw_out, index=index)
    elif rank.core.hook_due is not None:
        yield f"call rank {index}", partial(call, index=index)
    elif rank.core.must_step and rank.group:
        yield f"post rank {index}", partial(post, index=index)


def _tokens(rank: Rank) -> tuple[str, ...]:
    """Groups that this rank is in, or is coming to."""
    return (rank.group, rank.building.group) if rank.building is not None else (rank.group,)


def request(state: State, index: int, told: bool) -> None:
    rank = state.my_rank(index)
    rank.work += 1
    state.budget = state.budget.less("requests")
    rank_does(state, index, rank.core.work_arrived())
    if told:
        state.budget = state.budget.less("words")
        state.asks += 1
        wave = state.lockstep().wave
        word = FirstRequest(front_end="f" * 16, deployment=NAME, ask=state.asks, wave=wave, rank=index)
        state.post("f", word)


def deliver(state: State, link: str, index: int) -> None:
    message = state.take(link, index)
    if link[0] in "rf":
        coordinator(state, Received(f"c{link[1:]}".encode(), message))
        return
    for number, rank in enumerate(state.ranks):
        if link == f"c{rank.life}":
            core = state.my_rank(number).core
            rank_does(state, number, core.handle(events.Received(message), NOW_MS))
            quiet(core)


def lose(state: State, link: str) -> None:
    state.budget = state.budget.less("lost")
    state.take(link, 0)


def double(state: State, link: str) -> None:
    """The copy comes last: after everything that is on the way now."""
    state.budget = state.budget.less("doubled")
    state.post(link, state.links[link][0])


def overtake(state: State, link: str) -> None:
    state.budget = state.budget.less("overtaken")
    deliver(state, link, 1)


def wish(state: State, what: Wish, budget: str = "") -> None:
    state.budget = state.budget.less(budget) if budget else state.budget
    coordinator(state, Wished(0, NAME, what))


def deadline(state: State) -> None:
    """A change of ranks has taken too long."""
    state.budget = state.budget.less("deadlines")
    state.my_fleet()
    deployment = state.lockstep()
    assert deployment.regroup is not None
    deployment.regroup = msgspec.structs.replace(deployment.regroup, deadline_ms=NOW_MS)
    coordinator(state, Tick())


def restart(state: State) -> None:
    state.budget = state.budget.less("restarts")
    state.my_fleet()
    state.fleet = Fleet(spec_of(len(state.ranks), state.fleet.term + 1), NOW_MS)
    state.links = {link: queue for link, queue in state.links.items() if link[0] == "c"}  # what it had sent still comes
    coordinator(state, Tick())


def die(state: State, index: int) -> None:
    """A process is gone, and its replacement has started; its work is gone with it."""
    state.budget = state.budget.less("deaths")
    state.links.pop(f"c{state.my_rank(index).life}", None)
    state.ranks[index] = new_rank(state, index, len(state.ranks))


def notice_death(state: State, rank: int) -> None:
    state.my_fleet()
    members = state.lockstep().members
    record = members.get(rank)
    assert record is not None
    record.heard_ms = -NEVER_MS
    members.look_again_ms = 0
    coordinator(state, Tick())


def send_again(state: State, rank: int) -> None:
    state.my_fleet()
    record = state.lockstep().members.get(rank)
    assert record is not None
    record.sent_ms = -NEVER_MS
    coordinator(state, Tick())


def tick(state: State, index: int, register: bool) -> None:
    core = state.my_rank(index).core
    if register:
        core._register_ms = NOW_MS
    else:
        core._heartbeat_ms = NOW_MS
    rank_does(state, index, core.handle(events.Tick(), NOW_MS))
    quiet(core)


def build(state: State, index: int) -> None:
    rank = state.my_rank(index)
    form, rank.building = rank.building, None
    assert form is not None
    effects = rank.core.handle(events.Built(form.group, "shm", 0), NOW_MS)
    if rank.core.group == form.group:
        rank.group, rank.size, rank.count = form.group, len(form.members), 0
    rank_does(state, index, effects)
    quiet(rank.core)


def call(state: State, index: int) -> None:
    """The engine is told of a hold, of its end, or that it is a spare; its device is idle at once."""
    rank = state.my_rank(index)
    hook = rank.core.take_hook()
    assert hook is not None
    if hook is Hook.SPARE:
        rank.work = 0  # given back
    rank_does(state, index, rank.core.hook_done(hook))


def post(state: State, index: int) -> None:
    rank = state.my_rank(index)
    row, position = rank.core.begin(Row(num_tokens=rank.work, has_work=rank.work > 0, dummy=rank.work == 0))
    rank.count += 1
    rank.waits_in = rank.group, rank.count
    posted = state.rows.get(rank.waits_in, ())
    assert all(other == position for _, _, other in posted), f"rank {index} is at {position}, the others at {posted}"
    state.rows[rank.waits_in] = (*posted, (index, row, position))


def take(state: State, index: int) -> None:
    rank = state.my_rank(index)
    assert rank.waits_in is not None
    rows = sorted(state.rows[rank.waits_in], key=lambda each: each[0])
    plan = decide(gathered([row for _, row, _ in rows], rows[0][2]), rows[0][2], SETTINGS)
    rank.waits_in, rank.thrown = None, False
    if plan.runs_forward:
        assert rank.core.mode is Mode.RUNNING, "a forward outside a wave"
        assert state.lockstep().phase is not Phase.HELD, f"rank {index} runs a forward, and all are told to be held"
        rank.work = max(0, rank.work - 1)
    rank_does(state, index, rank.core.finish(plan, 1.0))


def throw_out(state: State, index: int) -> None:
    rank = state.my_rank(index)
    was_inside, rank.waits_in, rank.thrown = rank.waits_in is not None, None, False
    lost, effects = rank.core.leave_for_fault()
    if lost is None and was_inside:
        effects = rank.core.fail("interrupted", None)
    rank_does(state, index, effects)


def forget_rows(state: State) -> None:
    """Rows that nobody will read any more."""
    for group, count in list(state.rows):
        waited_for = any(rank.waits_in == (group, count) for rank in state.ranks)
        if not waited_for and not any(rank.group == group and rank.count < count for rank in state.ranks):
            del state.rows[group, count]


# --- effects ---------------------------------------------------------------------------------------------------------


def rank_does(state: State, index: int, effects: list[events.Effect]) -> None:
    rank = state.ranks[index]
    before = rank.core.term, rank.core.stepper.epoch, rank.core.stepper.wave
    for effect in effects:
        match effect:
            case events.Send(message=message):
                state.post(f"r{rank.life}", message)
            case events.Build(form=form):
                rank.building = form
            case events.Interrupt():
                rank.group, rank.thrown = "", rank.thrown or rank.waits_in is not None
            case _:
                pass
    last = state.last.get(rank.life, (0, 0, 0))
    assert all(new >= old for new, old in zip(before, last, strict=True)), f"rank {index} went from {last} to {before}"
    state.last = {**state.last, rank.life: before}
    rank.core.dropped.clear()


def coordinator(state: State, event: Received | Tick | Wished) -> None:
    fleet = state.my_fleet()
    before = fleet.term, state.lockstep().epoch, state.lockstep().wave
    phase = state.lockstep().phase
    for effect in fleet.handle(event, NOW_MS):
        match effect:
            case CoordinatorSend(peer=peer, message=message):
                if peer != b"c" and any(peer.decode() == f"c{rank.life}" for rank in state.ranks):
                    state.post(peer.decode(), message)
            case Publish(message=Update(phase=Phase.RUNNING) as update):
                published_running(state, update)
            case _:
                pass
    fleet.check()
    deployment = state.lockstep()
    check_lockstep(deployment)
    if phase is Phase.FAULTED and deployment.phase is Phase.FORMING:
        inside = [index for index, rank in enumerate(state.ranks) if rank.waits_in and _is_member(deployment, rank)]
        assert not inside, f"a group is formed while rank {inside} sits in the broken exchange"
    after = fleet.term, deployment.epoch, deployment.wave
    assert fleet.term > before[0] or (before[1] <= after[1] and before[2] <= after[2]), f"from {before} to {after}"
    fleet.story.clear()
    fleet.dropped.clear()
    fleet.received.clear()
    deployment.dropped.clear()


def _is_member(deployment: Lockstep, rank: Rank) -> bool:
    record = deployment.members.get(rank.core.identity.rank)
    lives = record is not None and record.incarnation == rank.core.identity.incarnation
    return lives and rank.core.identity.rank in deployment.members.places


def published_running(state: State, update: Update) -> None:
    """Invariant 6: running is never published without evidence."""
    for rank in state.ranks:
        if not _is_member(state.lockstep(), rank):
            continue  # a spare, or whoever acknowledged has died since
        stepper = rank.core.stepper
        begun = (stepper.epoch, stepper.wave) > (update.epoch, update.wave) or (
            stepper.wave == update.wave and (stepper.running or rank.core.mode is Mode.HALTED)
        )
        who = f"rank {rank.core.identity.rank}"
        assert begun, f"wave {update.wave} was published as running, but {who} has not begun it"


# --- the search ------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What a search has found."""

    states: int
    transitions: int
    complete: bool
    seconds: float
    stuck: list[str] | None = None
    """The story of a state from which work cannot finish, if there is one."""
    broken: tuple[str, list[str]] | None = None
    """An invariant that does not hold, and the story that leads there."""

    @property
    def fails(self) -> bool:
        return bool(self.stuck or self.broken)

    def told(self) -> str:
        title, story = self.broken or ("work cannot finish", self.stuck or [])
        return "\n".join([f"  {title}", *(f"  {number}. {name}" for number, name in enumerate(story, 1))])


def explore(ranks: int, budget: Budget, states_max: int, progress: Callable[[str], None] = lambda text: None) -> Result:
    """Visit all states, breadth first, up to `states_max`; the first broken invariant ends the search."""
    began = time.monotonic()
    start = first(ranks, budget)
    seen = {key(start): 0}
    parents: list[tuple[int, str]] = [(-1, "")]
    back: list[list[int]] = [[]]
    goals: list[int] = []
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
                forget_rows(then)
            except Exception as error:  # a traceback of the cores is found like a broken invariant
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                story = [*_story(parents, number), name]
                seconds = time.monotonic() - began
                return Result(len(seen), transitions, False, seconds, broken=(text, story))
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
            if not name.startswith(MISFORTUNES):
                back[target].append(number)
    stuck = _unreachable(len(parents), back, goals)
    seconds = time.monotonic() - began
    return Result(len(seen), transitions, complete, seconds, None if stuck is None else _story(parents, stuck))


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


# --- the command line ------------------------------------------------------------------------------------------------


def one(system: tuple[int, Budget, int]) -> tuple[tuple[int, Budget, int], Result]:
    """Visit one system, in a worker."""
    ranks, budget, states_max = system
    name = f"{ranks} ranks, {budget}"
    return system, explore(
        ranks, budget, states_max, lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True)
    )


def main(arguments: list[str]) -> int:
    """Visit the systems that are asked for; return 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="explore", description="Visit every state of a small system.")
    parser.add_argument("ranks", type=int, nargs="?")
    parser.add_argument("requests", type=int, nargs="?", default=1)
    for name in ("lost", "doubled", "overtaken", "restarts", "deaths", "holds", "scales", "deadlines"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--words", type=int, default=1, help="requests that a front-end tells the coordinator of")
    parser.add_argument("--states", type=int, default=200_000, help="stop after so many")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args(arguments)
    systems = SYSTEMS
    if asked.ranks is not None:
        given = {name: getattr(asked, name) for name in Budget.__struct_fields__}
        systems = ((asked.ranks, Budget(**given), asked.states),)
    totals: Counter[str] = Counter()
    began = time.monotonic()
    with multiprocessing.Pool(asked.processes) as pool:
        for (ranks, budget, _), result in pool.imap_unordered(one, systems):
            extent = "complete" if result.complete else "stopped at its limit"
            print(
                f"{ranks} ranks, {budget}: {result.states:,} states, {result.transitions:,} transitions, {extent}, "
                f"{result.seconds:.0f} s",
                flush=True,
            )
            if result.fails:
                print(result.told(), flush=True)
            totals.update(states=result.states, transitions=result.transitions, failed=int(result.fails))
    print(
        f"{totals['states']:,} distinct states, {totals['transitions']:,} transitions in "
        f"{time.monotonic() - began:.0f} s; after each: {INVARIANTS}"
    )
    print(f"{len(systems) - totals['failed']} passed, {totals['failed']} failed")
    return int(totals["failed"] > 0)


INVARIANTS = (
    "the coordinator's own checks, nothing goes back, running on evidence, rows meet at one position, no forward "
    "outside a wave or under a hold; in the end: from everywhere, all work can be done"
)
