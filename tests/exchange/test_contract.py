"""What every exchange promises, tried on each of them. Ranks are threads here; those that must die are processes."""

import random
import struct
import threading
import time
from typing import Any

import pytest

from wavekeeper.proto.errors import LocalProtocolError
from wavekeeper.worker_agent.errors import (
    ExchangeBrokenError,
    ExchangeInterruptedError,
    ExchangeTimeoutError,
    ExchangeUnavailableError,
)
from wavekeeper.worker_agent.exchange import Exchange, GroupSpec, make_exchange

from .conftest import FORM_MS, Fleet, together

WORDS = struct.Struct("<16i")
LONG_MS = 30_000


def row(rank: int, count: int = 0) -> bytes:
    """Sixteen values of which no two rows, ranks or counts share one."""
    return WORDS.pack(*(count * 10_000 + rank * 100 + column for column in range(16)))


def all_rows(dp_size: int, count: int = 0) -> bytes:
    return b"".join(row(rank, count) for rank in range(dp_size))


def gather_all(exchanges: list[Exchange], count: int = 0) -> list[bytes | Exception]:
    return together(lambda rank: exchanges[rank].gather(row(rank, count), timeout_ms=LONG_MS), range(len(exchanges)))


@pytest.mark.parametrize("dp_size", [1, 2, 3, 8])
def test_every_rank_gets_every_row_in_the_order_of_ranks(fleet: Fleet, dp_size: int) -> None:
    exchanges = fleet.form(dp_size)
    for count in range(3):
        assert gather_all(exchanges, count) == [all_rows(dp_size, count)] * dp_size


def test_a_group_of_one_has_no_segment_and_no_process_group(fleet: Fleet) -> None:
    (exchange,) = fleet.form(1)
    assert exchange.gather(row(0), timeout_ms=1) == row(0)
    assert (exchange.name, exchange.process_groups, fleet.segments()) == (fleet.backend, 0, [])


def test_an_exchange_counts_its_process_groups(fleet: Fleet) -> None:
    assert [exchange.process_groups for exchange in fleet.form(2)] == [int(fleet.backend == "gloo")] * 2


WRONG: dict[str, tuple[Any, type[Exception]]] = {
    "63 bytes": (bytes(63), LocalProtocolError),
    "65 bytes": (bytes(65), LocalProtocolError),
    "no bytes": (b"", LocalProtocolError),
    "two rows": (bytes(128), LocalProtocolError),
    "a bytearray of 63": (bytearray(63), TypeError),
    "a bytearray of 64": (bytearray(64), TypeError),
    "a memoryview": (memoryview(bytes(64)), TypeError),
    "text": ("x" * 64, TypeError),
    "a float": (1.5, TypeError),
    "a bool": (True, TypeError),
    "a list of 64": ([0] * 64, TypeError),
    "nothing": (None, TypeError),
}


def test_a_wrong_row_is_refused_before_anybody_else_is_touched(fleet: Fleet) -> None:
    exchanges = fleet.form(2)
    for what, (wrong, error) in WRONG.items():
        with pytest.raises(error):
            exchanges[0].gather(wrong, timeout_ms=LONG_MS)
        assert gather_all(exchanges) == [all_rows(2)] * 2, f"after {what}"


def test_the_two_halves_of_an_exchange_give_what_the_whole_gives(fleet: Fleet) -> None:
    """Rank 0 takes it in halves, with work of its own between; the others need not know."""
    exchanges = fleet.form(3)

    def one(rank: int) -> bytes:
        if rank:
            return exchanges[rank].gather(row(rank), timeout_ms=LONG_MS)
        exchanges[0].begin(row(0), timeout_ms=LONG_MS)
        sum(range(10_000))
        return exchanges[0].end()

    for _ in range(3):
        assert together(one, range(3)) == [all_rows(3)] * 3


def test_halves_come_in_pairs_and_a_mistake_touches_nobody(fleet: Fleet) -> None:
    exchanges = fleet.form(2)
    with pytest.raises(LocalProtocolError, match="was begun"):
        exchanges[0].end()

    def twice(rank: int) -> bytes:
        exchanges[rank].begin(row(rank), timeout_ms=LONG_MS)
        with pytest.raises(LocalProtocolError, match="begun and not ended"):
            exchanges[rank].begin(row(rank), timeout_ms=LONG_MS)
        return exchanges[rank].end()

    assert together(twice, range(2)) == [all_rows(2)] * 2
    assert gather_all(exchanges) == [all_rows(2)] * 2


