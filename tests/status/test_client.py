"""`wavekeeper status` and `wavekeeper healthcheck`, against real servers."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from wavekeeper.coordinator.status import client
from wavekeeper.coordinator.status.app import make_app
from wavekeeper.coordinator.status.client import healthcheck, print_status
from wavekeeper.coordinator.status.server import StatusServer
from wavekeeper.proto.messages import Kind

from .fakes import (
    HOSTILE,
    BrokenService,
    Service,
    StuckService,
    dense,
    deployment_view,
    faulted_moe,
    fleet_view,
    hostile_fleet,
    rank_view,
    without,
)

Capture = pytest.CaptureFixture[str]


@contextlib.contextmanager
def serving(source: Service) -> Iterator[str]:
    server = StatusServer(make_app(source), "127.0.0.1", 0)
    server.start()
    try:
        yield server.endpoint
    finally:
        assert server.stop(5)


@contextlib.contextmanager
def stranger(answer: bytes, *, drop_s: float | None = None) -> Iterator[str]:
    """Something else that listens: it says `answer` to the first who comes and holds the line, or lets bytes drop."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = threading.Event()

        def serve() -> None:
            with listener.accept()[0] as peer:
                peer.recv(1 << 16)
                peer.sendall(answer)
                with contextlib.suppress(ConnectionError):
                    while not done.wait(drop_s or 30) and drop_s:
                        peer.sendall(b" ")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        done.set()
        thread.join(10)


def shown(source: Service, capsys: Capture) -> str:
    with serving(source) as url:
        assert print_status(url, as_json=False) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def test_a_well_fleet_is_one_block_for_each_deployment(capsys: Capture) -> None:
    blocks = shown(Service(), capsys).split("\n\n")
    assert len(blocks) == 3
    assert blocks[0].splitlines() == [
        "wavekeeper 0.1.0, term 3, up 13 min: ready",
        "control tcp://127.0.0.1:29560, feed tcp://127.0.0.1:29561, configuration 0123456789ab",
    ]
    assert blocks[1].splitlines()[:4] == [
        "demo-moe (moe, lockstep): running for 12 s",
        "  wave 12, epoch 1, 13 waves run (1 empty), 1200 dummy steps, "
        "exchange shm (the first that all ranks offer; they are on 1 host)",
        "  3 running, 1 waiting, fullest KV cache 42 %",
        "  coordination cost: group operations 480, process groups 0, wave messages 140",
    ]
    table = [line.split() for line in blocks[1].splitlines()[4:]]
    assert table[0] == "rank mode activity wave step last running waiting KV heard host serves at".split()
    assert table[3] == "2 running stepping 0.0 s 12 34 0 % 3 1 42 % 0.2 s node-a tcp://127.0.0.1:5552".split()
    assert len(table) == 5


def test_a_dense_block_shows_three_zeros_and_no_wave(capsys: Capture) -> None:
    text = shown(Service(fleet_view(dense())), capsys)
    assert "coordination cost: group operations 0, process groups 0, wave messages 0" in text
    assert "step" not in text.replace("stepping", "")
    assert "wave " not in text.replace("wave messages", "")


def test_the_columns_of_the_table_stand_under_each_other(capsys: Capture) -> None:
    ranks = [rank_view(rank, serve="x" * (rank % 3)) for rank in range(12)]
    lines = shown(Service(fleet_view(deployment_view("a", Kind.DENSE, ranks))), capsys).splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("  rank")) :]
    column = table[0].index("host")
    assert {line[column:].split()[0] for line in table[1:]} == {"node-a"}
    assert {line[column - 2 : column] for line in table} == {"  "}


def test_what_is_wrong_and_what_is_waited_for_is_told(capsys: Capture) -> None:
    text = shown(Service(fleet_view(faulted_moe(), without(dense(), 1))), capsys)
    fault = "faulted (rank 3 fell silent for 5.0 s); waits for rank 3 to register, since 2.0 s"
    assert text.splitlines()[0].endswith(": not ready")
    assert f"! demo-moe {fault}" in text
    assert f"  ! {fault}" in text
    assert "  ! a start waits for 1.5 s, asked for by front-end 00000000000000aa" in text
    assert "  ! has 3 of 4 ranks" in text
    assert re.search(r"^ +3  not there", text, re.MULTILINE)


