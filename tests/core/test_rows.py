"""Rows: what was written is what is read, and whatever is not is an error that names its owner."""

import pickle
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavekeeper.proto.errors import HeaderMismatchError, LocalProtocolError, RowInvalidError
from wavekeeper.proto.rows import (
    DUMMY,
    INT32_MAX,
    ROW_BYTES,
    UINT16_MAX,
    GraphMode,
    Operation,
    Position,
    Row,
    pack,
    unpack,
)

HERE = Position(Operation.STEP, 2, 7, 40)
COUNT = st.integers(0, INT32_MAX)
INT32 = st.integers(-INT32_MAX - 1, INT32_MAX)


@st.composite
def written(draw: st.DrawFn) -> Row:
    """Any legal row."""
    tokens = draw(COUNT)
    dummy = draw(st.booleans())
    return Row(
        num_tokens=0 if dummy else tokens,
        num_tokens_padded=draw(st.just(0) | st.integers(tokens, INT32_MAX)),
        num_reqs=draw(COUNT),
        uniform_token_count=draw(st.none() | COUNT),
        max_query_len=draw(COUNT),
        num_tokens_for_logprob=draw(COUNT),
        forward_mode=draw(st.integers(0, UINT16_MAX)),
        substeps=draw(st.integers(0, UINT16_MAX)),
        graph_mode=draw(st.sampled_from(GraphMode)),
        has_work=draw(st.booleans()),
        has_prefill=draw(st.booleans()),
        can_run_graph=draw(st.booleans()),
        wants_microbatch=draw(st.booleans()),
        hold_requested=draw(st.booleans()),
        local_error=draw(st.booleans()),
        dummy=dummy,
        can_forward=draw(st.booleans()),
        engine=(draw(INT32), draw(INT32)),
    )


POSITIONS = st.builds(Position, st.sampled_from(Operation), COUNT, COUNT, COUNT, st.integers(0, UINT16_MAX))


def gather(*rows: Row, position: Position = HERE) -> list[bytes]:
    """The bytes of every rank's row."""
    return [pack(row, position, rank) for rank, row in enumerate(rows)]


def read(data: list[bytes], rank: int = 0, mine: bytes | None = None) -> tuple[Row, ...]:
    """What one rank reads of them."""
    return tuple(unpack(b"".join(data), len(data), data[rank] if mine is None else mine, rank))


# --- there and back --------------------------------------------------------------------------------------------------


@given(st.lists(written(), min_size=1, max_size=4), POSITIONS)
def test_every_rank_reads_what_every_rank_wrote(rows: list[Row], position: Position) -> None:
    data = gather(*rows, position=position)
    assert all(len(row) == ROW_BYTES for row in data)
    for rank in range(len(rows)):
        assert read(data, rank) == tuple(rows)


@pytest.mark.parametrize("dp_size", [1, 2, 3, 8, 300])
def test_rows_come_back_as_one_row_for_each_rank_in_the_order_of_ranks(dp_size: int) -> None:
    """Case B16, vllm-ascend PR 1593: result[r] is rank r's, never a flat or interleaved vector."""
    rows = tuple(
        Row(num_tokens=rank * 100 + 1, num_reqs=rank * 100 + 2, engine=(rank, -rank)) for rank in range(dp_size)
    )
    assert read(gather(*rows), dp_size - 1) == rows


LIMITS = {
    "num_tokens": INT32_MAX,
    "num_tokens_padded": INT32_MAX,
    "num_reqs": INT32_MAX,
    "uniform_token_count": INT32_MAX,
    "max_query_len": INT32_MAX,
    "num_tokens_for_logprob": INT32_MAX,
    "forward_mode": UINT16_MAX,
    "substeps": UINT16_MAX,
}


@pytest.mark.parametrize("field, most", LIMITS.items())
def test_the_limits_of_every_field_are_carried_and_one_beyond_is_our_own_error(field: str, most: int) -> None:
    """Case B16: the wrong type or range is an error before the exchange begins, and names the field."""
    for value in (0, 1, most):
        (row,) = read(gather(changed(field, value)))
        assert getattr(row, field) == value
    for wrong in (most + 1, -1, 1.5, "1", [1], 1 << 70):
        with pytest.raises(LocalProtocolError, match=field):
            pack(changed(field, wrong), HERE, 0)


def changed(field: str, value: object) -> Row:
    """A row with one field, of whatever type: engines are written in Python as well."""
    fields: dict[str, Any] = {field: value}
    return Row(**fields)


WRONG: dict[str, dict[str, Any]] = {
    "a boolean for a count": {"num_tokens": True},
    "none for a count": {"num_reqs": None},
    "padding that takes away": {"num_tokens": 5, "num_tokens_padded": 4},
    "an engine word above int32": {"engine": (0, 1 << 31)},
    "an engine word missing": {"engine": (0,)},
    "a graph mode in words": {"graph_mode": "full"},
}


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
def test_what_is_not_allowed_in_a_row_is_refused_where_it_is_written(fields: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError, match="row field"):
        pack(Row(**fields), HERE, 0)


# --- the sentinel ----------------------------------------------------------------------------------------------------


def test_the_sentinel_of_a_dummy_never_leaves_the_row() -> None:
    """DESIGN.md section 6: it says dummy, and its count is zero."""
    data = pack(DUMMY, HERE, 0)
    assert data[20:24] == b"\xff\xff\xff\xff"
    (row,) = unpack(data, 1, data, 0)
    assert row == DUMMY and row.num_tokens == 0


def test_a_dummy_has_no_tokens_whatever_its_row_says() -> None:
    (row,) = read(gather(Row(num_tokens=9, dummy=True)))
    assert (row.dummy, row.num_tokens) == (True, 0)


