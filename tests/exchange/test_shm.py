"""Shared memory: who may sit in a segment, what is left behind, and why a reader never gets a mixed row."""

import os
import stat
import threading
import time
from pathlib import Path

import pytest

from wavekeeper.worker_agent.errors import ExchangeBrokenError, ExchangeTimeoutError, ExchangeUnavailableError
from wavekeeper.worker_agent.exchange import Exchange, shm
from wavekeeper.worker_agent.exchange.segment import FOLDER, segment_prefix
from wavekeeper.worker_agent.exchange.shm import NUMBERS, ShmExchange

from .conftest import Fleet, together, until

LONG_MS = 30_000


def row(rank: int) -> bytes:
    return bytes([rank]) * 64


def gather_all(exchanges: list[Exchange]) -> None:
    dp_size = len(exchanges)
    got = together(lambda rank: exchanges[rank].gather(row(rank), timeout_ms=LONG_MS), range(dp_size))
    assert got == [b"".join(map(row, range(dp_size)))] * dp_size


def connect_in_background(fleet: Fleet, rank: int, dp_size: int) -> list[Exchange | Exception]:
    """Begin to connect one rank; the list gets one entry when it is done."""
    done: list[Exchange | Exception] = []
    threading.Thread(
        target=lambda: done.extend(together(lambda rank: fleet.connect(fleet.spec(rank, dp_size)), [rank])), daemon=True
    ).start()
    until(lambda: _owner(fleet, rank) != 0, f"rank {rank} to sit down")
    return done


