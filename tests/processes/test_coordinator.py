"""A real coordinator process, real sockets, agents on threads."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import zmq

from wavekeeper.proto.codec import FRAME_BYTES_MAX, HEADER, decode, encode
from wavekeeper.proto.messages import Attach, FirstRequest, Kind, Rejected, RejectReason
from wavekeeper.worker_agent import FrontEnd, RankAgent
from wavekeeper.worker_agent.errors import NotReadyError, RegistrationRefusedError

from .engines import CountingEngine
from .house import FLEET, Coordinator, eventually


@contextmanager
def fleet(coordinator: Coordinator, step_s: float = 0.0) -> Iterator[dict[str, list[CountingEngine]]]:
    control = coordinator.facts["control"]
    engines = {
        "moe": [CountingEngine(control, "moe", Kind.MOE, rank, 3, step_s) for rank in range(3)],
        "dense": [CountingEngine(control, "dense", Kind.DENSE, rank, 2, step_s) for rank in range(2)],
    }
    try:
        for engine in engines["moe"] + engines["dense"]:
            engine.agent.wait_ready(20)
        yield engines
    finally:
        for engine in engines["moe"] + engines["dense"]:
            engine.close()


def serve(front_end: FrontEnd, engines: list[CountingEngine], requests: int, units: int = 3) -> None:
    """Send requests one after the other and wait for each."""
    for _ in range(requests):
        with front_end.request() as choice:
            engine = engines[choice.rank]
            goal = engine.done + units
            engine.submit(units)
            eventually(partial(engine.has_done, goal), f"rank {choice.rank} to do its work")


def test_a_fleet_of_both_kinds_serves_and_shows_what_it_did(coordinator: Coordinator) -> None:
    assert coordinator.get("/livez")[0] == 200
    status, body = coordinator.get("/readyz")
    assert status == 503 and b"rank 0, 1 and 2" in body, "not ready before the ranks are there; says who is missing"

    with fleet(coordinator) as engines:
        front_ends = {name: FrontEnd.connect(coordinator.facts["control"], deployment=name) for name in engines}
        for name, front_end in front_ends.items():
            front_end.wait_ready(20)
            serve(front_end, engines[name], 12)
        assert coordinator.get("/readyz")[0] == 200
        moe = eventually(
            lambda: (view := coordinator.deployment("moe"))["ranks"][0]["counters"].get("steps", 0) and view,
            "the counters of rank 0",
        )
        dense = coordinator.deployment("dense")
        counters = [engine.agent.counters for engine in engines["moe"]]
        for front_end in front_ends.values():
            front_end.close()

    assert moe["wave"] >= 1 and moe["exchange"]["backend"] == "shm"
    assert all(c.group_operations == c.steps for c in counters)
    assert len({c.steps for c in counters}) == 1
    assert max(c.steps_after_last_work for c in counters) <= 1
    zeros = ("group_operations", "process_groups", "wave_messages", "dummy_steps")
    assert [dense[key] for key in zeros] == [0, 0, 0, 0]
    assert engines["moe"][0].operations == engines["moe"][1].operations == engines["moe"][2].operations
    assert not any(engine.errors for engine in engines["moe"] + engines["dense"])


def test_work_that_no_front_end_announced_starts_a_wave(coordinator: Coordinator) -> None:
    """Case B02, vllm PR 51983: the first request reaches a rank by a path that tells the coordinator nothing."""
    with fleet(coordinator) as engines:
        engines["moe"][2].submit(5)

        eventually(lambda: engines["moe"][2].done == 5, "rank 2 to do its work")
        assert coordinator.deployment("moe")["waves"] == 1


def test_a_killed_coordinator_breaks_no_running_wave_and_its_successor_goes_on(coordinator: Coordinator) -> None:
    """Cases B37 and DESIGN.md section 9: SIGKILL in the middle of a wave; the wave ends rank to rank."""
    with fleet(coordinator, step_s=0.01) as engines:
        moe = engines["moe"]
        moe[0].submit(100)
        eventually(lambda: moe[0].done >= 5, "the wave to be under way")
        coordinator.kill()
        eventually(lambda: moe[0].done == 100, "the running wave to end without a coordinator")
        moe[1].submit(7)  # asked for while nobody is there to start it

        coordinator.restart_on_the_same_ports()

        eventually(lambda: moe[1].done == 7, "the work of the gap to be served")
        moe[2].submit(3)
        eventually(lambda: moe[2].done == 3, "work after the gap to be served")
        view = coordinator.deployment("moe")
        assert not any(engine.errors for engine in moe)
    assert view["epoch"] == 1, "the group was adopted, not formed anew"
    assert view["wave"] >= 2
    assert [place[0] for place in moe[0].operations] == [1] * len(moe[0].operations)


def test_a_lost_rank_is_named_and_its_replacement_forms_the_next_epoch(coordinator: Coordinator) -> None:
    """Case B39: survivors leave the exchange by a typed error; dense ranks notice nothing."""
    with fleet(coordinator, step_s=0.002) as engines:
        moe, dense = engines["moe"], engines["dense"]
        moe[0].submit(1_000_000)
        eventually(lambda: moe[0].done >= 5, "the wave to be under way")
        moe[2].close()

        eventually(lambda: moe[0].errors and moe[1].errors, "the survivors to be told")
        assert "rank 2" in str(moe[0].errors[0]) and "rank 2" in str(moe[1].errors[0])
        assert "rank 2" in coordinator.deployment("moe")["waits_for"]
        dense[1].submit(4)
        eventually(lambda: dense[1].done == 4, "dense work to go on")
        moe[0].work = 0

        engines["moe"][2] = CountingEngine(coordinator.facts["control"], "moe", Kind.MOE, 2, 3)
        engines["moe"][2].submit(5)
        eventually(lambda: engines["moe"][2].done == 5, "the new group to serve")
        assert coordinator.deployment("moe")["epoch"] == 2
        assert not any(engine.errors for engine in dense)


def test_a_dense_replica_that_dies_leaves_routing_and_touches_no_other(coordinator: Coordinator) -> None:
    with fleet(coordinator) as engines:
        front_end = FrontEnd.connect(coordinator.facts["control"], deployment="dense")
        front_end.wait_for(lambda state: all(rank.up for rank in state.ranks), 20, "both replicas")
        engines["dense"][0].close()

        front_end.wait_for(lambda state: [rank.up for rank in state.ranks] == [False, True], 20, "rank 0 to leave")
        serve(front_end, engines["dense"], 5)
        assert coordinator.get("/readyz")[0] == 200, "degraded is still ready"
        front_end.close()
    assert engines["dense"][0].done == 0 and engines["dense"][1].done == 15


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": Kind.DENSE}, "kind: expected 'moe', got 'dense'"),
        ({"dp_size": 8}, "dp_size: expected 3, got 8"),
        ({"rank": 3}, "rank must be in 0..2, got 3"),
        ({"deployment": "other"}, "there is no deployment 'other'; there is moe, dense"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused_in_words(
    coordinator: Coordinator, change: dict[str, object], words: str
) -> None:
    """Case B34: the refusal names key, expected and got."""
    facts: dict[str, object] = {"deployment": "moe", "rank": 0, "dp_size": 3, "kind": Kind.MOE, **change}
    agent = RankAgent.connect(coordinator.facts["control"], exchanges=("shm",), **facts)  # type: ignore[arg-type]
    try:
        with pytest.raises(RegistrationRefusedError) as refused:
            agent.wait_ready(10)
    finally:
        agent.close()

    assert words in str(refused.value)


def test_a_second_process_with_a_live_rank_is_kept_out_and_told_why(coordinator: Coordinator) -> None:
    """Case B36: a duplicate does not take a living rank's place, and may wait for it to die."""
    with fleet(coordinator):
        twin = RankAgent.connect(coordinator.facts["control"], deployment="dense", rank=1, dp_size=2, kind=Kind.DENSE)
        try:
            with pytest.raises(NotReadyError, match="rank 1 is alive as incarnation"):
                twin.wait_ready(1.0)
        finally:
            twin.close()


