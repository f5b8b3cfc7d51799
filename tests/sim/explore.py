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
from collections.abc import Callable
from dataclasses import dataclass

from .actions import MISFORTUNES, actions, first, forget_rows
from .system import Budget, State, good, key

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
