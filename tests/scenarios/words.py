"""What the scenarios say: messages, positions, plans and status as short and stable lines.

The law of this file: nothing random and nothing of this machine is ever shown. An incarnation is `rank.life`, a
front-end is its name, and lines that differ only in the rank are one line.
"""

import re
from collections import Counter
from collections.abc import Iterator

from wavekeeper.coordinator.core.holds import Operation, Refusal
from wavekeeper.coordinator.core.regroups import Regroup
from wavekeeper.coordinator.core.view import DeploymentView, RankView
from wavekeeper.proto import messages as m
from wavekeeper.worker_agent.core import RankCore
from wavekeeper.worker_agent.front_end_core import FrontEndCore
from wavekeeper.worker_agent.plan import Plan, Role

MANY = "\0"
"""Stands in a line for whom it is about; lines that are otherwise equal become one."""
_FRONT_END = "f" * 8


class Lines:
    """Lines in the order of what happened; neighbours that differ only in whom they are about are merged."""

    def __init__(self, told: set[tuple[str, object]] | None = None) -> None:
        self._lines: list[tuple[str, list[str]]] = []
        self.told = told if told is not None else set()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[tuple[str, list[str]]]:
        return iter(self._lines)

    def say(self, text: str, *who: str) -> None:
        """Add a line; `MANY` in it stands for `who`."""
        names = [name.removeprefix("rank ") for name in who]
        if self._lines and self._lines[-1][0] == text:
            here = self._lines[-1][1]
            if set(here) == set(names) or not set(here) & set(names):
                here += names
                return
        self._lines.append((text, names))

    def once(self, text: str, about: object, *who: str) -> None:
        """Add a line unless it has been said before."""
        if (text, about) not in self.told:
            self.told.add((text, about))
            self.say(text, *who)

    def extend(self, other: "Lines") -> None:
        """Add the lines of another."""
        for text, who in other:
            self.say(text, *who)

    def keep_first(self) -> None:
        """Forget all lines but the first."""
        del self._lines[1:]

    def gathered(self) -> "Lines":
        """Equal lines brought together: for what happens at different ranks, so at the same time."""
        by_text: dict[str, list[str]] = {}
        for text, who in self:
            by_text.setdefault(text, []).extend(who)
        gathered = Lines(self.told)
        gathered._lines = list(by_text.items())
        return gathered

    def render(self) -> list[str]:
        """As they stand in a script."""
        rendered = []
        for text, who in self:
            names = sorted(set(who), key=lambda name: [float(part) for part in name.split()])
            times = len(who) // len(names) if names else 1
            many = _runs(names) if f"step {MANY}" in text else " ".join(names)
            rendered.append(text.replace(MANY, many) + (f" ({times} times)" if times > 1 else ""))
        return rendered


def _runs(steps: list[str]) -> str:
    """`1 2` or, from three on, `1..40`: the steps of one plan follow each other."""
    return f"{steps[0]}..{steps[-1]}" if len(steps) > 2 else " ".join(steps)


def ids(rank: int, life: int) -> str:
    """The incarnation of this life of a rank."""
    return f"{rank + 1:08x}{life:08x}"


def front_end_id(name: str) -> str:
    """The id of the front-end `F<n>`."""
    return f"{_FRONT_END}{int(name[1:]):08x}"


def rank_name(rank: int, life: int) -> str:
    """`rank 2` for its first life, `rank 2.1` for the next."""
    return f"rank {rank}.{life}" if life else f"rank {rank}"


def plain(text: str) -> str:
    """The same with `2.1` for an incarnation and `F1` for a front-end's id."""

    def name(match: re.Match[str]) -> str:
        high, low = int(match[0][:8], 16), int(match[0][8:], 16)
        return f"F{low}" if match[0].startswith(_FRONT_END) else f"{high - 1}.{low}"

    return re.sub(r"\b[0-9a-f]{16}\b", name, text).replace("front-end F", "F")


def arrow(link: tuple[str, str]) -> tuple[str, str]:
    """A link as text, with `MANY` for its rank, and the rank."""
    ranks = [name for name in link if name.startswith("rank")]
    return " -> ".join(f"rank {MANY}" if name in ranks else name for name in link), ranks[0] if ranks else ""


def dropped_text(dropped: Counter[str]) -> str:
    """Why a message had no effect."""
    return f" (dropped: {', '.join(sorted(dropped))})" if dropped else ""


def position_text(core: RankCore) -> str:
    """Where a rank stands in its own eyes."""
    place = f", epoch {core.stepper.epoch}, wave {core.stepper.wave}" if core.stepper.epoch else ""
    return f"{core.mode}{place}"


def plan_text(plan: Plan, group: tuple[int, ...]) -> str:
    """What a step does on which rank; its number is left open."""
    text = f"wave {plan.wave} step {MANY}: {plan.outcome.replace('_', ' ')}"
    for role in (Role.REAL, Role.DUMMY):
        if ranks := [str(rank) for rank, is_role in zip(group, plan.roles, strict=False) if is_role is role]:
            text += f", {role} on {' '.join(ranks)}"
    return text + (f" ({plan.reason})" if plan.reason else "")


