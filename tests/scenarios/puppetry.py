"""What the scenarios move: production cores of coordinator, ranks and front-ends, and what lies between them.

The law of this file: it decides nothing. Here are links that somebody moves by hand, a clock that somebody turns, and
an exchange that gives every rank all rows or none; whatever happens is told as a line. `interpreter` has the commands,
`words` the words.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from random import Random
from typing import Any

import msgspec

from wavekeeper.coordinator.core import Answer, DeploymentSpec, Event, Fleet, Note, Publish, Received, Send
from wavekeeper.proto import messages as m
from wavekeeper.proto.rows import DUMMY, Position, Row
from wavekeeper.worker_agent import events as rank_events
from wavekeeper.worker_agent import front_end_core as desk
from wavekeeper.worker_agent.core import RankCore
from wavekeeper.worker_agent.front_end_core import FrontEndCore
from wavekeeper.worker_agent.plan import Plan

from ..core.stories import dense, make_fleet, moe, planned, wire
from .words import (
    MANY,
    Lines,
    answer_text,
    arrow,
    dropped_text,
    ids,
    message_text,
    plain,
    plan_text,
    position_text,
    rank_name,
    sees_text,
)

COORDINATOR, FEED = "coordinator", "feed"
QUIET = (m.Heartbeat, m.Pulse, m.Update, m.LoadReport)
"""Told only if something came of them."""
START_MS = 10_000_000

Link = tuple[str, str]


class ScriptError(Exception):
    """A command that the language does not have, or that means nothing now."""


class Request(msgspec.Struct, frozen=True):
    """What a front-end sends to a rank; not of our protocol."""

    steps: int


class Life:
    """One life of a rank's process: its core, its engine's work (steps left), its place in the exchange."""

    def __init__(self, rank: int, life: int, spec: DeploymentSpec, now_ms: int, words: dict[str, str]) -> None:
        self.clock_ms = int(words.pop("clock_ms", 0))
        own: dict[str, Any] = {"kind": spec.kind, "dp_size": spec.dp_size, "host": "one"}
        own |= {"exchanges": ("shm",) if spec.kind.lockstep else ()}
        for key in ("kind", "dp_size", "host"):
            own[key] = type(own[key])(words.pop(key, own[key]))
        identity = rank_events.Identity(
            deployment=spec.name, rank=rank, incarnation=ids(rank, life), settings=dict(words), **own
        )
        self.core = RankCore(identity, Random(rank), now_ms + self.clock_ms)
        self.rank = rank
        self.name = rank_name(rank, life)
        self.work = 0
        self.posted: tuple[Row, Position] | None = None
        self.group = ""
        self.count = 0
        self.building: m.Form | None = None
        self.device_idle = True
        self.shown = position_text(self.core)


class Puppetry:
    """One deployment of either kind, with everybody who talks to its coordinator."""

    def __init__(self, kind: str, ranks: int) -> None:
        self.lines = Lines()
        self.spec = (moe if kind == "moe" else dense)(ranks)
        self.now_ms, self.term = START_MS, 1
        self.fleet: Fleet | None = make_fleet(self.spec, now_ms=self.now_ms)
        self.lives: dict[str, Life] = {}
        self.newest: dict[int, int] = {}
        self.front_ends: dict[str, FrontEndCore] = {}
        self.links: dict[Link, deque[Any]] = defaultdict(deque)
        self.cut: set[Link] = set()
        self.slow: set[Link] = set()
        self.frozen: set[str] = set()
        self.rows: dict[tuple[str, int], dict[int, tuple[Row, Position]]] = defaultdict(dict)
        self.plans: dict[tuple[str, int], Plan] = {}
        self.asks: Counter[str] = Counter()

    # --- who is who --------------------------------------------------------------------------------------------------

    def names(self, text: str) -> list[str]:
        """`rank 0 2.1` means the newest life of rank 0 and life 1 of rank 2; every other name is itself."""
        if not text.startswith("rank"):
            return [text]
        names = []
        for word in text.split()[1:]:
            rank, _, life = word.partition(".")
            names.append(rank_name(int(rank), int(life) if life else self.newest.get(int(rank), 0)))
        return names

    def lives_of(self, text: str) -> list[Life]:
        names = self.names(f"rank {text}")
        if gone := [name for name in names if name not in self.lives]:
            raise ScriptError(f"{', '.join(gone)}: no such process")
        return [self.lives[name] for name in names]

    def links_of(self, text: str) -> list[Link]:
        """`a -> b`, or a name alone for everything between it and the coordinator."""
        source, between, target = text.partition(" -> ")
        if between:
            return [(one, other) for one in self.names(source) for other in self.names(target)]
        both = [[(name, COORDINATOR), (COORDINATOR, name), (FEED, name)] for name in self.names(text)]
        return [link for links in both for link in links if link != (FEED, text) or text in self.front_ends]

    # --- the network -------------------------------------------------------------------------------------------------

    def put(self, source: str, target: str, message: m.Message | Request) -> None:
        link = source, target
        if link in self.cut:
            if not isinstance(message, QUIET):
                way, who = arrow(link)
                self.lines.once(f"{way}: {self.text(message)} (lost, and so is every repetition)", link, who)
        elif target in self.lives or target in self.front_ends or (target == COORDINATOR and self.fleet is not None):
            self.links[link].append(message)
        elif target != COORDINATOR and not target.startswith("rank"):
            self.links[link].append(message)  # to somebody who only asked: shown, and without effect

    def cross(self, link: Link) -> None:
        """The oldest message of a link arrives."""
        source, target = link
        message = self.links[link].popleft()
        before = self.dropped(target)
        outer, self.lines = self.lines, Lines(self.lines.told)
        remark = self.arrive(source, target, message)
        dropped = self.dropped(target) - before
        if not (isinstance(message, m.Snapshot) and self.lines):  # older updates that it makes void are not its fault
            remark += dropped_text(dropped)
        inner, self.lines = self.lines, outer
        if inner or remark or not isinstance(message, QUIET):
            way, who = arrow(link)
            self.lines.say(f"{way}: {self.text(message)}{remark}", who)
        self.lines.extend(inner)

    def arrive(self, source: str, target: str, message: Any) -> str:
        if target == COORDINATOR:
            self.coordinator(Received(source.encode(), wire(message)))
        elif target in self.lives:
            life = self.lives[target]
            if isinstance(message, Request):
                life.work += message.steps
                self.perform(life, life.core.work_arrived())
                return ""
            dropped = sum(life.core.dropped.values())
            self.perform(life, life.core.handle(rank_events.Received(wire(message)), self.now_ms + life.clock_ms))
            late = isinstance(message, m.Command) and message.seq > life.core.applied
            return " (kept)" if late and dropped == sum(life.core.dropped.values()) else ""
        elif target in self.front_ends:
            self.front_end(target, desk.Received(wire(message)))
        return ""

    def text(self, message: Any) -> str:
        return f"request for {message.steps} steps" if isinstance(message, Request) else message_text(message)

    def dropped(self, name: str) -> Counter[str]:
        if name == COORDINATOR and self.fleet is not None:
            return self.fleet.dropped + self.fleet.deployments[self.spec.name].dropped
        core = self.lives[name].core if name in self.lives else self.front_ends.get(name)
        return Counter(core.dropped) if core is not None else Counter()

    def flow(self) -> None:
        """Deliver everything that is on open links, and let exchanges form, until nothing moves."""
        moved = True
        while moved:
            moved = self.build()
            for upward in (True, False):
                outer, self.lines = self.lines, Lines(self.lines.told)
                for link in sorted(self.links):
                    if (link[1] == COORDINATOR) is not upward or link in self.slow or link[1] in self.frozen:
                        continue
                    for _ in range(len(self.links[link])):
                        self.cross(link)
                        moved = True
                inner, self.lines = self.lines, outer
                self.lines.extend(inner if upward else inner.gathered())

    # --- the processes -----------------------------------------------------------------------------------------------

    def coordinator(self, event: Event) -> None:
        if self.fleet is None:
            return
        for effect in self.fleet.handle(event, self.now_ms):
            match effect:
                case Send(peer=peer, message=message):
                    self.put(COORDINATOR, peer.decode(), message)
                case Publish(message=message):
                    for name in self.front_ends:
                        self.put(FEED, name, message)
                case Note(text=text):
                    self.lines.say(f"coordinator: {plain(text)}")
                case Answer(answer=answer):
                    self.lines.say(f"coordinator -> operator: {answer_text(answer)}")
        self.fleet.check()
        self.fleet.next_deadline_ms(self.now_ms)  # the promise by which it knows later that it was stopped

    def front_end(self, name: str, event: desk.Received | desk.Tick) -> None:
        before = sees_text(self.front_ends[name])
        for effect in self.front_ends[name].handle(event, self.now_ms):
            if isinstance(effect, desk.Send):
                self.put(name, COORDINATOR, effect.message)
        if sees_text(self.front_ends[name]) != before:
            self.lines.say(f"{name}: {sees_text(self.front_ends[name])}")

    def perform(self, life: Life, effects: Iterable[rank_events.Effect]) -> None:
        for effect in effects:
            match effect:
                case rank_events.Send(message=message):
                    self.put(life.name, COORDINATOR, message)
                case rank_events.Build(form=form):
                    life.building = form
                case rank_events.Interrupt():
                    life.group, life.count = "", 0
                    if life.posted is not None:  # the engine is thrown out of its exchange, and drops this step
                        life.posted = None
                        if not self.leave(life):
                            self.perform(life, life.core.fail("interrupted", None))
                case _:
                    pass  # waking the engine and logging
        self.show_activity(life)
        if (position := position_text(life.core)) != life.shown:
            life.shown = position
            self.lines.say(f"rank {MANY}: {position}", life.name)

    def build(self) -> bool:
        """An exchange stands as soon as all of its members, and these very lives of them, build it."""
        by_group: dict[str, list[Life]] = defaultdict(list)
        members: dict[str, int] = {}
        for life in self.lives.values():
            if life.building is not None and life.name not in self.frozen:
                by_group[life.building.group].append(life)
                members[life.building.group] = len(life.building.members)
        stands = [lives for group, lives in by_group.items() if len(lives) == members[group]]
        for life in [life for lives in stands for life in sorted(lives, key=lambda life: life.rank)]:
            form, life.building = life.building, None
            assert form is not None
            life.group, life.count = form.group, 0
            built = rank_events.Built(form.group, form.exchange, 0)
            self.perform(life, life.core.handle(built, self.now_ms + life.clock_ms))
        return bool(stands)

    def tick(self, life: Life) -> None:
        """Time passes at one rank."""
        self.perform(life, life.core.handle(rank_events.Tick(), self.now_ms + life.clock_ms))

    # --- the engines -------------------------------------------------------------------------------------------------

    def leave(self, life: Life) -> bool:
        """The engine's next call: is its step over because somebody was lost?"""
        lost, effects = life.core.leave_for_fault()
        if lost is not None:
            whom = "somebody" if lost.rank is None else f"rank {lost.rank}"
            self.lines.say(
                f"rank {MANY}: engine told that {whom} is lost, wave {lost.wave} step {lost.step}", life.name
            )
        self.perform(life, effects)
        return lost is not None

    def call_hooks(self, life: Life) -> bool:
        """What the engine does first in a turn: it hears of a hold, and says when its device is idle."""
        called = False
        while life.posted is None and (hook := life.core.take_hook()) is not None:
            if hook is rank_events.Hook.DEVICE_IDLE and not life.device_idle:
                break
            called = True
            self.lines.say(f"rank {MANY}: engine called for {hook}", life.name)
            hold = life.core.hold
            if hook is rank_events.Hook.HOLD and life.work and hold is not None and hold.hold_mode is m.HoldMode.NOW:
                self.lines.say(f"rank {MANY}: aborts {life.work} steps of work", life.name)
                life.work = 0
            if hook is rank_events.Hook.SPARE:
                self.lines.say(f"rank {MANY}: gives back {life.work} steps of work", life.name)
                life.work = 0
            self.perform(life, life.core.hook_done(hook))
        return called

    def show_activity(self, life: Life) -> None:
        """What the engine's thread is in, for whoever asks who waits for whom."""
        inside = m.Activity.STEPPING if life.core.must_step else m.Activity.IDLE
        activity = m.Activity.EXCHANGING if life.posted is not None else inside
        if activity is not life.core.activity:
            life.core.activity, life.core.activity_since_ms = activity, self.now_ms + life.clock_ms

    def write(self, life: Life) -> bool:
        """An engine's turn up to its row; False if nothing came of it."""
        if self.leave(life):
            return True
        moved = self.call_hooks(life)
        if life.posted is not None or not life.core.must_step or not life.core.kind.lockstep:
            return moved
        life.posted = life.core.begin(Row(num_tokens=life.work, has_work=True) if life.work else DUMMY)
        life.count += 1
        self.rows[life.group, life.count][life.rank] = life.posted
        self.show_activity(life)
        return True

    def read(self, life: Life) -> bool:
        key = life.group, life.count
        rows = self.rows[key] if life.posted is not None else {}
        group = life.core.group_ranks
        if life.posted is None or len(rows) < len(group):
            return False
        if len({str(position) for _, position in rows.values()}) != 1:
            raise ScriptError(f"the ranks met at different positions: {rows}")
        plan = planned([rows[rank][0] for rank in group], life.posted[1])
        if key not in self.plans:
            self.lines.say(plan_text(plan, group), str(plan.step))
        if self.plans.setdefault(key, plan) != plan:
            raise ScriptError(f"two plans of one exchange: {plan} and {self.plans[key]}")
        life.posted = None
        if plan.runs_forward and life.work:
            life.work -= 1
            if not life.work:
                self.lines.say(f"rank {MANY}: has done all its work", life.name)
        self.perform(life, life.core.finish(plan, 1.0))
        self.show_activity(life)
        return True

    def step(self) -> bool:
        lives = [self.lives[name] for name in sorted(self.lives) if name not in self.frozen]
        moved = any([self.write(life) for life in lives])
        for life in lives:
            if life.core.kind is m.Kind.DENSE and life.core.must_step:
                life.core.stepper.alone(Row(num_tokens=1, has_work=True) if life.work else Row())
                if life.work:
                    life.work -= 1
                    self.lines.say(f"rank {MANY}: runs a step alone, {life.work} left", life.name)
                moved = True
        moved |= any([self.read(life) for life in lives])
        for life in lives:
            if life.posted is not None:
                rows = self.rows[life.group, life.count]
                missing = " ".join(str(rank) for rank in life.core.group_ranks if rank not in rows)
                self.lines.say(f"rank {MANY}: waits in {life.posted[1]} for the row of rank {missing}", life.name)
        return moved
