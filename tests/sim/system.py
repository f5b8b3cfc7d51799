"""A small system as a value: one coordinator core, two or three rank cores, and what is on the way between them.

The law of this file: a state is never changed, only copied and changed, and two states with equal keys behave alike.
What an action touches is copied, everything else is shared between states; the keys leave out what decides nothing
(counters, texts, times: time does not pass here) and keep everything that is not named as such, so that a new field
of a core is part of the state from its first day.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from random import Random
from typing import Any

import msgspec

from wavekeeper.coordinator.core import DeploymentSpec, Fleet, FleetSpec
from wavekeeper.coordinator.core.lockstep import Lockstep
from wavekeeper.coordinator.core.members import Members
from wavekeeper.proto.messages import At, Form, FromRank, Hold, Kind, Message, Mode, Register, Timing, Welcome
from wavekeeper.proto.rows import Position, Row
from wavekeeper.worker_agent import events
from wavekeeper.worker_agent.core import RankCore
from wavekeeper.worker_agent.plan import PlanSettings
from wavekeeper.worker_agent.stepper import Stepper

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
    holds: int = 0
    scales: int = 0
    """Changes of the number of ranks that an operator asks for."""
    deadlines: int = 0
    """Such changes whose time is over before they have come true."""

    def less(self, name: str) -> "Budget":
        return msgspec.structs.replace(self, **{name: getattr(self, name) - 1})

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, name)} {name}" for name in self.__struct_fields__ if getattr(self, name))


class Half(Random):
    """A generator without a state."""

    def random(self) -> float:
        return 0.5


@dataclass
class Rank:
    """One rank's process."""

    core: RankCore
    life: int
    work: int = 0
    group: str = ""
    size: int = 0
    """Ranks of that group."""
    count: int = 0
    waits_in: tuple[str, int] | None = None
    """The exchange in which the engine waits for rows."""
    thrown: bool = False
    """That exchange was interrupted; its rows may have come all the same."""
    building: Form | None = None


Rows = tuple[tuple[int, Row, Position], ...]