def test_ranks_that_are_missing_are_named(coordinator: Coordinator) -> None:
    """Case B29: bounded, and says who."""
    lone = CountingEngine(coordinator.facts["control"], "moe", Kind.MOE, 1, 3)
    try:
        with pytest.raises(NotReadyError, match="the other ranks"):
            lone.agent.wait_ready(0.5)
        assert "rank 0 and 2" in coordinator.deployment("moe")["waits_for"]
    finally:
        lone.close()


def test_junk_is_counted_and_changes_nothing(coordinator: Coordinator) -> None:
    context = zmq.Context()
    with fleet(coordinator) as engines:
        before = coordinator.deployment("moe")
        junk = context.socket(zmq.DEALER)
        junk.setsockopt(zmq.LINGER, 0)
        junk.setsockopt(zmq.RCVTIMEO, 5_000)
        junk.connect(coordinator.facts["control"])
        for frames in ([b""], [b"hello"], [HEADER], [HEADER, b"\xc1"], [b"XX\x01", b""], [b"WK\x63", b""], [b"a"] * 50):
            junk.send_multipart(frames)
        raw = socket.create_connection(("127.0.0.1", int(coordinator.facts["control"].rpartition(":")[2])))
        raw.sendall(os.urandom(4096))
        answer = decode(junk.recv_multipart())  # the one whose header was ours
        dropped = eventually(
            lambda: (d := json.loads(coordinator.get("/v1/status")[1])["dropped"]).get("frames", 0) >= 4 and d,
            "the junk to be counted",
        )
        raw.close()
        engines["moe"][1].submit(2)
        eventually(lambda: engines["moe"][1].done == 2, "the fleet to serve as before")
        after = coordinator.deployment("moe")
        junk.close()
    context.term()

    assert isinstance(answer, Rejected) and answer.reason is RejectReason.MALFORMED
    assert {"frames", "magic", "version", "malformed"} <= set(dropped)
    assert (after["epoch"], after["lost_ranks"]) == (before["epoch"], 0)
    assert "Traceback" not in coordinator.logged()