def test_an_exchange_that_is_closed_between_its_halves_is_over_and_hangs_nobody(fleet: Fleet) -> None:
    exchanges = fleet.form(2)
    exchanges[0].begin(row(0), timeout_ms=LONG_MS)
    exchanges[0].close()
    with pytest.raises(ExchangeInterruptedError):
        exchanges[0].end()


def test_two_thousand_exchanges_with_random_delays_stay_in_step(fleet: Fleet) -> None:
    dp_size = 3
    exchanges = fleet.form(dp_size)

    def run(rank: int) -> int:
        chance = random.Random(rank)
        for count in range(2_000):
            if chance.random() < 0.02:  # lets the others run ahead as far as the exchange allows
                time.sleep(chance.random() * 0.002)
            assert exchanges[rank].gather(row(rank, count), timeout_ms=LONG_MS) == all_rows(dp_size, count)
        return 2_000

    assert together(run, range(dp_size)) == [2_000] * dp_size


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_every_waiting_rank_names_the_missing_rank_at_its_deadline(fleet: Fleet, missing: int) -> None:
    exchanges = fleet.form(4)
    waiting = [rank for rank in range(4) if rank != missing]
    began = time.monotonic()
    errors = together(lambda rank: exchanges[rank].gather(row(rank), timeout_ms=800), waiting)
    for error in errors:
        assert isinstance(error, ExchangeTimeoutError)
        assert (error.missing, error.timeout_ms) == ((missing,), 800)
    assert time.monotonic() - began < 10


def test_all_missing_ranks_are_named(fleet: Fleet) -> None:
    exchanges = fleet.form(4)
    errors = together(lambda rank: exchanges[rank].gather(row(rank), timeout_ms=800), [0, 2])
    assert [getattr(error, "missing", error) for error in errors] == [(1, 3)] * 2


def test_a_group_that_has_failed_is_over_and_still_says_who_it_was(fleet: Fleet) -> None:
    exchanges = fleet.form(2)
    with pytest.raises(ExchangeTimeoutError):
        exchanges[0].gather(row(0), timeout_ms=200)
    with pytest.raises(ExchangeBrokenError) as failure:
        exchanges[0].gather(row(0), timeout_ms=LONG_MS)
    assert failure.value.lost == (1,)


def test_after_a_failure_the_same_processes_form_the_next_epoch(fleet: Fleet) -> None:
    old = fleet.form(3, group="g1", epoch=1)
    together(lambda rank: old[rank].gather(row(rank), timeout_ms=300), [0, 1])
    for exchange in old:
        exchange.close()
    new = fleet.form(3, group="g2", epoch=2)
    assert gather_all(new) == [all_rows(3)] * 3


@pytest.mark.parametrize("how", ["interrupt", "close"])
def test_a_waiting_rank_leaves_when_it_is_told_to(fleet: Fleet, how: str) -> None:
    exchange = fleet.form(2)[0]
    told = threading.Timer(0.2, getattr(exchange, how))
    told.start()
    began = time.monotonic()
    with pytest.raises(ExchangeInterruptedError):
        exchange.gather(row(0), timeout_ms=LONG_MS)
    assert time.monotonic() - began < 1.2
    with pytest.raises(ExchangeInterruptedError):
        exchange.gather(row(0), timeout_ms=LONG_MS)
    told.join()


def test_an_interrupt_before_the_gather_is_not_lost(fleet: Fleet) -> None:
    exchange = fleet.form(2)[0]
    exchange.interrupt()
    with pytest.raises(ExchangeInterruptedError):
        exchange.gather(row(0), timeout_ms=LONG_MS)


def test_a_gather_that_meets_a_close_is_interrupted_and_no_bug_of_the_caller(fleet: Fleet) -> None:
    exchange = fleet.form(2)[0]
    exchange.interrupt()
    with exchange._in_use, pytest.raises(ExchangeInterruptedError):  # type: ignore[attr-defined]  # as `close` holds it
        exchange.gather(row(0), timeout_ms=LONG_MS)


def test_closing_twice_is_closing_once(fleet: Fleet) -> None:
    for exchange in fleet.form(2):
        exchange.close()
        exchange.close()