# --- damage ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2), st.integers(0, ROW_BYTES * 8 - 1))
def test_a_flipped_bit_is_found_before_any_value_is_used_and_its_owner_is_named(owner: int, bit: int) -> None:
    """Case B15, vllm-ascend PR 10046."""
    data = gather(Row(num_tokens=7, has_work=True), DUMMY, Row(num_tokens=3))
    mine = data[1]
    damaged = bytearray(data[owner])
    damaged[bit // 8] ^= 1 << bit % 8
    data[owner] = bytes(damaged)
    with pytest.raises(RowInvalidError) as caught:
        read(data, rank=1, mine=mine)
    assert (caught.value.seen_by, caught.value.owner) == (1, owner)
    assert f"rank 1 sees an invalid row of rank {owner}" in str(caught.value)


def test_one_rank_s_row_in_another_s_place_is_found() -> None:
    """Case B15: the transport returns rank 2's row twice."""
    data = gather(*(Row(num_tokens=count) for count in (1, 2, 3, 4)))
    data[3] = data[2]
    with pytest.raises(RowInvalidError) as caught:
        read(data)
    assert (caught.value.owner, caught.value.field, caught.value.found) == (3, "owner", "rank 2")


def test_rows_that_changed_places_are_found_on_every_rank() -> None:
    data = gather(Row(num_tokens=1), Row(num_tokens=2), Row(num_tokens=3))
    swapped = [data[1], data[0], data[2]]
    for rank in range(3):
        with pytest.raises(RowInvalidError, match="owner is rank 1"):
            read(swapped, rank, mine=data[rank])


def test_an_own_row_that_comes_back_changed_is_a_fault_of_the_transport() -> None:
    """Case B15: even a row that is valid in itself."""
    data = gather(Row(num_tokens=1), Row(num_tokens=2))
    with pytest.raises(RowInvalidError, match="own row is not what was written"):
        read(data, 1, mine=pack(Row(num_tokens=9), HERE, 1))


@pytest.mark.parametrize("length", [0, 63, 64, 127, 129, 192])
def test_a_result_of_the_wrong_size_is_refused(length: int) -> None:
    """Case B16."""
    data = (pack(DUMMY, HERE, 0) * 4)[:length]
    with pytest.raises(RowInvalidError, match="length of the gathered rows"):
        unpack(data, 2, pack(DUMMY, HERE, 0), 0)


# --- positions -------------------------------------------------------------------------------------------------------

ELSEWHERE = {
    "a stale step (a buffer that was used again)": (HERE._replace(step=39), "step epoch 2 wave 7 step 39"),
    "another wave": (HERE._replace(wave=8, step=1), "step epoch 2 wave 8 step 1"),
    "another epoch": (HERE._replace(epoch=1), "step epoch 1 wave 7 step 40"),
    "another operation": (Position(Operation.PREFLIGHT, 2, 7, 40), "preflight epoch 2 wave 7 step 40"),
    "a sub-step": (Position(Operation.SUBSTEP, 2, 7, 40, 2), "substep epoch 2 wave 7 step 40.2"),
}


@pytest.mark.parametrize("position, text", ELSEWHERE.values(), ids=ELSEWHERE)
def test_ranks_at_different_exchanges_are_told_every_rank_s_position(position: Position, text: str) -> None:
    """Cases B08 (found at the very step, with both numbers), B15 (a reused buffer) and B11 (`40.2`)."""
    rows = [pack(DUMMY, HERE, 0), pack(Row(num_tokens=1), position, 1)]
    for rank in (0, 1):
        with pytest.raises(HeaderMismatchError) as caught:
            unpack(b"".join(rows), 2, rows[rank], rank)
        assert caught.value.positions == ("step epoch 2 wave 7 step 40", text)
        assert f"rank 1 at {text}" in str(caught.value)


def test_a_row_of_another_layout_is_named_as_such() -> None:
    """Two versions of this library in one group must not read each other's words."""
    body = bytearray(pack(DUMMY, HERE, 1)[:60])
    body[0] = 9
    foreign = bytes(body) + struct.pack("<I", zlib.crc32(bytes(body)))
    mine = pack(DUMMY, HERE, 0)
    with pytest.raises(HeaderMismatchError, match="rank 1 at row layout 9"):
        unpack(mine + foreign, 2, mine, 0)


FOREIGN: dict[str, tuple[int, int]] = {
    "a graph mode that does not exist": (16, 1 << 8),
    "a count below zero": (28, 1 << 31),
    "tokens in the row of a dummy": (20, 1 << 31),
}


@pytest.mark.parametrize("word_at, change", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_writer_s_row_with_a_right_checksum_and_wrong_values_is_refused(word_at: int, change: int) -> None:
    """Case B15: plausibility comes after the checksum."""
    body = bytearray(pack(DUMMY, HERE, 1)[:60])
    (word,) = struct.unpack_from("<I", body, word_at)
    struct.pack_into("<I", body, word_at, word ^ change)
    foreign = bytes(body) + struct.pack("<I", zlib.crc32(bytes(body)))
    mine = pack(DUMMY, HERE, 0)
    with pytest.raises(RowInvalidError) as caught:
        unpack(mine + foreign, 2, mine, 0)
    assert (caught.value.owner, caught.value.field) == (1, "body")


@given(st.binary(min_size=128, max_size=128))
def test_noise_is_never_a_plan(data: bytes) -> None:
    mine = pack(DUMMY, HERE, 0)
    with pytest.raises(RowInvalidError):
        unpack(mine + data[64:], 2, mine, 0)


def test_errors_keep_their_facts_when_they_travel_between_processes() -> None:
    for error in (RowInvalidError(1, 3, "checksum", "0x0"), HeaderMismatchError(("a", "b"))):
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.reason) == (str(error), error.reason)