@dataclass
class State:
    """Everything, at one moment."""

    fleet: Fleet
    ranks: list[Rank]
    budget: Budget
    links: dict[str, tuple[Message, ...]] = field(default_factory=dict)
    """What is on the way, by link: `c1` from the coordinator to life 1, `r1` back, `f` from a front-end."""
    rows: dict[tuple[str, int], Rows] = field(default_factory=dict)
    asks: int = 0
    lives: int = 0
    own: set[int] = field(default_factory=set)
    """Which parts are this state's own: a rank's index, or -1 for the fleet."""
    last: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Where each life has been: term, epoch and wave."""
    keys: dict[int, bytes] = field(default_factory=dict)
    """Keys of the parts, as far as they are known."""

    def clone(self) -> "State":
        return State(
            self.fleet,
            self.ranks.copy(),
            self.budget,
            self.links.copy(),
            self.rows.copy(),
            self.asks,
            self.lives,
            set(),
            self.last,
            self.keys.copy(),
        )

    def my_fleet(self) -> Fleet:
        """The fleet, to be changed."""
        self.keys.pop(-1, None)
        if -1 not in self.own:
            self.own.add(-1)
            self.fleet = fork(self.fleet, {})
        return self.fleet

    def my_rank(self, index: int) -> Rank:
        """A rank, to be changed."""
        self.keys.pop(index, None)
        if index not in self.own:
            self.own.add(index)
            self.ranks[index] = fork(self.ranks[index], {})
        return self.ranks[index]

    def lockstep(self) -> Lockstep:
        deployment = self.fleet.deployments[NAME]
        assert isinstance(deployment, Lockstep)
        return deployment

    def post(self, link: str, message: Message) -> None:
        self.links[link] = (*self.links.get(link, ()), message)

    def take(self, link: str, index: int) -> Message:
        queue = self.links[link]
        self.links[link] = queue[:index] + queue[index + 1 :]
        return queue[index]


# --- copies ----------------------------------------------------------------------------------------------------------

_ATOMS: set[type] = {int, str, bool, float, bytes, type(None), tuple, Half}
_SLOTS: dict[type, Callable[[Any], Any]] = {}


def fork(value: Any, twins: dict[int, Any]) -> Any:
    """A copy that shares nothing that changes. `twins` are the objects copied so far: one held twice stays one."""
    kind: Any = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        return {name: item if type(item) in _ATOMS else fork(item, twins) for name, item in value.items()}
    if kind is list or kind is deque:
        return kind(item if type(item) in _ATOMS else fork(item, twins) for item in value)
    if isinstance(value, msgspec.Struct | Enum):
        _ATOMS.add(kind)
        return value
    if isinstance(value, dict):  # a Counter
        return kind(value)
    twin = twins.get(id(value))
    if twin is not None:
        return twin
    if kind in _SLOTS or not hasattr(value, "__dict__"):
        # A record with slots, whose fields are values.
        if kind not in _SLOTS:
            assert is_dataclass(value), kind
            _SLOTS[kind] = attrgetter(*(each.name for each in fields(value)))
        twin = twins[id(value)] = kind(*_SLOTS[kind](value))
        return twin
    twin = twins[id(value)] = kind.__new__(kind)
    twin.__dict__ = {name: item if type(item) in _ATOMS else fork(item, twins) for name, item in value.__dict__.items()}
    return twin


# --- keys ------------------------------------------------------------------------------------------------------------

_DECIDES_NOTHING: Mapping[type, frozenset[str]] = {
    Lockstep: frozenset(
        "spec timing phase_since_ms dropped wave_messages lost_ranks waves_run exchange_reason fault "
        "_fleet _feed _out _counted_wave".split()
    ),
    RankCore: frozenset(
        "identity kind timing feed dropped heard_ms load activity activity_since_ms exchange build_failed lost "
        "_random _number _attempt _out _heartbeat_ms _register_ms _register_pause_ms _load_dirty _load_sent_ms "
        "_pending".split()
    ),
    Stepper: frozenset(
        "rank step process_groups preflights wave_messages attribution _waves _empty_waves _steps "
        "_dummy_steps _group_operations _forwards _idle_exchanges _steps_after_last_work _exchange_us".split()
    ),
}
"""What is shown or counted only. `step` is compared between the ranks, see `_steps`; `lost` and `_pending` below."""


def key(state: State) -> bytes:
    """Equal for states that behave alike."""
    keys = state.keys
    if -1 not in keys:
        keys[-1] = _encode((state.fleet.term, state.fleet.deployments[NAME]))
    for index, rank in enumerate(state.ranks):
        if index not in keys:
            keys[index] = _encode(rank)
    links = [
        (link, [_message_key(message) for message in queue], _numbers(state, link, queue))
        for link, queue in sorted(state.links.items())
        if queue
    ]
    parts = [keys[each] for each in sorted(keys)]
    whole = (parts, links, _attempts(state), _exchanges(state), _steps(state), state.budget)
    return hashlib.blake2b(_encode(whole), digest_size=16).digest()


def _encode(value: Any) -> bytes:
    return _ENCODER.encode(value)


def _plain(value: Any) -> Any:
    """For the encoder: an object is what it decides by."""
    if isinstance(value, Rank):
        core = value.core
        pending = [(*_message_key(command), seq) for seq, command in sorted(core._pending.items())]
        building = value.building.group if value.building else ""
        at = value.waits_in is not None, value.thrown, building, value.group, value.size
        return _plain(core), pending, core.lost is not None, value.work, at
    if isinstance(value, Members):
        return value.places, [
            (r.rank, r.incarnation, _place(r.at), r.applied, r.sent_seq, _registered(r.register), r.busy_until_ms)
            for r in value
        ]
    unimportant = _DECIDES_NOTHING[type(value)]
    return [(name, item) for name, item in value.__dict__.items() if name not in unimportant]


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def _place(at: At) -> tuple[object, ...]:
    """Nothing that a core decides depends on the step; it is there to be shown."""
    return at.mode, at.term, at.epoch, at.applied, at.wave, at.has_work, at.hold


def _registered(register: Register) -> tuple[object, ...]:
    return register.group, register.group_ranks, register.group_next, register.hold, register.resumed


def _message_key(message: Message) -> tuple[object, ...]:
    facts: list[object] = [type(message).__name__]
    for name in ("term", "epoch", "seq", "wave", "ask", "group"):
        facts.append(getattr(message, name, None))
    if isinstance(message, FromRank):
        facts.append(_place(message.at))
    if isinstance(message, Register):
        facts.append(_registered(message))
    if isinstance(message, Welcome):
        facts.append(message.spare)
    if isinstance(message, Form):
        facts.append([member.rank for member in message.members])
    if isinstance(message, Hold):
        facts.append(message.order)
    return tuple(facts)


def _numbers(state: State, link: str, queue: tuple[Message, ...]) -> list[int]:
    """The order of the numbers of messages on the way from a rank, the newest that was heard among them."""
    if link[0] != "r":
        return []
    heard = [record.number for record in state.lockstep().members if int(record.incarnation, 16) == int(link[1:])]
    numbers = [*heard, *(message.number for message in queue if isinstance(message, FromRank))]
    order = {number: place for place, number in enumerate(sorted(set(numbers)))}
    return [len(heard), *(order[number] for number in numbers)]


def _attempts(state: State) -> list[object]:
    """Which registrations, and which answers to one, are of each rank's present attempt to register."""
    told: list[object] = []
    for rank in state.ranks:
        record = state.lockstep().members.get(rank.core.identity.rank)
        asked = [m.number for m in state.links.get(f"r{rank.life}", ()) if isinstance(m, Register)]
        answered = [m.answers for m in state.links.get(f"c{rank.life}", ()) if isinstance(m, Welcome)]
        known = [record.register.number] if record is not None else []
        told.append([[number >= rank.core._attempt for number in numbers] for numbers in (known, asked, answered)])
    return told


