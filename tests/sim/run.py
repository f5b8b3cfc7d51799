"""`make sim SEEDS=N`: play the scenarios of N seeds on the production cores, in as many processes as there are CPUs.

A seed that fails is shrunk, and told with the end of its story. `make sim SEED=8121` tells the whole story of one.
The closing line is `N passed, N failed`.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

from .scenario import Told, draw, play, shrink

TAIL_LINES = 40
PROGRESS_S = 5.0
CHUNK = 5
FAILURES_SHOWN_MAX = 3


def one(seed: int) -> tuple[int, Told]:
    """Play one seed, in a worker."""
    return seed, play(draw(seed))


def many(first: int, seeds: int, processes: int) -> int:
    """Play many seeds; return how many failed."""
    began = time.monotonic()
    shown = began
    failed: list[int] = []
    totals: Counter[str] = Counter()
    slowest, busiest, passed = 0, 0.0, 0
    with multiprocessing.Pool(processes) as pool:
        for seed, told in pool.imap_unordered(one, range(first, first + seeds), chunksize=CHUNK):
            totals.update(told.seen)
            totals.update(events=told.events, served=told.served, failed=told.failed)
            slowest, busiest = max(slowest, told.calm_after_ms), max(busiest, told.busiest)
            if told.failure:
                failed.append(seed)
                print(f"seed {seed}: {told.failure.splitlines()[0][:300]}", flush=True)
            else:
                passed += 1
            if time.monotonic() - shown >= PROGRESS_S:
                shown = time.monotonic()
                print(f"{passed} passed, {len(failed)} failed of {seeds}", file=sys.stderr, flush=True)
    for seed in failed[:FAILURES_SHOWN_MAX]:
        explain(seed)
    seconds = time.monotonic() - began
    print(
        f"{totals.pop('events'):,} events, {totals.pop('served'):,} requests served, {totals.pop('failed'):,} failed "
        f"with their rank; the last was done {slowest / 1000:.1f} s after the faults; "
        f"{busiest:.0%} of the messages allowed; {seconds:.0f} s"
    )
    print(", ".join(f"{name} {times:,}" for name, times in sorted(totals.items())))
    print(f"{passed} passed, {len(failed)} failed")
    return len(failed)


def explain(seed: int) -> None:
    """Shrink a seed that fails, and tell how it ends."""
    smallest = shrink(draw(seed))
    told = play(smallest, telling=True)
    print(f"\nseed {seed} fails with no more than this:")
    print("\n".join(f"  {line}" for line in [*smallest.lines(), "", *told.story[-TAIL_LINES:]]))
    print(f"  {told.failure}\nThe whole story: make sim SEED={seed}\n", flush=True)


def tell(seed: int) -> int:
    """Tell the story of one seed; return whether it fails."""
    scenario = draw(seed)
    told = play(scenario, telling=True)
    print("\n".join([*scenario.lines(), "", *told.story]))
    print(told.failure or f"{told.served} served, {told.failed} failed with their rank")
    print(f"{int(not told.failure)} passed, {int(bool(told.failure))} failed")
    return int(bool(told.failure))


def main(arguments: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="sim", description="Play scenarios on the production cores, in virtual time.")
    parser.add_argument("--seeds", type=int, default=1_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="tell the story of this one")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        return tell(asked.seed)
    return int(many(asked.first, asked.seeds, asked.processes) > 0)
