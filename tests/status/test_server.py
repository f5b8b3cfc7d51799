"""The server: bound before it starts, ended in bounded time, and a guest in the process."""

import asyncio
import contextlib
import pickle
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from wavekeeper.coordinator.core.view import FleetView
from wavekeeper.coordinator.status.app import make_app
from wavekeeper.coordinator.status.server import START_S_MAX, HttpBindError, HttpStartError, StatusServer

from .fakes import Service

STOP_S_MAX = 5.0


class SlowService(Service):
    """Answers when it is let, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()

    async def fleet(self) -> FleetView:
        self.entered.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")


@contextlib.contextmanager
def serving(source: Service, host: str = "127.0.0.1") -> Iterator[StatusServer]:
    server = StatusServer(make_app(source), host, 0)
    server.start()
    try:
        yield server
    finally:
        assert server.stop(STOP_S_MAX)


def fetch(url: str) -> tuple[int, bytes]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.status, answer.read()


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_port_0_takes_a_free_port_and_tells_it_before_the_start() -> None:
    server = StatusServer(make_app(Service()), "127.0.0.1", 0)
    assert server.endpoint == f"http://127.0.0.1:{server.port}"
    assert server.port > 0
    assert server.stop(STOP_S_MAX)


def test_it_serves_from_start_to_stop_and_not_after() -> None:
    with serving(Service()) as server:
        assert fetch(f"{server.endpoint}/livez") == (200, b"ok")
    with pytest.raises(urllib.error.URLError):
        fetch(f"{server.endpoint}/livez")


def test_a_probe_that_comes_before_the_start_waits_for_it() -> None:
    server = StatusServer(make_app(Service()), "127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as early:
        early.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        server.start()
        assert early.recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert server.stop(STOP_S_MAX)


def test_a_taken_port_names_the_key_the_address_and_a_way_out() -> None:
    first = StatusServer(make_app(Service()), "127.0.0.1", 0)
    try:
        with pytest.raises(HttpBindError) as caught:
            StatusServer(make_app(Service()), "127.0.0.1", first.port)
    finally:
        first.stop(STOP_S_MAX)
    assert str(caught.value) == (
        f"coordinator.http.port: cannot bind 127.0.0.1:{first.port}: Address already in use; "
        "write another host or port (0 takes any free port)"
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_host_of_another_machine_cannot_be_bound() -> None:
    with pytest.raises(HttpBindError, match=r"cannot bind 192\.0\.2\.1:0"):  # an address for documentation only
        StatusServer(make_app(Service()), "192.0.2.1", 0)


def test_a_port_can_be_had_again_at_once() -> None:
    with serving(Service()) as server:
        fetch(f"{server.endpoint}/livez")
    again = StatusServer(make_app(Service()), "127.0.0.1", server.port)
    assert again.stop(STOP_S_MAX)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_an_ipv6_address_gets_its_brackets() -> None:
    with serving(Service(), "::1") as server:
        assert server.endpoint == f"http://[::1]:{server.port}"
        assert fetch(f"{server.endpoint}/livez") == (200, b"ok")


def test_the_thread_ends_and_the_signals_stay_as_they_were() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with serving(Service()) as server:
        fetch(f"{server.endpoint}/livez")
        assert "wavekeeper-http" in [thread.name for thread in threading.enumerate() if thread.daemon]
        assert {number: signal.getsignal(number) for number in before} == before
    assert "wavekeeper-http" not in [thread.name for thread in threading.enumerate()]


def test_it_says_nothing_of_what_it_is_made_of() -> None:
    with serving(Service()) as server, urllib.request.urlopen(f"{server.endpoint}/livez", timeout=10) as answer:
        assert "server" not in answer.headers


def test_a_server_that_cannot_come_up_says_so_at_once() -> None:
    server = StatusServer(make_app(Service()), "127.0.0.1", 0)
    assert server.stop(STOP_S_MAX)
    began_s = time.monotonic()
    with pytest.raises(HttpStartError, match=f"{server.endpoint} did not come up"):
        server.start()  # its socket is closed by now
    assert time.monotonic() - began_s < START_S_MAX


def test_stopping_twice_or_before_the_start_does_no_harm() -> None:
    server = StatusServer(make_app(Service()), "127.0.0.1", 0)
    assert server.stop(STOP_S_MAX)
    assert server.stop(STOP_S_MAX)


def test_open_connections_do_not_hold_up_the_stop() -> None:
    source = SlowService()
    with contextlib.ExitStack() as stack:
        server = StatusServer(make_app(source), "127.0.0.1", 0)
        server.start()
        silent, half, asking = (
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10)) for _ in range(3)
        )
        half.sendall(b"GET /livez HTT")
        asking.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert source.entered.wait(10)
        began_s = time.monotonic()
        assert server.stop(STOP_S_MAX)
        assert time.monotonic() - began_s < STOP_S_MAX
        assert silent.recv(1) == b""


def test_an_application_that_never_gives_way_cannot_hold_up_the_stop() -> None:
    class BlockedService(Service):
        """Blocks the server's thread itself."""

        def __init__(self) -> None:
            super().__init__()
            self.entered, self.release = threading.Event(), threading.Event()

        async def fleet(self) -> FleetView:
            self.entered.set()
            self.release.wait(30)
            return self.view

    source = BlockedService()
    server = StatusServer(make_app(source), "127.0.0.1", 0)
    server.start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as asking:
        asking.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert source.entered.wait(10)
        assert server.stop(0.1) is False
        source.release.set()
        assert server.stop(STOP_S_MAX)
