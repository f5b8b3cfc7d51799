"""The row: what one rank contributes to one exchange, as 64 bytes.

Sixteen little-endian int32 words. The first five are the header, compared before any value is used; the last one is a
CRC-32 of the other fifteen, so that a damaged row is never taken for a plan.

    word  0      bits 0-7 layout version, 8-15 kind of operation, 16-31 sub-step
          1-3    epoch, wave, step
          4      bits 0-7 flags, 8-15 graph mode, 16-31 owner's rank
          5      num_tokens (-1 in the row of a dummy rank)
          6      num_tokens_padded
          7      num_reqs
          8      uniform_token_count (-1 = none)
          9      max_query_len
          10     num_tokens_for_logprob
          11     bits 0-15 forward mode, 16-31 sub-steps wished for
          12     further flags
          13-14  words that the engine defines
          15     CRC-32 of words 0-14

No field is derived from another one on the way: what a rank wrote is what the others read.
"""

import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec

from .errors import HeaderMismatchError, LocalProtocolError, RowInvalidError

ROW_BYTES = 64
ROW_LAYOUT = 1
SENTINEL_TOKENS = -1
"""What a dummy rank writes for num_tokens. It never leaves this file: `Row.dummy` says it from here on."""

INT32_MAX = (1 << 31) - 1
UINT16_MAX = (1 << 16) - 1

_PACK = struct.Struct("<15i")
_CRC = struct.Struct("<I")
_WORDS = struct.Struct("<15iI")


class GraphMode(IntEnum):
    """The best graph mode that a rank can run; the group runs the least of them."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


class Operation(IntEnum):
    """What an exchange is for; all ranks must mean the same."""

    PREFLIGHT = 0
    STEP = 1
    SUBSTEP = 2


class Position(NamedTuple):
    """Where an exchange stands; the same on all ranks or it is an error."""

    operation: Operation
    epoch: int
    wave: int
    step: int
    substep: int = 0

    def __str__(self) -> str:
        sub = f".{self.substep}" if self.substep else ""
        return f"{self.operation.name.lower()} epoch {self.epoch} wave {self.wave} step {self.step}{sub}"


class Row(msgspec.Struct, frozen=True):
    """What one rank contributes to a step. Counts are of this rank alone, padding excluded where not said.

    The defaults are those of a real batch that asks for nothing; `DUMMY` is the row of a rank without a batch.
    """

    num_tokens: int = 0
    num_tokens_padded: int = 0
    """Tokens after this rank's own padding for graphs; 0 means the same as `num_tokens`."""
    num_reqs: int = 0
    uniform_token_count: int | None = None
    """Tokens of each request, if all have the same."""
    max_query_len: int = 0
    num_tokens_for_logprob: int = 0
    forward_mode: int = 0
    """The engine's own number of the kind of pass; the plan tells whether the ranks agree on it."""
    substeps: int = 0
    """Further synchronised passes that this step needs (a draft model); all ranks run the most of them."""
    graph_mode: GraphMode = GraphMode.NONE
    has_work: bool = False
    """Holds unfinished requests, also when none of them is scheduled now. A wave ends when nobody does."""
    has_prefill: bool = False
    can_run_graph: bool = False
    wants_microbatch: bool = False
    hold_requested: bool = False
    local_error: bool = False
    """Something failed here before the pass: no rank runs it, and all raise the same error."""
    dummy: bool = False
    can_forward: bool = True
    """False: takes part in the exchange but may not run the model now (asleep, weights not mapped)."""
    engine: tuple[int, int] = (0, 0)

    @property
    def holds_work(self) -> bool:
        """Whether a wave may not end over this row: tokens are work, whether its owner says so or not."""
        return self.has_work or (self.num_tokens > 0 and not self.dummy)


DUMMY = Row(dummy=True, graph_mode=GraphMode.FULL, can_run_graph=True, wants_microbatch=True)
"""The row of a rank without a batch: it vetoes nothing and counts for nothing."""

_HAS_WORK, _HAS_PREFILL, _CAN_GRAPH, _WANTS_UB, _HOLD, _ERROR, _DUMMY, _CAN_FORWARD = (1 << i for i in range(8))


def pack(row: Row, position: Position, rank: int) -> bytes:
    """Return the 64 bytes of a row.

    Raises:
        LocalProtocolError: A value has the wrong type or range; the text names the field. Nothing was sent.
    """
    flags = (
        (_HAS_WORK if row.has_work else 0)
        | (_HAS_PREFILL if row.has_prefill else 0)
        | (_CAN_GRAPH if row.can_run_graph else 0)
        | (_WANTS_UB if row.wants_microbatch else 0)
        | (_HOLD if row.hold_requested else 0)
        | (_ERROR if row.local_error else 0)
        | (_DUMMY if row.dummy else 0)
        | (_CAN_FORWARD if row.can_forward else 0)
    )
    try:
        body = _PACK.pack(
            ROW_LAYOUT | position.operation << 8 | _signed16(position.substep) << 16,
            position.epoch,
            position.wave,
            position.step,
            flags | row.graph_mode << 8 | _signed16(rank) << 16,
            SENTINEL_TOKENS if row.dummy else row.num_tokens,
            row.num_tokens_padded,
            row.num_reqs,
            -1 if row.uniform_token_count is None else row.uniform_token_count,
            row.max_query_len,
            row.num_tokens_for_logprob,
            row.forward_mode | _signed16(row.substeps) << 16,
            0,
            row.engine[0],
            row.engine[1],
        )
    except (struct.error, TypeError, IndexError):
        body = None
    if body is None or not _plausible(row):
        raise LocalProtocolError(_what_is_wrong(row))
    return body + _CRC.pack(zlib.crc32(body))


