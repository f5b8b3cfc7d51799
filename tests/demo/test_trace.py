"""Traces as they are found: line ends, gaps, mistakes; and what of them is replayed."""

import pickle
from importlib.resources import files
from pathlib import Path

import pytest

from wavekeeper.worker_agent.demo.model import ModelConfig
from wavekeeper.worker_agent.demo.replay import schedule
from wavekeeper.worker_agent.demo.trace import (
    HEADER,
    SEQUENCE_TOKENS_MAX,
    Arrival,
    TraceError,
    parse_slice,
    read_slice,
    scaled,
)

FIRST = "2023-11-16 18:15:46.6805900,374,44"
SECOND = "2023-11-16 18:15:50.9951690,396,109"
THIRD = "2023-11-16 18:15:51.2223670,879,55"


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    return path


def mistakes(*lines: str, requests: int = 100) -> str:
    with pytest.raises(TraceError) as caught:
        parse_slice([HEADER, *lines], "t.csv", requests)
    return str(caught.value)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("last", [True, False], ids=["last newline", "no last newline"])
def test_line_ends_do_not_matter(tmp_path: Path, end: bytes, last: bool) -> None:
    content = end.join(line.encode() for line in (HEADER, FIRST, SECOND, THIRD)) + (end if last else b"")

    read = read_slice(write(tmp_path, content), 100)

    assert [arrival.context_tokens for arrival in read.arrivals[:3]] == [374, 396, 879]
    assert [arrival.generated_tokens for arrival in read.arrivals[:3]] == [44, 109, 55]
    assert [arrival.offset_s for arrival in read.arrivals[:3]] == pytest.approx([0, 4.314579, 4.541777], abs=1e-6)


def test_mixed_line_ends_blank_lines_comments_and_a_byte_order_mark_are_no_mistakes(tmp_path: Path) -> None:
    content = f"# whose it is\n\ufeff{HEADER}\r\n\n{FIRST}\r\n \r\n{SECOND}\n# between\n{THIRD}".encode()

    read = read_slice(write(tmp_path, content), 3)

    assert [arrival.context_tokens for arrival in read.arrivals] == [374, 396, 879]
    assert not read.repeated


def test_only_what_is_asked_for_is_read() -> None:
    assert len(parse_slice([HEADER, FIRST, SECOND, "damaged"], "t.csv", 2).arrivals) == 2


def test_a_bad_line_is_told_with_its_number_and_what_was_expected() -> None:
    told = mistakes(FIRST, "", "2023-11-16 18:15:50.9951690,many,109", SECOND)

    assert told.startswith("t.csv:4: expected TIME,TOKENS,TOKENS as in ")
    assert told.endswith("found '2023-11-16 18:15:50.9951690,many,109'")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("2023-02-30 18:15:46.1,1,1", "there is no such time as 2023-02-30 18:15:46"),
        ("2023-11-16 18:15:46.1,1", "expected TIME,TOKENS,TOKENS"),
        ("2023-11-16 18:15:46.1,-1,1", "expected TIME,TOKENS,TOKENS"),
        ("2023-11-16 18:15:46.1,1,99999999", "a request of more than 10000000 tokens"),
        ("2023-11-16 18:15:40.1,1,1", "came before the one above it"),
        ("\x1b[2J,1,1", r"found '\x1b[2J,1,1'"),
    ],
)
def test_each_kind_of_bad_line_says_why(line: str, why: str) -> None:
    told = mistakes(FIRST, line)

    assert told.startswith("t.csv:3: ")
    assert why in told
    assert told.isprintable()


def test_all_mistakes_are_told_but_not_without_end() -> None:
    assert len(mistakes(FIRST, "a", SECOND, "b").splitlines()) == 2
    assert len(mistakes(*["x"] * 1_000).splitlines()) == 10


def test_a_file_of_another_format_a_missing_and_an_empty_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=rf"trace\.csv:1: expected the header {HEADER}, found 'a,b'"):
        read_slice(write(tmp_path, b"a,b\n1,2\n"), 1)
    with pytest.raises(TraceError, match=r"none\.csv: cannot be read: No such file or directory"):
        read_slice(tmp_path / "none.csv", 1)
    with pytest.raises(TraceError, match=r"trace\.csv: there is no request in it"):
        read_slice(write(tmp_path, f"{HEADER}\n".encode()), 1)
    with pytest.raises(TraceError, match=r"trace\.csv:2: expected TIME"):
        read_slice(write(tmp_path, f"{HEADER}\n".encode() + b"\xff\xfe\x00,1,1"), 1)


def test_a_short_trace_is_begun_again_later() -> None:
    read = parse_slice([HEADER, FIRST, SECOND], "t.csv", 5)

    assert (read.rows_read, read.repeated, len(read.arrivals)) == (2, True, 5)
    gaps = [later.offset_s - earlier.offset_s for earlier, later in zip(read.arrivals, read.arrivals[1:], strict=False)]
    assert gaps == pytest.approx([4.314579] * 4, abs=1e-6)
    assert read.arrivals[4]._replace(offset_s=0.0) == read.arrivals[0]


def test_a_trace_of_one_request_is_begun_again_each_second() -> None:
    assert [arrival.offset_s for arrival in parse_slice([HEADER, FIRST], "t.csv", 3).arrivals] == [0, 1, 2]


def test_the_error_survives_pickling() -> None:
    with pytest.raises(TraceError) as caught:
        parse_slice([HEADER, "x"], "t.csv", 1)

    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_packaged_excerpt_is_whole_and_says_whose_it_is() -> None:
    text = (files("wavekeeper.worker_agent.demo") / "trace_excerpt.csv").read_text()

    read = parse_slice(text.splitlines(), "excerpt", 72)

    assert read.rows_read == 72
    attribution = text.splitlines()[0]
    for words in ("# ", "Azure LLM inference trace 2023", "CC-BY 4.0", "Splitwise", "ISCA 2024"):
        assert words in attribution


@pytest.mark.parametrize(
    ("context", "generated", "expected"),
    [(374, 44, (11, 5)), (0, 0, (1, 1)), (31, 7, (1, 1)), (4085, 404, (127, 50)), (10_000_000, 10_000_000, (256, 256))],
)
def test_token_counts_are_scaled_to_what_the_model_can_take(
    context: int, generated: int, expected: tuple[int, int]
) -> None:
    assert scaled(Arrival(0.0, context, generated)) == expected
    assert sum(expected) <= SEQUENCE_TOKENS_MAX == ModelConfig().context_tokens


def test_jobs_take_turns_between_deployments_and_ask_the_same_in_every_run() -> None:
    arrivals = parse_slice([HEADER, FIRST, SECOND, THIRD], "t.csv", 3).arrivals

    jobs = schedule(arrivals, ["a", "b"], speed=2.0)

    assert [job.deployment for job in jobs] == ["a", "b", "a"]
    assert [job.due_s for job in jobs] == [arrival.offset_s / 2 for arrival in arrivals]
    assert [(len(job.request.prompt), job.request.max_tokens) for job in jobs] == [(11, 5), (12, 13), (27, 6)]
    assert jobs == schedule(arrivals, ["a", "b"], speed=2.0)
    assert len({job.request.id for job in jobs}) == 3
    assert jobs[0].request.prompt[:4] != jobs[1].request.prompt[:4]
