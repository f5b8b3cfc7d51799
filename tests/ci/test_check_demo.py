"""The judge of the demo: what it lets pass, and that each figure can fail it."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from .check_demo import complaints

Report = dict[str, Any]


def rank(number: int, steps: int, exchanges: int) -> Report:
    none = {"dummy_steps": 0, "process_groups": 0, "wave_messages": 0}
    return {"rank": number, "steps": steps, "group_operations": exchanges, **none}


def deployment(kind: str, **more: Any) -> Report:
    served = {"requests_sent": 60, "requests_completed": 60, "requests_lost": 0, "output_check": True}
    return {"kind": kind, **served, **more}


def good() -> Report:
    moe = deployment("moe", waves=3, steps_after_last_work=1, ranks=[rank(0, 9, 9), rank(1, 9, 9)])
    dense = deployment("dense", ranks=[rank(0, 5, 0), rank(1, 7, 0)])
    return {"deployments": {"demo-moe": moe, "demo-dense": dense}}


BROKEN: dict[str, Callable[[Report, Report], Any]] = {
    "demo-moe: 1 requests were lost": lambda moe, _: moe.update(requests_lost=1),
    "demo-moe: 59 of 60 requests were completed": lambda moe, _: moe.update(requests_completed=59),
    "demo-moe: 2 waves, expected at least 3": lambda moe, _: moe.update(waves=2),
    "demo-moe: 2 steps after the last work, expected at most 1": lambda moe, _: moe.update(steps_after_last_work=2),
    "demo-moe: its outputs are not those of one rank alone": lambda moe, _: moe.update(output_check=False),
    "demo-moe: no request was sent": lambda moe, _: moe.update(requests_sent=0, requests_completed=0),
    "demo-moe: rank 0: no step": lambda moe, _: moe["ranks"][0].update(steps=0, group_operations=0),
    "demo-moe: it has no ranks": lambda moe, _: moe["ranks"].clear(),
    "demo-moe: rank 1: 8 group operations in 9 steps": lambda moe, _: moe["ranks"][1].update(group_operations=8),
    "demo-dense: 2 requests were lost": lambda _, dense: dense.update(requests_lost=2),
    "demo-dense: 0 of 60 requests were completed": lambda _, dense: dense.update(requests_completed=0),
    "demo-dense: its outputs are not those of one rank alone": lambda _, dense: dense.update(output_check=False),
    "demo-dense: it has no ranks": lambda _, dense: dense["ranks"].clear(),
    "demo-dense: rank 1: group_operations is 1, expected 0": lambda _, d: d["ranks"][1].update(group_operations=1),
    "demo-dense: rank 0: process_groups is 1, expected 0": lambda _, d: d["ranks"][0].update(process_groups=1),
    "demo-dense: rank 0: wave_messages is 3, expected 0": lambda _, d: d["ranks"][0].update(wave_messages=3),
    "demo-dense: rank 1: dummy_steps is 4, expected 0": lambda _, d: d["ranks"][1].update(dummy_steps=4),
    "expected a moe and a dense deployment, found ['dense']": lambda moe, dense: moe.update(deepcopy(dense)),
}


def test_a_good_demo_passes() -> None:
    assert list(complaints(good())) == []


@pytest.mark.parametrize("told", BROKEN)
def test_a_wrong_figure_is_told(told: str) -> None:
    report = good()
    BROKEN[told](*report["deployments"].values())
    assert list(complaints(report)) == [told]
