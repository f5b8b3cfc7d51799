"""`wavekeeper demo` as a user runs it: real processes, a real trace, and nothing left behind however it ends."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 100.0
"""Of a whole run, on a busy machine of two cores."""
STOP_LIMIT_S = 15.0
MARK = "WAVEKEEPER_DEMO_TEST_MARK"

CONFIG = """\
coordinator:
  control: tcp://127.0.0.1:0
  feed: tcp://127.0.0.1:0
  http: {port: 0}
deployments:
  - {name: moe-NAME, kind: moe, dp_size: 2, exchange: shm, settings: SETTINGS}
  - {name: dense-NAME, kind: dense, dp_size: 1}
"""


def wait_until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    until_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until_s, f"waited {limit_s} s for {what}"
        time.sleep(0.02)


class Demo:
    """One run of the command. All of its processes, and only they, carry its mark in their environment."""

    def __init__(self, tmp_path: Path, *options: str) -> None:
        self.report_file = tmp_path / "report.json"
        self.temporary = tmp_path / "tmp"
        self.temporary.mkdir()
        self._mark = secrets.token_hex(8)
        self._errors = tmp_path / "stderr"
        self._output = tmp_path / "stdout"
        command = ["-Im", "wavekeeper.coordinator", "demo", "--json", str(self.report_file), *options]
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                cwd=tmp_path,  # no trace lies nearby: the packaged one is used
                env={**os.environ, MARK: self._mark, "TMPDIR": str(self.temporary), "NO_COLOR": "1"},
            )

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def report(self) -> dict[str, Any]:
        report = json.loads(self.report_file.read_text())
        assert isinstance(report, dict)
        return report

    def wait(self, limit_s: float = LIMIT_S) -> int:
        return self.process.wait(limit_s)

    def wait_for_answers(self) -> None:
        """Until requests are being answered."""
        answered = re.compile(r" [1-9]\d*/\d+ done")
        wait_until(lambda: answered.search(self.errors) or self.process.poll() is not None, "the first answer")
        assert self.process.poll() is None, self.errors

    def children(self) -> dict[int, str]:
        """Command lines of all living processes of this run but the first, by pid."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or int(folder.name) == self.process.pid:
                continue
            try:
                if f"{MARK}={self._mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it has ended, or is a stranger's
                continue
        return found

    def rank(self, deployment: str, rank: int) -> int:
        """Pid of a rank's process."""
        wanted = f"--deployment {deployment} "
        (pid,) = [p for p, line in self.children().items() if wanted in line and f"--rank {rank} " in line]
        return pid

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.children():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def name() -> str:
    """Part of the deployments' names, so that what lies in /dev/shm can be told from other runs'."""
    return secrets.token_hex(4)


Start = Callable[..., Demo]


@pytest.fixture
def start(tmp_path: Path, name: str) -> Iterator[Start]:
    """Start the demo on a small fleet; `settings` are what the configuration wants of the MoE ranks."""
    demos: list[Demo] = []

    def make(*options: str, settings: str = "{}") -> Demo:
        config = tmp_path / "config.yaml"
        config.write_text(CONFIG.replace("NAME", name).replace("SETTINGS", settings))
        demos.append(Demo(tmp_path, "--config", str(config), *options))
        return demos[-1]

    yield make
    for demo in demos:
        demo.end()


def assert_nothing_is_left(demo: Demo, name: str) -> None:
    assert demo.children() == {}
    assert [path for path in Path("/dev/shm").iterdir() if name in path.name] == []


