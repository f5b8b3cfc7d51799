"""Meeting and naming: the listener that is bound first, and who is missing, without torch."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from wavekeeper.proto.process_identity import has_ended, this_process
from wavekeeper.worker_agent.exchange import GroupSpec, Listener
from wavekeeper.worker_agent.exchange.base import Deadline
from wavekeeper.worker_agent.exchange.rendezvous import (
    STORE_ANSWER_S,
    Roll,
    Slow,
    split_endpoint,
)

from .conftest import together, until


class DictStore:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self.values[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)


class StoppedStore(DictStore):
    """A store whose server is stopped: it answers nothing until the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = threading.Event()
        self.go_on = threading.Event()

    def get(self, key: str, /) -> bytes:
        if self.stopped.is_set():
            self.go_on.wait()
        return super().get(key)

    def check(self, keys: list[str], /) -> bool:
        if self.stopped.is_set():
            self.go_on.wait()
        return super().check(keys)


class DeadStore(DictStore):
    """A store whose server is gone."""

    def get(self, key: str, /) -> bytes:
        raise RuntimeError("Connection reset by peer")

    def check(self, keys: list[str], /) -> bool:
        raise RuntimeError("Connection reset by peer")


def spec(rank: int, dp_size: int = 3) -> GroupSpec:
    return GroupSpec(deployment="d", epoch=1, group="g", rank=rank, dp_size=dp_size)


def met(store: DictStore, dp_size: int = 3) -> list[Roll]:
    rolls = [Roll(store, spec(rank, dp_size)) for rank in range(dp_size)]
    assert together(lambda rank: rolls[rank].meet(Deadline(10_000)), range(dp_size)) == [()] * dp_size
    return rolls


# --- the listener ----------------------------------------------------------------------------------------------------


def test_a_listener_is_bound_before_its_address_is_known() -> None:
    listener = Listener()
    host, port = split_endpoint(listener.endpoint)
    with socket.create_connection((host, port), timeout=5):  # nobody has accepted, and yet it connects
        assert host == "127.0.0.1"
    listener.close()


def test_listeners_of_one_moment_never_share_a_port() -> None:
    listeners = together(lambda _: Listener(), range(20))
    endpoints = {listener.endpoint for listener in listeners if isinstance(listener, Listener)}
    assert len(endpoints) == 20
    for listener in listeners:
        if isinstance(listener, Listener):
            listener.close()


def test_a_listener_can_be_bound_where_all_ranks_expect_it() -> None:
    free = Listener()
    free.close()
    again = Listener.at(free.endpoint)
    assert again.endpoint == free.endpoint
    with pytest.raises(OSError, match="in use"):
        Listener.at(free.endpoint)
    again.close()


def test_an_ipv6_host_stands_in_brackets() -> None:
    try:
        listener = Listener("::1")
    except OSError:
        pytest.skip("no IPv6 here")
    assert listener.endpoint == f"tcp://[::1]:{listener.port}"
    assert split_endpoint(listener.endpoint) == ("::1", listener.port)
    listener.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", ""])
def test_a_wildcard_is_no_address_for_others(host: str) -> None:
    with pytest.raises(ValueError, match="reach"):
        Listener(host)


@pytest.mark.parametrize("endpoint", ["", "tcp://", "tcp://host", "host:1", "tcp://:1", "tcp://host:x", "ipc://a:1"])
def test_what_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="tcp://host:port"):
        split_endpoint(endpoint)


def test_a_listener_makes_one_store_and_keeps_it() -> None:
    listener = Listener()
    made: list[tuple[str, int]] = []

    def make(host: str, port: int, fd: int) -> object:
        made.append((host, port))
        os.close(fd)
        return object()

    assert listener.server(make) is listener.server(make)
    assert made == [("127.0.0.1", listener.port)]
    listener.close()
    with pytest.raises(ValueError, match="closed"):
        listener.server(make)


# --- the roll --------------------------------------------------------------------------------------------------------


def test_who_has_not_come_is_absent() -> None:
    store = DictStore()
    absent = together(lambda rank: Roll(store, spec(rank, 4)).meet(Deadline(200)), [0, 2])
    assert absent == [(1, 3)] * 2


def test_who_has_not_announced_this_count_is_missing() -> None:
    store = DictStore()
    rolls = met(store)
    rolls[0].announce(7)
    rolls[1].announce(6)
    until(lambda: store.values["at/0"] == b"7" and store.values["at/1"] == b"6", "both announcements")
    assert rolls[0].missing(7) == (1, 2)
    assert rolls[0].missing(6) == (2,)


def test_a_store_that_does_not_answer_means_that_rank_0_is_missing() -> None:
    store = StoppedStore()
    rolls = met(store)
    store.stopped.set()
    began = time.monotonic()
    assert rolls[1].missing(1) == (0,)
    assert rolls[1].server_gone() == (0,)
    assert time.monotonic() - began < 2 * STORE_ANSWER_S + 5
    store.go_on.set()


def test_a_store_that_is_gone_means_that_rank_0_is_missing() -> None:
    roll = Roll(DeadStore(), spec(1))
    assert (roll.missing(1), roll.server_gone()) == ((0,), (0,))


def test_a_store_that_answers_is_not_gone() -> None:
    assert met(DictStore())[1].server_gone() == ()


def test_a_live_process_has_not_ended_and_a_dead_one_has_even_before_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-I", "-c", "input()"], stdin=subprocess.PIPE)
    place, _, _ = this_process().split(" ")
    with open(f"/proc/{child.pid}/stat") as file:
        started = file.read().rpartition(")")[2].split()[19]
    alive = f"{place} {child.pid} {started}"
    assert not has_ended(alive)
    child.kill()
    until(lambda: has_ended(alive), "the child to end")
    child.wait()
    assert child.stdin is not None
    child.stdin.close()
    assert has_ended(alive)


def test_our_own_process_has_not_ended() -> None:
    assert not has_ended(this_process())


def test_a_pid_that_is_used_again_is_another_process() -> None:
    place, pid, started = this_process().split(" ")
    assert has_ended(f"{place} {pid} {int(started) + 1}")


def test_nothing_is_said_about_processes_of_other_hosts() -> None:
    assert not has_ended("another-host/1 1 1")


def test_rolls_name_the_dead_of_this_host() -> None:
    store = DictStore()
    rolls = met(store)
    place, pid, started = this_process().split(" ")
    store.values["who/2"] = f"{place} {pid} {int(started) + 1}".encode()
    rolls[0].meet(Deadline(1_000))
    assert rolls[0].dead() == (2,)


# --- calls that may never return -------------------------------------------------------------------------------------


def test_a_slow_call_is_left_behind_at_its_limit() -> None:
    go_on = threading.Event()
    slow = Slow(lambda: go_on.wait(), "slow")
    with pytest.raises(TimeoutError):
        slow.result(0.05)
    go_on.set()
    assert slow.result(10) is True


def test_a_slow_call_raises_what_it_raised() -> None:
    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        Slow(fail, "slow").result(10)
