"""The row: what one rank contributes to one exchange, as 64 bytes.

Sixteen little-endian int32 words. The first five are the header, compared before any value is used; the last one is a
CRC-32 of the other fifteen, so that a damaged row is never taken for a plan.

    word  0      bits 0-7 layout version, 8-15 kind of operation, 16-31 sub-step
          1-3    epoch, wave, step
          4      bits 0-7 flags, 8-15 graph mode, 16-31 owner's rank
          5      num_tokens (-1 in the row of a dummy rank; on the wire only: `Row.dummy` says it)
          6      num_tokens_padded
          7      num_reqs
          8      uniform_token_count (-1 = none)
          9      max_query_len
          10     num_tokens_for_logprob
          11     bits 0-15 forward mode, 16-31 sub-steps wished for
          12     how long the owner waited in its exchange before this one, in microseconds
          13-14  words that the engine defines
          15     CRC-32 of words 0-14

No field is derived from another one on the way: what a rank wrote is what the others read. All rows of an exchange are
checked and counted in C (`_rows.c`), in one pass.
"""

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec

from . import _rows
from .errors import HeaderMismatchError, LocalProtocolError, RowInvalidError

ROW_BYTES = 64
ROW_LAYOUT = 1

INT32_MAX = (1 << 31) - 1
UINT16_MAX = (1 << 16) - 1

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


class Word:
    """Index of a word."""

    FLAGS, TOKENS, PADDED, REQS, UNIFORM, QUERY, LOGPROB, MODES, WAITED, ENGINE = range(4, 14)
    CRC = 15


class Flag:
    """Bits of word 4."""

    HAS_WORK, HAS_PREFILL, CAN_GRAPH, WANTS_MICROBATCH, HOLD, ERROR, DUMMY, CAN_FORWARD = (1 << i for i in range(8))


def pack(row: Row, position: Position, rank: int, waited_us: int = 0) -> bytes:
    """Return the 64 bytes of a row. `waited_us` is how long its owner waited in its exchange before this one.

    Raises:
        LocalProtocolError: A value has the wrong type or range; the text names the field. Nothing was sent.
    """
    packed = _rows.pack(row, position, rank, min(waited_us, INT32_MAX))
    if packed is None:
        raise LocalProtocolError(_what_is_wrong(row))
    return packed


class Rows(_rows.Rows):
    """All rows of one exchange, checked. What every step needs of all of them together is counted while they are
    checked (`_rows.pyi` lists it); a row or a column is decoded when it is asked for.
    """

    __slots__ = ()

    def __getitem__(self, rank: int) -> Row:
        return _row(self.words(rank))

    def __iter__(self) -> Iterator[Row]:
        return (self[rank] for rank in range(len(self)))

    def __reduce__(self) -> tuple[type["Rows"], tuple[bytes, bytes, int]]:
        return Rows, (self.data, self.data[:ROW_BYTES], 0)

    def ranks_with(self, flag: int) -> tuple[int, ...]:
        """Ranks whose row has this flag."""
        return tuple(rank for rank, flags in enumerate(self.column(Word.FLAGS)) if flags & flag)

    def ranks_without(self, flag: int) -> tuple[int, ...]:
        """Ranks whose row has not."""
        return tuple(rank for rank, flags in enumerate(self.column(Word.FLAGS)) if not flags & flag)


def unpack(data: bytes, dp_size: int, mine: bytes, rank: int) -> Rows:
    """Return all rows of one exchange, row index == rank.

    Args:
        data: dp_size * 64 bytes, as gathered.
        dp_size: Ranks of the group.
        mine: The 64 bytes that this rank wrote.
        rank: This rank.

    Raises:
        RowInvalidError: A row is damaged, or stands in another rank's place, or our own came back changed.
        HeaderMismatchError: The ranks are not at the same exchange; every rank raises it.
    """
    if len(data) != dp_size * ROW_BYTES:
        raise RowInvalidError(rank, rank, "length of the gathered rows", f"{len(data)}, not {dp_size * ROW_BYTES}")
    try:
        return Rows(data, mine, rank)
    except _rows.Fault as fault:
        raise _invalid(data, rank, *fault.args) from None


def gathered(rows: Sequence[Row], position: Position) -> Rows:
    """What a perfect exchange makes of these rows.

    Raises:
        LocalProtocolError: See `pack`.
    """
    packed = [pack(row, position, rank) for rank, row in enumerate(rows)]
    return Rows(b"".join(packed), packed[0], 0)


def _invalid(data: bytes, seen_by: int, kind: str, owner: int) -> RowInvalidError | HeaderMismatchError:
    """What the C side has found, in words."""
    if kind == "header":
        return HeaderMismatchError(tuple(_position_text(words) for words in _WORDS.iter_unpack(data)))
    words = _WORDS.unpack_from(data, owner * ROW_BYTES)
    found = {
        "checksum": f"{words[Word.CRC]:#010x}",
        "owner": f"rank {(words[Word.FLAGS] >> 16) & UINT16_MAX}",
        "own row": "not what was written",
        "body": repr(words[Word.FLAGS : Word.CRC]),
    }
    return RowInvalidError(seen_by, owner, kind, found[kind])


def _row(words: Sequence[int]) -> Row:
    flags = words[Word.FLAGS]
    dummy = bool(flags & Flag.DUMMY)
    return Row(
        num_tokens=0 if dummy else words[Word.TOKENS],
        num_tokens_padded=words[Word.PADDED],
        num_reqs=words[Word.REQS],
        uniform_token_count=None if words[Word.UNIFORM] < 0 else words[Word.UNIFORM],
        max_query_len=words[Word.QUERY],
        num_tokens_for_logprob=words[Word.LOGPROB],
        forward_mode=words[Word.MODES] & UINT16_MAX,
        substeps=(words[Word.MODES] >> 16) & UINT16_MAX,
        graph_mode=_GRAPH_MODES[(flags >> 8) & 0xFF],
        has_work=bool(flags & Flag.HAS_WORK),
        has_prefill=bool(flags & Flag.HAS_PREFILL),
        can_run_graph=bool(flags & Flag.CAN_GRAPH),
        wants_microbatch=bool(flags & Flag.WANTS_MICROBATCH),
        hold_requested=bool(flags & Flag.HOLD),
        local_error=bool(flags & Flag.ERROR),
        dummy=dummy,
        can_forward=bool(flags & Flag.CAN_FORWARD),
        engine=(words[Word.ENGINE], words[Word.ENGINE + 1]),
    )


_GRAPH_MODES = {mode.value: mode for mode in GraphMode}


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


def _position_text(words: Sequence[int]) -> str:
    layout, kind = words[0] & 0xFF, (words[0] >> 8) & 0xFF
    if layout != ROW_LAYOUT:
        return f"row layout {layout}"
    try:
        operation = Operation(kind)
    except ValueError:
        return f"unknown operation {kind}"
    return str(Position(operation, words[1], words[2], words[3], (words[0] >> 16) & UINT16_MAX))