def _owner(fleet: Fleet, rank: int) -> int:
    """The pid in a rank's area of the only segment; 0 when there is none."""
    for path in fleet.segments():
        return int.from_bytes(path.read_bytes()[64 + rank * 384 + 8 :][:8], "little")
    return 0


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_the_count_may_pass_the_end_of_its_32_bits(shm_fleet: Fleet) -> None:
    exchanges = shm_fleet.form(3)
    for exchange in exchanges:
        assert isinstance(exchange, ShmExchange)
        exchange._count = NUMBERS - 3
    for _ in range(6):
        gather_all(exchanges)


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_no_wake_up_is_lost_when_every_wait_sleeps(shm_fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without spinning and with slices that are longer than the deadline, one lost wake-up would be a time-out."""
    monkeypatch.setattr(shm, "_SLICE_NS", 3_600_000_000_000)
    exchanges = shm_fleet.form(3)
    for exchange in exchanges:
        assert isinstance(exchange, ShmExchange)
        exchange._channel.spin_most_ns = 0

    def run(rank: int) -> int:
        for _ in range(3_000):
            exchanges[rank].gather(row(rank), timeout_ms=LONG_MS)
        return 3_000

    assert together(run, range(3)) == [3_000] * 3


def test_a_waiting_rank_uses_no_processor(shm_fleet: Fleet) -> None:
    exchange = shm_fleet.form(2)[0]
    began_s = time.thread_time()
    with pytest.raises(ExchangeTimeoutError):
        exchange.gather(row(0), timeout_ms=1_000)
    assert time.thread_time() - began_s < 0.2


def test_a_rank_that_leaves_is_named_at_once(shm_fleet: Fleet) -> None:
    exchanges = shm_fleet.form(3)
    exchanges[1].close()
    errors = together(lambda rank: exchanges[rank].gather(row(rank), timeout_ms=LONG_MS), [0, 2])
    assert [isinstance(error, ExchangeBrokenError) and error.lost for error in errors] == [(1,)] * 2


def test_a_rank_that_leaves_is_named_also_while_a_slow_one_is_waited_for(shm_fleet: Fleet) -> None:
    exchanges = shm_fleet.form(4)
    exchanges[3].close()
    errors = together(lambda rank: exchanges[rank].gather(row(rank), timeout_ms=LONG_MS), [0, 2])
    assert [isinstance(error, ExchangeBrokenError) and error.lost for error in errors] == [(3,)] * 2


def test_a_rank_that_leaves_after_its_row_is_not_missed_in_that_exchange(shm_fleet: Fleet) -> None:
    exchanges = shm_fleet.form(2)

    def first(_: int) -> bytes:
        rows = exchanges[0].gather(row(0), timeout_ms=LONG_MS)
        exchanges[0].close()
        return rows

    got = together(lambda rank: first(rank) if rank == 0 else exchanges[1].gather(row(1), timeout_ms=LONG_MS), range(2))
    assert got == [row(0) + row(1)] * 2


# --- what is left behind ---------------------------------------------------------------------------------------------


def test_a_segment_is_named_after_its_group_and_closed_to_other_users(shm_fleet: Fleet) -> None:
    done = connect_in_background(shm_fleet, 0, 2)
    (path,) = shm_fleet.segments()
    assert path.name == f"wavekeeper.{os.geteuid()}.{shm_fleet.deployment}.1.g1.step"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    together(lambda rank: shm_fleet.connect(shm_fleet.spec(rank, 2)), [1])
    until(lambda: len(done) == 1, "rank 0")


def test_a_formed_group_has_no_name_any_more(shm_fleet: Fleet) -> None:
    gather_all(shm_fleet.form(2))
    assert shm_fleet.segments() == []


def test_a_group_that_did_not_come_together_leaves_nothing(shm_fleet: Fleet) -> None:
    errors = together(lambda rank: shm_fleet.connect(shm_fleet.spec(rank, 3), timeout_ms=200), [0, 1])
    assert [type(error) for error in errors] == [ExchangeTimeoutError] * 2
    assert shm_fleet.segments() == []


def test_nothing_is_left_after_all_ranks_of_a_formed_group_were_killed(shm_fleet: Fleet) -> None:
    children = [shm_fleet.process(rank, 2) for rank in range(2)]
    assert [child.say() for child in children] == ["connected"] * 2
    for child in children:
        child.close()
    assert shm_fleet.segments() == []


def test_a_segment_that_a_crash_left_is_cleaned_and_used(shm_fleet: Fleet) -> None:
    child = shm_fleet.process(0, 2)
    until(lambda: _owner(shm_fleet, 0) != 0, "the child to sit down")
    child.close()
    assert len(shm_fleet.segments()) == 1
    gather_all(shm_fleet.form(2))
    assert shm_fleet.segments() == []


def test_segments_of_other_groups_are_reclaimed_if_stale_and_left_alone_if_not(shm_fleet: Fleet) -> None:
    stale, live = shm_fleet.process(0, 2, group="stale"), shm_fleet.process(0, 2, group="live")
    until(lambda: len(shm_fleet.segments()) == 2, "both segments")
    until(lambda: all(path.stat().st_size for path in shm_fleet.segments()), "both to be made")
    stale.close()
    gather_all(shm_fleet.form(2))
    assert [path.name.split(".")[-2] for path in shm_fleet.segments()] == ["live"]
    assert live.process.poll() is None


def test_a_file_of_garbage_in_a_segments_place_is_cleaned(shm_fleet: Fleet) -> None:
    path = Path(FOLDER) / f"{segment_prefix(shm_fleet.deployment)}1.g1.step"
    path.write_bytes(os.urandom(5_000))
    gather_all(shm_fleet.form(2))


def test_a_link_in_a_segments_place_is_not_followed(shm_fleet: Fleet, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    path = Path(FOLDER) / f"{segment_prefix(shm_fleet.deployment)}1.g1.step"
    path.symlink_to(target)
    with pytest.raises(ExchangeUnavailableError, match="cannot open"):
        shm_fleet.connect(shm_fleet.spec(0, 2), timeout_ms=200)
    assert target.read_bytes() == b"precious"


# --- who may sit where -----------------------------------------------------------------------------------------------


def test_the_second_process_of_a_rank_is_refused_by_name(shm_fleet: Fleet) -> None:
    child = shm_fleet.process(1, 2)
    until(lambda: _owner(shm_fleet, 1) != 0, "the child to sit down")
    with pytest.raises(ExchangeUnavailableError, match=rf"rank 1 .* taken by process {child.process.pid} "):
        shm_fleet.connect(shm_fleet.spec(1, 2))
    shm_fleet.connect(shm_fleet.spec(0, 2))
    assert child.say() == "connected"


def test_ranks_that_disagree_on_the_size_of_the_group_are_refused(shm_fleet: Fleet) -> None:
    done = connect_in_background(shm_fleet, 0, 2)
    with pytest.raises(ExchangeUnavailableError, match=r"dp_size 2.* expects .*dp_size 3"):
        shm_fleet.connect(shm_fleet.spec(1, 3))
    shm_fleet.connect(shm_fleet.spec(1, 2))
    until(lambda: len(done) == 1, "rank 0")


def test_a_rank_that_dies_while_the_group_meets_is_replaced_by_its_next_process(shm_fleet: Fleet) -> None:
    dead = shm_fleet.process(0, 3)
    until(lambda: _owner(shm_fleet, 0) != 0, "the first rank 0 to sit down")
    waiting = connect_in_background(shm_fleet, 1, 3)
    dead.close()
    others = together(lambda rank: shm_fleet.connect(shm_fleet.spec(rank, 3)), [0, 2])
    until(lambda: len(waiting) == 1, "rank 1")
    exchanges = [others[0], waiting[0], others[1]]
    gather_all([exchange for exchange in exchanges if not isinstance(exchange, Exception)])


def test_ranks_that_arrive_all_at_once_meet_every_time(shm_fleet: Fleet) -> None:
    """The races of making, cleaning and locking: eight ranks at the same moment, with what a crash has left."""
    for number in range(20):
        name = f"{segment_prefix(shm_fleet.deployment)}1.g{number}.step"
        (Path(FOLDER) / name).write_bytes(bytes(number))
        exchanges = shm_fleet.form(8, group=f"g{number}")
        gather_all(exchanges)
        for exchange in exchanges:
            exchange.close()
    assert shm_fleet.segments() == []


def test_too_little_shared_memory_is_said_before_it_kills(shm_fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ExchangeUnavailableError, match=r"No space left on device; enlarge /dev/shm"):
        shm_fleet.connect(shm_fleet.spec(0, 2), timeout_ms=200)
    assert shm_fleet.segments() == []
