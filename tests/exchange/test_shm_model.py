"""The loads and stores of `_shm.c`, in every order that aarch64 allows: no mixed row, no lost wake-up.

A model, not the code: its comment says what is claimed, this says why it is so. A thread's stores wait in a buffer and
become visible to the others one by one, in any order, except that a release store comes after all earlier ones; a full
fence waits until the buffer is empty; a load that is not behind an acquire may have happened at any earlier time.
Taking away any of the three must be seen to break it, or the model would show nothing.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

# Where a thread is.
WORD, BELL, FENCE, SLEEPERS, LOOK, READ, JOIN, AGAIN, ASLEEP, LEAVE, DONE = range(11)


class Thread(NamedTuple):
    at: int = WORD
    number: int = 1
    word: int = 0
    peer: int = 0
    """Whom it looks at now."""
    early: tuple[int, int] | None = None
    """The peer's row as it was loaded before the doorbell, where nothing forbids that."""
    buffer: tuple[tuple[str, int, int, bool], ...] = ()
    """Stores that others do not see yet: where (rank's words are `w`, doorbells `b`), index, value, release."""


class State(NamedTuple):
    threads: tuple[Thread, ...]
    words: tuple[int, ...]
    """Slot 0 and 1 of each rank, two words each: enough for a row to be mixed."""
    bells: tuple[int, ...]
    sleepers: tuple[int, ...]


class Rules(NamedTuple):
    release: bool = True
    acquire: bool = True
    fence: bool = True
    exchanges: int = 3
    """Two slots, so the third row is stored over the first."""


def rung(bell: int, number: int) -> bool:
    return bell - number in (0, 1)


def word_at(rank: int, number: int, word: int) -> int:
    return rank * 4 + number % 2 * 2 + word


def put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def nexts(state: State, rules: Rules) -> Iterator[State]:
    for rank, thread in enumerate(state.threads):
        yield from flushed(state, rank)
        yield from moved(state, rank, thread, rules)


def flushed(state: State, rank: int) -> Iterator[State]:
    """One waiting store of this thread becomes visible."""
    thread = state.threads[rank]
    for place, (where, index, value, release) in enumerate(thread.buffer):
        if release and place:
            continue
        if any(other[:2] == (where, index) for other in thread.buffer[:place]):
            continue  # stores to one place stay in order
        after = thread._replace(buffer=thread.buffer[:place] + thread.buffer[place + 1 :])
        then = with_thread(state, rank, after)
        if where == "w":
            yield then._replace(words=put(state.words, index, value))
        else:
            yield then._replace(bells=put(state.bells, index, value))


def with_thread(state: State, rank: int, thread: Thread) -> State:
    return state._replace(threads=(*state.threads[:rank], thread, *state.threads[rank + 1 :]))


def moved(state: State, rank: int, thread: Thread, rules: Rules) -> Iterator[State]:
    """The next thing that this thread does."""

    def to(**changes: object) -> State:
        return with_thread(state, rank, thread._replace(**changes))  # type: ignore[arg-type]

    peers = [other for other in range(len(state.threads)) if other != rank]
    number, peer = thread.number, peers[thread.peer] if thread.peer < len(peers) else -1
    match thread.at:
        case 0:  # WORD: half of the row
            store = ("w", word_at(rank, number, thread.word), number, False)
            after = to(buffer=(*thread.buffer, store), word=thread.word + 1)
            yield after if thread.word == 0 else with_thread(after, rank, after.threads[rank]._replace(at=BELL, word=0))
        case 1:  # BELL
            yield to(buffer=(*thread.buffer, ("b", rank, number, rules.release)), at=FENCE)
        case 2:  # FENCE
            if not rules.fence or not thread.buffer:
                yield to(at=SLEEPERS)
        case 3:  # SLEEPERS: wake them, if there are any
            woken = state if not state.sleepers[rank] else wake(state, rank)
            yield with_thread(woken, rank, thread._replace(at=LOOK, peer=0))
        case 4:  # LOOK
            if peer < 0:
                yield to(at=WORD, number=number + 1) if number < rules.exchanges else to(at=DONE)
                return
            row = (state.words[word_at(peer, number, 0)], state.words[word_at(peer, number, 1)])
            if not rules.acquire and thread.early is None:
                yield to(early=row)
            if rung(state.bells[peer], number):
                yield to(at=READ)
            else:
                yield to(at=JOIN, early=thread.early)
        case 5:  # READ
            row = thread.early or (state.words[word_at(peer, number, 0)], state.words[word_at(peer, number, 1)])
            assert row == (number, number), f"rank {rank} took {row} for row {number} of rank {peer}"
            yield to(at=LOOK, peer=thread.peer + 1, early=None)
        case 6:  # JOIN the sleepers: a locked addition, with a full fence behind it
            if not thread.buffer or not rules.fence:
                joined = put(state.sleepers, peer, state.sleepers[peer] + 1)
                yield with_thread(state._replace(sleepers=joined), rank, thread._replace(at=AGAIN))
        case 7:  # AGAIN: look once more, and sleep if the kernel finds the doorbell as it was
            yield to(at=LEAVE if rung(state.bells[peer], number) else ASLEEP)
        case 8:  # ASLEEP: nobody moves but by being woken
            pass
        case 9:  # LEAVE the sleepers
            left = put(state.sleepers, peer, state.sleepers[peer] - 1)
            yield with_thread(state._replace(sleepers=left), rank, thread._replace(at=LOOK))
        case _:
            pass


def wake(state: State, rank: int) -> State:
    """Everybody who sleeps on this rank's doorbell goes on."""
    for other, thread in enumerate(state.threads):
        peers = [each for each in range(len(state.threads)) if each != other]
        if thread.at == ASLEEP and peers[thread.peer] == rank:
            state = with_thread(state, other, thread._replace(at=LEAVE))
    return state


def explore(ranks: int, rules: Rules) -> int:
    """Visit all states; return how many there are.

    Raises:
        AssertionError: A mixed row, or a state in which nobody can move although not all are done.
    """
    start = State((Thread(),) * ranks, (0,) * 4 * ranks, (0,) * ranks, (0,) * ranks)
    seen, queue = {start}, [start]
    while queue:
        state = queue.pop()
        following = list(nexts(state, rules))
        asleep = [rank for rank, thread in enumerate(state.threads) if thread.at == ASLEEP]
        assert following or not asleep, f"rank {asleep} sleeps for ever: {state}"
        for each in following:
            if each not in seen:
                seen.add(each)
                queue.append(each)
    return len(seen)


def test_no_order_of_loads_and_stores_mixes_a_row_or_loses_a_wake_up() -> None:
    assert explore(2, Rules(exchanges=5)) > 1_000
    assert explore(3, Rules(exchanges=2)) > 30_000


@pytest.mark.parametrize("missing, seen_by", [("release", "took"), ("acquire", "took"), ("fence", "sleeps for ever")])
def test_each_of_the_three_is_needed(missing: str, seen_by: str) -> None:
    with pytest.raises(AssertionError, match=seen_by):
        explore(2, Rules(**{missing: False}))
