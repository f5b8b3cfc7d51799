"""`wavekeeper bench exchange`: it measures what it says, and says who has failed. No figure is judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from wavekeeper.worker_agent.bench.exchange import BenchFailedError, Options, run
from wavekeeper.worker_agent.bench.report import Report, Result, compared, table


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-Im", "wavekeeper.coordinator", "bench", "exchange", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_each_backend_and_its_peer_are_measured_by_the_same_ranks(tmp_path: Path) -> None:
    done = bench("--ranks", "2,3", "--steps", "30", "--json", str(tmp_path / "out.json"))

    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert [(each["backend"], each["ranks"]) for each in report["results"]] == [
        (backend, ranks) for ranks in (2, 3) for backend in ("shm", "agent.step", "gloo")
    ]
    for each in report["results"]:
        assert 0 < each["p50_us"] <= each["p99_us"] <= each["max_us"]
        assert (each["steps"], each["peer"]) == (30, "gloo all_reduce")
        assert each["ratio_p50"] == round(each["peer_p50_us"] / each["p50_us"], 1)
    assert report["machine"]["cores"] and report["machine"]["torch"]
    assert "3 ranks, shm: p50" in done.stderr, "progress is shown"
    assert done.stdout.splitlines()[-7].split()[:2] == ["ranks", "backend"]


def test_without_its_peer_no_torch_is_needed() -> None:
    told: list[str] = []
    report = run(Options(backends=("shm",), ranks=(2,), steps=20, peer=False, skew_us=50.0), told.append)

    assert [(each.backend, each.peer_p50_us) for each in report.results] == [("shm", None), ("agent.step", None)]
    assert "skew: up to 50 us" in table(report)


def test_a_rank_that_fails_is_named_with_its_last_words() -> None:
    with pytest.raises(BenchFailedError, match=r"rank \d has ended with status 1; its last words: .*shm"):
        run(Options(backends=("shm", "nccl"), ranks=(2,), steps=20, peer=False), lambda text: None)


WRONG = {
    "no such backend": (["--backends", "shm,mpi"], "must be of shm, gloo, nccl, hccl, got mpi"),
    "no number": (["--ranks", "2,many"], "must be numbers with commas between them, got '2,many'"),
    "no rank at all": (["--ranks", "0"], "every number must be at least 1"),
    "a device's exchange without a device": (["--backends", "nccl"], "--backends nccl needs --device cuda"),
    "a stream without a device": (["--busy-stream", "20"], "--busy-stream needs --device cuda or npu"),
}


@pytest.mark.parametrize("arguments, words", WRONG.values(), ids=WRONG)
def test_what_cannot_be_measured_is_wrong_usage(arguments: list[str], words: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2 and words in " ".join(done.stderr.replace("\n", " ").split())


def test_a_result_is_compared_with_the_peer_of_as_many_ranks() -> None:
    results = [Result("shm", ranks, 10, 5.0, 9.0, 20.0) for ranks in (2, 4)]
    assert [each.ratio_p50 for each in compared(results, {4: ("peer", 500.0)})] == [None, 100.0]


def test_the_table_has_a_line_for_each_result() -> None:
    result = Result("shm", 8, 10, 1234.56, 2000.0, 3000.0, "gloo all_reduce", 9876.5, 8.0)
    lines = table(Report({"cpu": "some"}, {"steps": "10"}, [result])).splitlines()
    assert lines[-1].split() == ["8", "shm", "1,234.6", "2,000.0", "3,000.0", "gloo", "all_reduce", "9,876.5", "8.0"]