def test_a_frame_above_the_limit_never_reaches_memory(coordinator: Coordinator) -> None:
    context = zmq.Context()
    with context.socket(zmq.DEALER) as big:
        big.setsockopt(zmq.LINGER, 0)
        big.connect(coordinator.facts["control"])
        big.send_multipart([HEADER, bytes(FRAME_BYTES_MAX + 1)])
        with context.socket(zmq.DEALER) as other:
            other.setsockopt(zmq.LINGER, 0)
            other.setsockopt(zmq.RCVTIMEO, 5_000)
            other.connect(coordinator.facts["control"])
            other.send_multipart(encode(Attach(front_end="0" * 16, deployment="moe")))
            decode(other.recv_multipart())
    context.term()

    assert json.loads(coordinator.get("/v1/status")[1])["dropped"] == {}, "the connection was ended below us"


@pytest.mark.parametrize("rank", [3, 4095])
def test_a_target_out_of_range_is_an_error_to_its_sender(coordinator: Coordinator, rank: int) -> None:
    """Case B35: never a silent fallback."""
    context = zmq.Context()
    with context.socket(zmq.DEALER) as sender:
        sender.setsockopt(zmq.LINGER, 0)
        sender.setsockopt(zmq.RCVTIMEO, 5_000)
        sender.connect(coordinator.facts["control"])
        sender.send_multipart(encode(FirstRequest(front_end="0" * 16, deployment="moe", ask=1, wave=0, rank=rank)))
        answer = decode(sender.recv_multipart())
    context.term()

    assert isinstance(answer, Rejected) and answer.reason is RejectReason.RANK_OUT_OF_RANGE
    assert answer.detail == f"rank must be in 0..2, got {rank}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(coordinator: Coordinator, number: signal.Signals) -> None:
    assert coordinator.process is not None
    coordinator.process.send_signal(number)

    assert coordinator.process.wait(10) == 0
    assert "stopping" in coordinator.logged() and "Traceback" not in coordinator.logged()


def test_a_taken_port_is_an_error_that_names_the_key(coordinator: Coordinator, tmp_path: Path) -> None:
    """Case B32: bind first, fail at once, say which key."""
    folder = tmp_path / "second"
    folder.mkdir()
    second = Coordinator(folder, FLEET, f"--set=coordinator.control={coordinator.facts['control']}")
    with pytest.raises(AssertionError):
        second.start()
    second.kill()

    assert "coordinator.control: cannot bind" in second.logged()
    assert second.process is not None and second.process.returncode == 1


def test_many_coordinators_start_at_once_on_one_host(tmp_path: Path) -> None:
    """Case B32: automatic ports never collide."""
    several = []
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        several.append(Coordinator(folder, FLEET))
    try:
        for each in several:
            each.start()
        ports = [each.facts[key] for each in several for key in ("control", "feed", "http")]
        assert len(set(ports)) == len(ports)
    finally:
        for each in several:
            if each.process is not None:
                each.kill()


def test_the_term_grows_over_restarts_even_if_the_clock_goes_back(tmp_path: Path) -> None:
    state = tmp_path / "term.json"
    state.write_text('{"term": 99999999999999}')  # far in the clock's future
    terms = []
    for _ in range(2):
        each = Coordinator(tmp_path, FLEET, f"--set=coordinator.state_file={state}").start()
        terms.append(each.facts["term"])
        assert each.stop() == 0
        each.kill()

    assert terms == [100000000000000, 100000000000001]
