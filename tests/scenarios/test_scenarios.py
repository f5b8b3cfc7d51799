"""Every script of this folder, played on the production cores and compared with what stands in it, letter by letter.

    WAVEKEEPER_REWRITE_SCENARIOS=1 python -m pytest tests/scenarios

writes what happens into the scripts instead. Commit a rewrite only if you understand what caused it.
"""

import os
import re
from difflib import unified_diff
from pathlib import Path

import pytest

from .interpreter import COMMANDS, Scenario
from .puppetry import ScriptError

FOLDER = Path(__file__).parent
SCRIPTS = sorted(FOLDER.glob("*.txt"))
REWRITE = bool(os.environ.get("WAVEKEEPER_REWRITE_SCENARIOS"))
RULE = "----"


def played(text: str) -> str:
    """The script with what happens now under each of its commands.

    Blocks are separated by empty lines. A block is comments (`#`), or commands, a rule and what was expected.
    """
    scenario = Scenario()
    blocks = []
    for block in re.split(r"\n{2,}", text.strip("\n")):
        above = block.split("\n" + RULE, 1)[0].split("\n")
        happened = []
        for line in above:
            if line.startswith("#"):
                continue
            try:
                happened += scenario.run(line)
            except ScriptError as error:
                raise ScriptError(f"{line!r}: {error}") from error
        told = all(line.startswith("#") for line in above)
        blocks.append("\n".join(above if told else [*above, RULE, *(happened or ["ok"])]))
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_story_goes_as_it_is_written(script: Path) -> None:
    text = script.read_text()
    now = played(text)
    if REWRITE:
        script.write_text(now)
    difference = "\n".join(
        unified_diff(text.splitlines(), now.splitlines(), "as it is written", "as it goes now", lineterm="")
    )
    assert REWRITE or now == text, f"{script.name}: rewrite it only if you understand what has changed\n{difference}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_opens_with_its_aim(script: Path) -> None:
    first = script.read_text().split("\n\n")[0]
    assert first.startswith("# ") and first.rstrip().endswith("."), "one sentence of aim, and the case"


def commands_of(text: str) -> set[str]:
    """Which commands of the language the lines of a text use."""
    lines = {line.strip() for line in text.splitlines()}
    lines |= {line.removeprefix("quietly ") for line in lines}
    return {method for line in lines for pattern, method in COMMANDS if pattern.fullmatch(line)}


def test_every_command_is_explained_with_an_example_and_used_by_a_story() -> None:
    every = {method for _, method in COMMANDS}
    examples = re.findall(r"`([^`]+)`", (FOLDER / "README.md").read_text())
    assert commands_of("\n".join(examples)) == every
    assert commands_of("\n".join(script.read_text() for script in SCRIPTS)) == every


def test_a_mistyped_command_is_an_error_and_not_a_silent_line() -> None:
    with pytest.raises(ScriptError, match="no such command: 'deliver everything'"):
        Scenario().run("deliver everything")
