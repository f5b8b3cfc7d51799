"""Offline runs: real processes, no coordinator."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RANK = Path(__file__).with_name("offline_rank.py")
WORK = (2, 20, 200)
LIMIT_S = 120


def run(kind: str, exchange: str, rendezvous: str) -> list[dict[str, Any]]:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", str(RANK), str(rank), str(len(WORK)), kind, exchange, rendezvous, str(work)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, work in enumerate(WORK)
    ]
    try:
        outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * len(WORK)
    return [json.loads(output) for output in outputs]


def free_endpoint() -> str:
    """An offline run is told a fixed address; this one was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("exchange", ["shm", "gloo"])
def test_moe_ranks_with_unequal_work_leave_together_with_equal_operation_lists(exchange: str) -> None:
    reports = run("moe", exchange, free_endpoint())

    lists = [report["operations"] for report in reports]
    assert lists[0] == lists[1] == lists[2]
    assert len(lists[0]) == max(WORK) + 1, (
        "one exchange for each step of the longest rank, and the one that ends the wave"
    )
    assert lists[0][-1][3] == "wave_ended"
    for report, work in zip(reports, WORK, strict=True):
        counters = report["counters"]
        assert counters["group_operations"] == counters["steps"] == max(WORK) + 1
        assert counters.get("dummy_steps", 0) == max(WORK) - work
        assert counters["steps_after_last_work"] == 1
        assert counters.get("process_groups", 0) == (1 if exchange == "gloo" else 0)


def test_dense_ranks_create_nothing_at_all() -> None:
    before = set(Path("/dev/shm").iterdir())

    reports = run("dense", "shm", "")

    for report, work in zip(reports, WORK, strict=True):
        counters = report["counters"]
        assert counters["steps"] == work + 1
        for zero in ("group_operations", "process_groups", "wave_messages", "dummy_steps", "preflights"):
            assert counters.get(zero, 0) == 0
        assert not report["torch_imported"]
    assert {path for path in set(Path("/dev/shm").iterdir()) - before if path.name.startswith("wavekeeper")} == set()