def test_json_is_the_body_of_the_status(capsys: Capture) -> None:
    with serving(Service()) as url:
        assert print_status(url, as_json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["api_version"] == "v1"
    assert [deployment["name"] for deployment in printed["deployments"]] == ["demo-moe", "demo-dense"]


def test_hostile_text_cannot_move_the_cursor(capsys: Capture) -> None:
    text = shown(Service(hostile_fleet(), version=HOSTILE, control=HOSTILE), capsys)
    assert "\x1b" not in text
    assert "\\x1b[2J" in text


class Terminal:
    """A stdout on a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_a_terminal_gets_colours_unless_they_are_unwanted(
    environ: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    with serving(Service()) as url:
        assert print_status(url, as_json=False) == 0
    assert ("\x1b[32mready\x1b[0m" in terminal.text) is coloured
    assert ("\x1b" in terminal.text) is coloured


def test_a_proxy_in_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert "demo-moe" in shown(Service(), capsys)


# --- no usable answer ------------------------------------------------------------------------------------------------


def refused(url: str, capsys: Capture) -> str:
    """The one sentence on stderr of a status that failed."""
    assert print_status(url, as_json=False) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err.rstrip("\n")


def test_an_unreachable_coordinator_is_one_sentence(capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert refused(url, capsys) == (
        f"cannot reach a coordinator at {url}: connection refused; is it running, and is this its coordinator.http?"
    )


def test_a_coordinator_whose_loop_hangs_says_so(capsys: Capture) -> None:
    with serving(StuckService()) as url:
        assert refused(url, capsys) == (
            f"{url}/v1/status answers 503 Service Unavailable: the coordinator's loop did not answer within 1 s"
        )


def test_a_coordinator_with_a_bug_says_where_to_look(capsys: Capture) -> None:
    with serving(BrokenService()) as url:
        assert "answers 500 Internal Server Error: a bug of the coordinator" in refused(url, capsys)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "is not a coordinator of this version"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{"term":1}', "is not a coordinator of this version"),
        (b"HTTP/1.1 404 Nope\r\nContent-Length: 4\r\n\r\ngone", "answers 404 Nope"),
        (b"SSH-2.0-x\r\n", "cannot reach a coordinator at"),
    ],
    ids=["text", "other json", "another server", "no http"],
)
def test_something_else_at_the_address_is_one_sentence(answer: bytes, told: str, capsys: Capture) -> None:
    with stranger(answer) as url:
        assert told in refused(url, capsys)


@pytest.mark.parametrize("url", ["file:///etc/hostname", "127.0.0.1:9257", "", "http://", "http://a b"])
def test_what_is_no_url_of_a_coordinator_is_one_sentence(url: str, capsys: Capture) -> None:
    refused(url, capsys)
    assert healthcheck(url) == 1


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe"], ids=["silence", "half"])
def test_no_answer_is_waited_for_longer_than_the_limit(
    answer: bytes, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ANSWER_S_MAX", 0.3)
    began_s = time.monotonic()
    with stranger(answer) as url:
        assert "timed out" in refused(url, capsys)
        assert time.monotonic() - began_s < 10


def test_an_answer_in_drops_is_given_up_after_the_limit(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_S_MAX", 0.3)
    with stranger(b"HTTP/1.1 200 OK\r\nContent-Length: 300\r\n\r\n", drop_s=0.02) as url:
        assert "too long or too slow" in refused(url, capsys)


def test_an_answer_without_end_is_cut_off(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_BYTES_MAX", 1000)
    with serving(Service()) as url:
        assert "too long or too slow" in refused(url, capsys)


# --- health check ----------------------------------------------------------------------------------------------------


def test_the_health_check_passes_while_the_loop_answers_even_if_nothing_is_ready(capsys: Capture) -> None:
    with serving(Service(fleet_view(faulted_moe()), stopping=True)) as url:
        assert healthcheck(url) == 0
        assert healthcheck(f"{url}/") == 0
    assert capsys.readouterr() == ("", "")


def test_the_health_check_fails_with_a_sentence_when_the_loop_hangs(capsys: Capture) -> None:
    with serving(StuckService()) as url:
        assert healthcheck(url) == 1
    assert "did not answer within 1 s" in capsys.readouterr().err


def test_the_client_loads_no_server() -> None:
    heavy = ("starlette", "uvicorn", "prometheus_client", "zmq", "torch", "asyncio")
    code = f"import sys, wavekeeper.coordinator.status.client; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