def test_the_demo_loses_nothing_and_shows_what_coordination_costs(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--requests", "16")
    try:
        assert demo.wait() == 0, demo.errors + demo.output
        assert demo.children() == {}
        assert list(demo.temporary.iterdir()) == [], "the logs of a good run are removed"
    finally:
        demo.end()

    report = demo.report
    assert report["ok"]
    assert report["trace"]["requests"] == 16
    moe, dense = report["deployments"]["demo-moe"], report["deployments"]["demo-dense"]
    for deployment in (moe, dense):
        assert deployment["requests_sent"] == deployment["requests_completed"] == 8
        assert deployment["requests_lost"] == 0
        assert deployment["output_check"] is True
        assert deployment["problems"] == []
        assert 0 < deployment["latency_s"]["p50"] <= deployment["latency_s"]["p99"]
    assert moe["waves"] >= 3, "the trace's gaps let the group go idle"
    assert moe["exchange_backend"] == "shm"
    assert moe["dummy_steps"] > 0
    assert moe["wave_messages"] > 0
    assert moe["steps_after_last_work"] <= 1
    assert moe["process_groups"] == 0
    assert len(moe["ranks"]) == 4
    for rank in moe["ranks"]:
        assert rank["group_operations"] == rank["steps"] == moe["steps"] > 0
        assert not rank["torch_dist_imported"]
    zeros = ("waves", "group_operations", "process_groups", "wave_messages", "dummy_steps", "steps_after_last_work")
    assert {figure: dense[figure] for figure in zeros} == dict.fromkeys(zeros, 0)
    assert dense["steps"] > 0
    assert not any(rank["torch_dist_imported"] for rank in dense["ranks"])
    assert "all is well" in demo.output
    assert "\x1b" not in demo.output + demo.errors


def test_chaos_costs_no_request_but_those_of_the_killed_rank(start: Start, name: str) -> None:
    demo = start("--chaos", "--requests", "24", "--speed", "2")

    assert demo.wait() == 0, demo.errors + demo.output
    assert_nothing_is_left(demo, name)
    report = demo.report
    assert report["ok"]
    assert [blow["what"] for blow in report["chaos"]] == [
        "the coordinator",
        f"rank 0 of dense-{name}",
        "the coordinator",
    ]
    killed = report["chaos"][1]["requests_out"]
    for deployment, failed in ((f"moe-{name}", 0), (f"dense-{name}", killed)):
        figures = report["deployments"][deployment]
        assert figures["requests_sent"] == 12
        assert figures["requests_lost"] == 0
        assert figures["requests_failed_with_rank"] == failed
        assert figures["requests_completed"] == 12 - failed
        assert figures["output_check"] is True
        assert figures["problems"] == []
    assert "chaos: the coordinator is killed" in demo.errors
    assert f"chaos: rank 0 of dense-{name} is back" in demo.errors


def test_ctrl_c_in_the_middle_leaves_nothing_behind(start: Start, name: str) -> None:
    demo = start()
    demo.wait_for_answers()
    assert len(demo.children()) == 4, "the coordinator and three ranks"

    demo.process.send_signal(signal.SIGINT)

    assert demo.wait(STOP_LIMIT_S) == 130
    assert_nothing_is_left(demo, name)
    assert list(demo.temporary.iterdir()) == []
    assert "stopped by SIGINT" in demo.errors
    assert "Traceback" not in demo.errors


def test_a_rank_that_is_killed_ends_the_demo_with_a_report_that_says_so(start: Start, name: str) -> None:
    demo = start("--exchange", "gloo")
    demo.wait_for_answers()

    os.kill(demo.rank(f"moe-{name}", 1), signal.SIGKILL)

    assert demo.wait(LIMIT_S) == 1
    assert_nothing_is_left(demo, name)
    assert f"rank 1 of moe-{name} was killed by SIGKILL" in demo.errors
    assert not demo.report["ok"]
    assert "no final counters of rank 1" in demo.report["deployments"][f"moe-{name}"]["problems"]
    (logs,) = demo.temporary.iterdir()
    assert str(logs) in demo.errors, "the place of the logs is told"
    assert (logs / f"moe-{name}-1.log").is_file()


def test_ranks_that_are_refused_end_the_demo_with_the_coordinators_reason(start: Start, name: str) -> None:
    demo = start(settings="{model: another}")

    assert demo.wait() == 1
    assert_nothing_is_left(demo, name)
    assert f"of moe-{name} ended with 2" in demo.errors
    assert "model: expected 'another'" in demo.errors


def test_a_coordinator_that_cannot_start_ends_the_demo_with_its_own_words(start: Start, name: str) -> None:
    demo = start(settings="7")

    assert demo.wait() == 1
    assert_nothing_is_left(demo, name)
    assert "coordinator ended with 78" in demo.errors
    assert "deployments[0].settings: expected a section" in demo.errors


def test_no_process_outlives_a_demo_that_is_killed(start: Start, name: str) -> None:
    demo = start()
    demo.wait_for_answers()

    demo.process.kill()
    demo.process.wait()

    wait_until(lambda: not demo.children(), "the children's end", STOP_LIMIT_S)
    assert_nothing_is_left(demo, name)