def _exchanges(state: State) -> list[object]:
    """Who is how far in the exchange of each group, and what lies there to be read."""
    first: dict[str, int] = {}
    for rank in state.ranks:
        for group, count in ((rank.group, rank.count), rank.waits_in or ("", 0)):
            first[group] = min(first.get(group, count), count)
    places = [
        (
            rank.count - first[rank.group],
            rank.waits_in and (rank.waits_in[0], rank.waits_in[1] - first[rank.waits_in[0]]),
        )
        for rank in state.ranks
    ]
    rows = [
        (group, count - first[group], [(index, row.num_tokens, row.has_work) for index, row, _ in posted])
        for (group, count), posted in sorted(state.rows.items())
    ]
    return [places, rows]


def _steps(state: State) -> list[int]:
    """How far each rank is ahead of the last one: rows of different steps must never meet."""
    steps = [rank.core.stepper.step if rank.core.stepper.running else -1 for rank in state.ranks]
    least = min((step for step in steps if step >= 0), default=0)
    return [step - least if step >= 0 else -1 for step in steps]


# --- beginnings ------------------------------------------------------------------------------------------------------


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
    core = RankCore(identity, Half(), NOW_MS)
    quiet(core)
    return Rank(core, life=state.lives)


def quiet(core: RankCore) -> None:
    """No timer of its own: time does not pass here."""
    core._heartbeat_ms = core._register_ms = NEVER_MS
    core._load_dirty = False


def has_news(state: State, rank: Rank) -> bool:
    """Whether a heartbeat would tell the coordinator anything."""
    record = state.lockstep().members.get(rank.core.identity.rank)
    if record is None or record.incarnation != rank.core.identity.incarnation:
        return True
    return _place(record.at) != _place(rank.core.at())


def good(state: State) -> bool:
    """All work done, nothing that an operator wants outstanding, and everybody of the group idle in one wave."""
    deployment = state.lockstep()
    if any(rank.work or rank.core.stepper.has_work for rank in state.ranks):
        return False
    if deployment.operation is not None or deployment.regroup_in_progress is not None:
        return False
    group = [state.ranks[place].core for place in deployment.members.places]
    places = {(core.mode, core.stepper.epoch, core.stepper.wave) for core in group}
    return len(places) == 1 and next(iter(places))[0] is Mode.IDLE
