"""`make sim`: a seed is a story that can be told again, a failure is shrunk, and the closing line counts."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from .mutations import MUTATIONS, applied
from .run import main
from .scenario import draw, play, shrink

MAIN = Path(__file__).with_name("__main__.py")


def test_a_seed_is_always_the_same_story() -> None:
    assert draw(11) == draw(11)
    assert play(draw(11), telling=True) == play(draw(11), telling=True)


def test_the_first_seeds_pass_and_are_counted() -> None:
    command = [sys.executable, "-I", str(MAIN), "sim", "--seeds", "20", "--processes", "2"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120)

    assert ran.returncode == 0
    assert ran.stdout.splitlines()[-1] == "20 passed, 0 failed"


def test_the_story_of_one_seed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3"]) == 0

    told = capsys.readouterr().out
    assert told.startswith("seed 3: ")
    assert "every rank has acknowledged" in told
    assert told.splitlines()[-1] == "1 passed, 0 failed"


def test_a_failure_is_shrunk_to_what_it_needs() -> None:
    planted = next(each for each in MUTATIONS if each.name == "running on sending")
    scenario = draw(5)

    with applied(planted):
        smallest = shrink(scenario)
        assert play(smallest).failure

    assert len(smallest.arrivals) <= 1
    assert not smallest.troubles
    assert not play(smallest).failure
    assert msgspec.json.decode(msgspec.json.encode(smallest), type=type(smallest)) == smallest