def unpack(data: bytes, dp_size: int, mine: bytes, position: Position, rank: int) -> tuple[Row, ...]:
    """Return all rows of one exchange, row index == rank.

    Args:
        data: dp_size * 64 bytes, as gathered.
        dp_size: Ranks of the group.
        mine: The 64 bytes that this rank wrote.
        position: Where this rank stands.
        rank: This rank.

    Raises:
        RowInvalidError: A row is damaged, or stands in another rank's place, or our own came back changed.
        HeaderMismatchError: The ranks are not at the same exchange; every rank raises it.
    """
    if len(data) != dp_size * ROW_BYTES:
        raise RowInvalidError(rank, rank, "length of the gathered rows", f"{len(data)}, not {dp_size * ROW_BYTES}")
    rows = [_WORDS.unpack_from(data, owner * ROW_BYTES) for owner in range(dp_size)]
    for owner, words in enumerate(rows):
        start = owner * ROW_BYTES
        if zlib.crc32(data[start : start + ROW_BYTES - 4]) != words[15]:
            raise RowInvalidError(rank, owner, "checksum", f"{words[15]:#010x}")
        if (words[4] >> 16) & UINT16_MAX != owner:
            raise RowInvalidError(rank, owner, "owner", f"rank {(words[4] >> 16) & UINT16_MAX}")
    if data[rank * ROW_BYTES : (rank + 1) * ROW_BYTES] != mine:
        raise RowInvalidError(rank, rank, "own row", "not what was written")
    header = rows[rank][:4]
    if any(words[:4] != header for words in rows):
        raise HeaderMismatchError(tuple(_position_text(words) for words in rows))
    return tuple(_row(words, owner, rank) for owner, words in enumerate(rows))


def _row(words: Sequence[int], owner: int, seen_by: int) -> Row:
    flags = words[4]
    dummy = bool(flags & _DUMMY)
    row = Row(
        num_tokens=0 if dummy else words[5],
        num_tokens_padded=words[6],
        num_reqs=words[7],
        uniform_token_count=None if words[8] < 0 else words[8],
        max_query_len=words[9],
        num_tokens_for_logprob=words[10],
        forward_mode=words[11] & UINT16_MAX,
        substeps=(words[11] >> 16) & UINT16_MAX,
        graph_mode=_GRAPH_MODES.get((flags >> 8) & 0xFF, GraphMode.NONE),
        has_work=bool(flags & _HAS_WORK),
        has_prefill=bool(flags & _HAS_PREFILL),
        can_run_graph=bool(flags & _CAN_GRAPH),
        wants_microbatch=bool(flags & _WANTS_UB),
        hold_requested=bool(flags & _HOLD),
        local_error=bool(flags & _ERROR),
        dummy=dummy,
        can_forward=bool(flags & _CAN_FORWARD),
        engine=(words[13], words[14]),
    )
    if dummy != (words[5] == SENTINEL_TOKENS) or not _plausible(row) or (flags >> 8) & 0xFF not in _GRAPH_MODES:
        raise RowInvalidError(seen_by, owner, "body", repr(tuple(words[4:15])))
    return row


_GRAPH_MODES = {mode.value: mode for mode in GraphMode}


def _plausible(row: Row) -> bool:
    """Whether every count is one; floats and booleans in a count's place are not."""
    uniform = row.uniform_token_count
    counts = (
        row.num_tokens,
        row.num_tokens_padded,
        row.num_reqs,
        row.max_query_len,
        row.num_tokens_for_logprob,
        row.forward_mode,
        row.substeps,
        0 if uniform is None else uniform,
    )
    return (
        all(type(count) is int for count in counts)
        and min(counts) >= 0
        and (row.num_tokens_padded == 0 or row.num_tokens_padded >= row.num_tokens)
        and max(row.forward_mode, row.substeps) <= UINT16_MAX
        and row.graph_mode in _GRAPH_MODES
        and len(row.engine) == 2
    )


def _what_is_wrong(row: Row) -> str:
    counts = {name: INT32_MAX for name in ("num_tokens", "num_tokens_padded", "num_reqs", "max_query_len")}
    counts |= {"num_tokens_for_logprob": INT32_MAX, "forward_mode": UINT16_MAX, "substeps": UINT16_MAX}
    for name, most in counts.items():
        value = getattr(row, name)
        if type(value) is not int or not 0 <= value <= most:
            return f"row field {name} must be an int in 0..{most}, got {value!r}"
    if 0 < row.num_tokens_padded < row.num_tokens:
        return (
            f"row field num_tokens_padded is {row.num_tokens_padded}, "
            f"less than num_tokens {row.num_tokens}: padding only adds"
        )
    return (
        f"row field uniform_token_count, graph_mode or engine is out of its type: {row.uniform_token_count!r}, "
        f"{row.graph_mode!r}, {row.engine!r} (a count or None, a GraphMode, two int32)"
    )


def _signed16(value: int) -> int:
    """The same 16 bits as a number that may stand in the upper half of a signed word."""
    if not 0 <= value <= UINT16_MAX:
        raise struct.error("out of 16 bits")
    return value - (1 << 16) if value & 0x8000 else value


def _position_text(words: Sequence[int]) -> str:
    layout, kind = words[0] & 0xFF, (words[0] >> 8) & 0xFF
    if layout != ROW_LAYOUT:
        return f"row layout {layout}"
    try:
        operation = Operation(kind)
    except ValueError:
        return f"unknown operation {kind}"
    return str(Position(operation, words[1], words[2], words[3], (words[0] >> 16) & UINT16_MAX))