def message_text(message: m.Message) -> str:
    """A message in a few words."""
    name = type(message).__name__.lower()
    match message:
        case m.Halted() | m.FormFailed() | m.Leave():
            return f"{name}{_at(message.at)}: {plain(message.reason)}"
        case m.HeldAt():
            return f"{name} wave {message.wave} step {message.step} of operation {message.operation}{_at(message.at)}"
        case m.LoadReport(load=load):
            return f"{name}: {_load(load)}"
        case m.FromRank():
            return name + _at(message.at)
        case m.Welcome():
            spare = ", as a spare" if message.spare else ""
            return f"{name} to term {message.term}{spare}: {message.phase}, epoch {message.epoch}, wave {message.wave}"
        case m.Refused():
            differs = "".join(f"; {x.key}: expected {x.expected!r}, got {x.got!r}" for x in message.mismatches)
            again = ", may ask again" if message.retry else ""
            return f"{name} ({message.reason}{again}): {plain(message.detail)}{differs}"
        case m.Fault():
            return f"{name} of epoch {message.epoch}, lost rank {message.lost}: {plain(message.reason)}"
        case m.Hold():
            return f"{name} operation {message.order.operation}, mode {message.order.hold_mode}"
        case m.Resume():
            return f"{name} operation {message.operation}"
        case m.Form() | m.Start():
            return f"{name} epoch {message.epoch} wave {message.wave}"
        case m.FirstRequest(rank=rank):
            return f"{name} wave {message.wave}" + ("" if rank is None else f" to rank {rank}")
        case m.Rejected():
            return f"{name} ({message.reason}): {message.detail}"
        case m.Snapshot(state=state):
            return f"{name} of term {message.term}: {state.phase}, wave {state.wave}"
        case m.Update():
            return f"{name} of term {message.term}: {message.phase}, wave {message.wave}"
        case _:
            return name


def answer_text(answer: Operation | Regroup | Refusal) -> str:
    """What became of an operator's wish."""
    if isinstance(answer, Refusal):
        return f"refused ({answer.reason}): {answer.detail}"
    if isinstance(answer, Regroup):
        return f"regroup {answer.number} to rank {' '.join(map(str, answer.target))}, {answer.state}"
    return f"operation {answer.number}, mode {answer.wish.mode}"


def sees_text(core: FrontEndCore) -> str:
    """What a front-end believes of the deployment."""
    state = core.state
    if state is None:
        return "sees nothing yet"
    up = " ".join(str(rank.rank) for rank in state.ranks if rank.up) or "none"
    place = f"{state.phase}, epoch {state.epoch}, wave {state.wave}" if state.kind.lockstep else state.phase.value
    refuses = ", sends nothing" if state.refuses else ""
    return f"{'sees' if core.synced else 'asks anew; saw last'} {place}{refuses}; ranks up: {up}"


def view_lines(view: DeploymentView) -> Lines:
    """The status of a deployment, as people are shown it."""
    lines = Lines()
    place = f", epoch {view.epoch}, wave {view.wave}" if view.lockstep else ""
    ready = "ready" if view.ready else "not ready"
    lines.say(f"{view.name}: {view.phase}{place}, {ready}, {view.ranks_up} of {view.dp_size} ranks")
    if view.waits_for:
        lines.say(f"  {plain(view.waits_for)}")
    if view.hold is not None:
        key = f" {view.hold.key!r}" if view.hold.key else ""
        starts = f"starts are refused ({view.hold.refused} so far)" if view.hold.refuse else "starts are remembered"
        held = " ".join(str(rank) for rank in view.hold.held_ranks) or "none"
        lines.say(f"  hold operation {view.hold.operation}{key}, mode {view.hold.mode}; held: {held}; {starts}")
    if view.regroup is not None:
        detail = f": {plain(view.regroup.detail)}" if view.regroup.detail else ""
        to = " ".join(map(str, view.regroup.to))
        lines.say(f"  regroup {view.regroup.number} to rank {to}, {view.regroup.state}{detail}")
    for waiting in view.waiting_starts:
        lines.say(f"  a start waits since {waiting.waiting_s:.1f} s: asked by {plain(waiting.asked_by)}")
    if view.dropped:
        lines.say(f"  dropped: {', '.join(f'{reason} {count}' for reason, count in sorted(view.dropped.items()))}")
    for rank in view.ranks:
        lines.say(f"  rank {MANY}: {_rank_line(rank, view.lockstep)}", str(rank.rank))
    return lines


def _rank_line(rank: RankView, lockstep: bool) -> str:
    if not rank.up:
        return "not there"
    text = f"{rank.mode}" + (f", epoch {rank.epoch}, wave {rank.wave}" if lockstep and rank.epoch else "")
    text += f", step {rank.step}" if rank.step else ""
    text += ", holds work" if rank.has_work else ""
    text += f", heard {rank.heard_s:.1f} s ago" if rank.heard_s >= 0.2 else ""
    return text


def load_lines(view: DeploymentView) -> Lines:
    """The load of every rank, and how old it is."""
    lines = Lines()
    for rank in view.ranks:
        load = "never reported" if rank.load_age_s is None else f"{_load(rank.load)}, {rank.load_age_s:.1f} s old"
        lines.say(f"rank {MANY}: {load}", str(rank.rank))
    return lines


def _at(at: m.At) -> str:
    if at.mode in (m.Mode.JOINING, m.Mode.SERVING):
        return ", holds work" if at.has_work else ""
    step = f" step {at.step}" if at.step else ""
    hold = ", on hold" if at.hold and at.mode is not m.Mode.HELD else ""
    return f" ({at.mode} wave {at.wave}{step}{', holds work' if at.has_work else ''}{hold})"


def _load(load: m.Load) -> str:
    return f"{load.running} running, {load.waiting} waiting"
