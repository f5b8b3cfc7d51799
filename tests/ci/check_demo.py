"""Judge the JSON that `wavekeeper demo --json FILE` writes: python check_demo.py FILE

What the demo must show: no request is lost, a MoE deployment keeps its ranks in step with one exchange each and stops
at once when the work is done, and a dense deployment pays nothing for the one beside it. Prints every figure that is
wrong and exits with 1, or prints what was shown.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WAVES_LEAST = 3  # fewer would not show that a group comes to rest and wakes again
STEPS_AFTER_LAST_WORK_MAX = 1  # the exchange that shows that nobody has work
DENSE_COSTS = ("group_operations", "process_groups", "wave_messages", "dummy_steps")


def complaints(report: dict[str, Any]) -> Iterator[str]:
    """Yield what the report shows and should not, each with the deployment and the rank."""
    deployments: dict[str, dict[str, Any]] = report["deployments"]
    kinds = {deployment["kind"] for deployment in deployments.values()}
    if kinds != {"moe", "dense"}:
        yield f"expected a moe and a dense deployment, found {sorted(kinds)}"
    for name, deployment in deployments.items():
        judge = moe if deployment["kind"] == "moe" else dense
        for complaint in (*either(deployment), *judge(deployment)):
            yield f"{name}: {complaint}"


def either(deployment: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a deployment of either kind."""
    sent, completed, lost = (deployment[f"requests_{what}"] for what in ("sent", "completed", "lost"))
    if sent == 0:
        yield "no request was sent"
    if lost != 0:
        yield f"{lost} requests were lost"
    if completed != sent:
        yield f"{completed} of {sent} requests were completed"
    if deployment["output_check"] is not True:
        yield "its outputs are not those of one rank alone"
    if not deployment["ranks"]:
        yield "it has no ranks"


def moe(deployment: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a lockstep deployment."""
    if deployment["waves"] < WAVES_LEAST:
        yield f"{deployment['waves']} waves, expected at least {WAVES_LEAST}"
    if deployment["steps_after_last_work"] > STEPS_AFTER_LAST_WORK_MAX:
        yield f"{deployment['steps_after_last_work']} steps after the last work, expected at most 1"
    for rank in deployment["ranks"]:
        if rank["group_operations"] != rank["steps"]:
            yield f"rank {rank['rank']}: {rank['group_operations']} group operations in {rank['steps']} steps"
        if rank["steps"] == 0:
            yield f"rank {rank['rank']}: no step"


def dense(deployment: dict[str, Any]) -> Iterator[str]:
    """Yield what an independent deployment was made to pay."""
    for rank in deployment["ranks"]:
        for cost in DENSE_COSTS:
            if rank[cost] != 0:
                yield f"rank {rank['rank']}: {cost} is {rank[cost]}, expected 0"


def main(file: str) -> int:
    """Judge one file; returns the exit code."""
    report = json.loads(Path(file).read_text())
    wrong = list(complaints(report))
    for complaint in wrong:
        print(f"demo: {complaint}", file=sys.stderr)
    if not wrong:
        shown = [f"{name} {d['requests_completed']} requests" for name, d in report["deployments"].items()]
        print(f"demo: as it should be ({', '.join(shown)})")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
