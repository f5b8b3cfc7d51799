"""The term of a coordinator that leads alone: a number that grows with every start.

With a state file it is one more than the last one, or the clock's if that is higher, so that a lost file does no
harm; without a file it is the clock's. Agents refuse lower terms, and tell us when they have seen a higher one, so
even a clock that went back heals itself.
"""

import os
import time
from pathlib import Path

import msgspec


class TermError(Exception):
    """The state file cannot be read or written; the text says what to do."""


class State(msgspec.Struct, frozen=True):
    """What is kept over restarts."""

    term: int


def begin_term(state_file: str) -> int:
    """Return the term of this start, written down before it is used.

    Raises:
        TermError: The file holds something else, or cannot be written.
    """
    clock_term = time.time_ns() // 1_000_000
    if not state_file:
        return clock_term
    path = Path(state_file)
    try:
        last_term = msgspec.json.decode(path.read_bytes(), type=State).term if path.exists() else 0
    except (OSError, msgspec.DecodeError) as error:
        raise TermError(f"state_file {path}: {error}; repair it, or remove it to begin anew by the clock") from None
    term = max(last_term + 1, clock_term)
    keep_term(state_file, term)
    return term


def keep_term(state_file: str, term: int) -> None:
    """Write the term so that either the old or the new file survives a crash.

    Raises:
        TermError: It cannot be written.
    """
    if not state_file:
        return
    path = Path(state_file)
    fresh = path.with_name(path.name + ".new")
    try:
        with open(fresh, "wb") as file:
            file.write(msgspec.json.encode(State(term)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        raise TermError(f"state_file {path} cannot be written: {error.strerror}; choose another folder") from None