def test_two_threads_in_one_exchange_are_refused_without_harm(fleet: Fleet) -> None:
    exchanges = fleet.form(2)
    entered = threading.Event()

    def first(_: int) -> bytes:
        entered.set()
        return exchanges[0].gather(row(0), timeout_ms=LONG_MS)

    def second(_: int) -> bytes:
        entered.wait()
        refused: Exception | None = None
        while refused is None:
            refused = _refusal(exchanges[0])
        assert isinstance(refused, LocalProtocolError)
        return exchanges[1].gather(row(1), timeout_ms=LONG_MS)

    got = together(lambda rank: (first, second)[rank](rank), range(2))
    assert got == [all_rows(2)] * 2


def _refusal(exchange: Exchange) -> Exception | None:
    """What a second thread meets while the first one is inside; None while it has not got there yet."""
    if not exchange._in_use.locked():  # type: ignore[attr-defined]
        return None
    try:
        exchange.gather(row(0), timeout_ms=LONG_MS)
    except LocalProtocolError as error:
        return error
    raise AssertionError("two threads were let in")


def test_a_killed_rank_is_named_by_all_and_they_leave_before_their_deadline(fleet: Fleet) -> None:
    """Five ranks: in a ring only two of the survivors have a connection to the dead one."""
    alive = [0, 1, 3, 4]
    victim = fleet.process(2, 5)
    made = together(lambda rank: fleet.connect(fleet.spec(rank, 5)), alive)
    survivors = {
        rank: exchange for rank, exchange in zip(alive, made, strict=True) if not isinstance(exchange, Exception)
    }
    assert victim.say() == "connected", made
    victim.gather(LONG_MS)
    got = together(lambda rank: survivors[rank].gather(bytes([rank]) * 64, timeout_ms=LONG_MS), alive)
    assert [rows[::64] for rows in got if isinstance(rows, bytes)] == [b"\0\1\2\3\4"] * 4
    assert victim.say() == "0001020304"

    killer = threading.Timer(0.2, victim.kill)
    killer.start()
    began = time.monotonic()
    errors = together(lambda rank: survivors[rank].gather(row(rank), timeout_ms=LONG_MS), alive)
    for error in errors:
        assert isinstance(error, ExchangeBrokenError), error
        assert error.lost == (2,)
    assert time.monotonic() - began < LONG_MS / 1000 / 2
    killer.join()


def test_ranks_that_do_not_come_are_named(fleet: Fleet) -> None:
    errors = together(lambda rank: fleet.connect(fleet.spec(rank, 4), timeout_ms=700), [0, 2])
    assert [getattr(error, "missing", error) for error in errors] == [(1, 3)] * 2


def test_a_missing_rank_0_is_named(fleet: Fleet) -> None:
    errors = together(lambda rank: fleet.connect(fleet.spec(rank, 3), timeout_ms=700), [1, 2])
    assert [getattr(error, "missing", error) for error in errors] == [(0,)] * 2


def test_groups_that_differ_in_token_epoch_or_channel_do_not_meet(fleet: Fleet) -> None:
    groups = [("a", 1, "step"), ("b", 1, "step"), ("a", 2, "step"), ("a", 1, "draft")]
    seats = [exchange for group in groups for exchange in fleet.form(2, *group)]
    got = together(lambda seat: seats[seat].gather(row(seat % 2, seat // 2), timeout_ms=LONG_MS), range(8))
    assert got == [all_rows(2, seat // 2) for seat in range(8)]


def test_groups_formed_one_after_another_leave_nothing(fleet: Fleet) -> None:
    for number in range(10):
        for exchange in fleet.form(2, group=f"g{number}"):
            exchange.close()
    assert fleet.segments() == []


def test_an_unknown_exchange_is_refused_by_name() -> None:
    with pytest.raises(ExchangeUnavailableError, match="'carrier-pigeon'"):
        make_exchange(
            "carrier-pigeon",
            GroupSpec(deployment="d", epoch=1, group="g", rank=0, dp_size=2),
            timeout_ms=FORM_MS,
        )


@pytest.mark.parametrize(
    "wrong", [{"group": "a.b"}, {"group": "a/b"}, {"group": ""}, {"deployment": "../x"}, {"rank": 2}, {"rank": -1}]
)
def test_a_group_that_could_not_name_a_file_is_refused(wrong: dict[str, Any]) -> None:
    good: dict[str, Any] = {"deployment": "d", "epoch": 1, "group": "g", "rank": 0, "dp_size": 2}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GroupSpec(**(good | wrong))
