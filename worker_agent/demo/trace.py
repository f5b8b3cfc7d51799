"""Request traces: when requests came, and how many tokens each had. Pure but for opening the file.

The format is that of the Azure LLM inference traces, read as they are: a header, then one request a line, with LF or
CRLF, with or without a newline at the end; blank lines and lines that begin with `#` say nothing. A line that is
neither is a mistake, told with its number: a trace that is silently thinner is no longer the trace that it claims to
be.

Only as many lines are read as requests are asked for; a trace that has fewer is begun again, one mean gap after its
end.
"""

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"

CONTEXT_TOKENS_PER_TOKEN = 32
"""So many prompt tokens of the trace make one of ours: the demo's model is that much smaller than what was served."""

GENERATED_TOKENS_PER_TOKEN = 8

SEQUENCE_TOKENS_MAX = 512
"""Prompt and output together; the context of the demo's model."""

PROBLEMS_MAX = 10
"""More mistakes than that are not worth a line each: the file is something else."""

TOKENS_MAX = 10_000_000
LINE_SHOWN_MAX = 60

_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d{1,9})?,(\d{1,9}),(\d{1,9})", re.ASCII)


class Arrival(NamedTuple):
    """One request of a trace. Token counts are those of the trace, not yet scaled."""

    offset_s: float
    """Since the first request."""
    context_tokens: int
    generated_tokens: int


class Slice(msgspec.Struct, frozen=True):
    """The part of a trace that is replayed."""

    source: str
    arrivals: tuple[Arrival, ...]
    rows_read: int
    """Different requests in it; fewer than `arrivals` if the trace was begun again."""

    @property
    def span_s(self) -> float:
        """From the first request to the last, in the trace's own time."""
        return self.arrivals[-1].offset_s

    @property
    def repeated(self) -> bool:
        """Whether the trace was too short and was begun again."""
        return len(self.arrivals) > self.rows_read


class Problem(NamedTuple):
    """One line that is no request. `line` counts from 1; 0 means the file as a whole."""

    line: int
    message: str


class TraceError(ValueError):
    """A trace cannot be used; `problems` are its first mistakes, with their line numbers."""

    def __init__(self, source: str, problems: tuple[Problem, ...]) -> None:
        self.source = source
        self.problems = problems
        super().__init__(source, problems)  # keeps the error picklable

    def __str__(self) -> str:
        return "\n".join(f"{self.source}:{f'{line}:' if line else ''} {message}" for line, message in self.problems)


def read_slice(path: Path, requests: int) -> Slice:
    """Return the first `requests` requests of a trace file.

    Raises:
        TraceError: The file cannot be opened, or a line of the part that was read is no request.
    """
    try:
        # Undecodable bytes become a mistake of their line instead of the file's.
        with path.open(encoding="utf-8", errors="replace") as lines:
            return parse_slice(lines, str(path), requests)
    except OSError as error:
        raise TraceError(str(path), (Problem(0, f"cannot be read: {error.strerror}"),)) from error


def parse_slice(lines: Iterable[str], source: str, requests: int) -> Slice:
    """Return the first `requests` requests of a trace; see `read_slice`.

    Args:
        lines: With or without their ends.
        source: Named in errors and in the report.
        requests: At least 1.
    """
    rows, problems = _read(lines, requests)
    if problems:
        raise TraceError(source, tuple(problems))
    if not rows:
        raise TraceError(source, (Problem(0, "there is no request in it"),))
    return Slice(source, tuple(islice(_endless(rows), requests)), len(rows))


def scaled(arrival: Arrival) -> tuple[int, int]:
    """Return how many prompt tokens a request of ours has and how many it generates: at least one of each, and
    together at most `SEQUENCE_TOKENS_MAX`.
    """
    generated = min(max(1, arrival.generated_tokens // GENERATED_TOKENS_PER_TOKEN), SEQUENCE_TOKENS_MAX // 2)
    prompt = max(1, arrival.context_tokens // CONTEXT_TOKENS_PER_TOKEN)
    return min(prompt, SEQUENCE_TOKENS_MAX - generated), generated


def _read(lines: Iterable[str], requests: int) -> tuple[list[Arrival], list[Problem]]:
    rows: list[Arrival] = []
    problems: list[Problem] = []
    header_seen = False
    first_s = last_s = 0.0
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not header_seen:
            if text.removeprefix("\ufeff") != HEADER:
                return [], [Problem(number, f"expected the header {HEADER}, found {_shown(text)}")]
            header_seen = True
            continue
        row = _row(text)
        if isinstance(row, str):
            problems.append(Problem(number, row))
        elif rows and row.offset_s < last_s:
            problems.append(Problem(number, "this request came before the one above it; sort the trace by time"))
        else:
            first_s = row.offset_s if not rows else first_s
            last_s = row.offset_s
            rows.append(row._replace(offset_s=last_s - first_s))
        if len(rows) == requests or len(problems) == PROBLEMS_MAX:
            break
    return rows, problems


def _row(text: str) -> Arrival | str:
    """One request, its offset being since 1970; or what is wrong with it."""
    match = _LINE.fullmatch(text)
    if match is None:
        return f"expected TIME,TOKENS,TOKENS as in 2023-11-16 18:15:46.6805900,374,44, found {_shown(text)}"
    clock, fraction, context, generated = match.groups()
    try:
        seconds = datetime.strptime(clock, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return f"there is no such time as {clock}"
    if max(int(context), int(generated)) > TOKENS_MAX:
        return f"a request of more than {TOKENS_MAX} tokens"
    # Apart from the clock: strptime does not know digits of 100 ns.
    return Arrival(seconds + float(fraction or 0), int(context), int(generated))


def _endless(rows: list[Arrival]) -> Iterator[Arrival]:
    """The rows again and again, each time later, so that the end of one round and the next are a mean gap apart."""
    span_s = rows[-1].offset_s
    round_s = span_s + (span_s / (len(rows) - 1) if len(rows) > 1 else 1.0)
    start_s = 0.0
    while True:
        for row in rows:
            yield row._replace(offset_s=start_s + row.offset_s)
        start_s += round_s


def _shown(text: str) -> str:
    """A piece of a stranger's file, fit for a terminal."""
    return ascii(text if len(text) <= LINE_SHOWN_MAX else text[: LINE_SHOWN_MAX - 3] + "...")
