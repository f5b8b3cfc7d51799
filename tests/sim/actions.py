"""What can happen to a small system next, and what is asserted when it does: the actions that the explorer tries.

An action changes the state that it is given. Time does not pass: what a timer would do (heartbeats, sending again,
noticing a death, a deadline) is an action of its own.
"""

from collections.abc import Callable, Iterator
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

from .system import NAME, NEVER_MS, NOW_MS, SETTINGS, Budget, Rank, State, has_news, new_rank, quiet, spec_of
from .world import check_lockstep

Action = Callable[[State], None]
MISFORTUNES = ("lose", "double", "overtake", "restart", "die", "hold", "scale", "deadline")
"""What nobody may count on to happen; names of actions begin so."""


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
    regrouping = deployment.regroup_in_progress is not None
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
