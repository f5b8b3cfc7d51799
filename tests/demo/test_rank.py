"""The rank's process against the production core of a coordinator, over real sockets."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import zmq

from wavekeeper.coordinator.core.events import Received, Send, Tick
from wavekeeper.coordinator.core.fleet import Fleet
from wavekeeper.coordinator.core.specs import DeploymentSpec, FleetSpec
from wavekeeper.proto.codec import decode, encode
from wavekeeper.proto.messages import Kind, Timing
from wavekeeper.worker_agent.demo.engine import generate_alone
from wavekeeper.worker_agent.demo.model import DenseDecoder, LocalAllToAll, ModelConfig, MoeDecoder
from wavekeeper.worker_agent.demo.wire import GenerateRequest, GenerateResult, RankClient

from .fakes import DEADLINE_S, requests, wait_until

SEED = 7
DEPLOYMENTS = (
    DeploymentSpec(name="demo-moe", kind=Kind.MOE, dp_size=2),
    DeploymentSpec(name="demo-dense", kind=Kind.DENSE, dp_size=1),
)


class FleetThread:
    """The core of a coordinator behind one ROUTER, without feed, status and configuration."""

    def __init__(self) -> None:
        timing = Timing(heartbeat_ms=100, stall_after_ms=2_000, dead_after_ms=2_000)
        spec = FleetSpec(boot="0123456789abcdef", term=1, deployments=DEPLOYMENTS, timing=timing)
        self.fleet = Fleet(spec, self._now_ms())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind("tcp://127.0.0.1:0")
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "FleetThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._router.close()
        self._context.term()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)

    def running(self, deployment: str) -> int:
        """Sequences that have begun, as the ranks' load reports tell."""
        return sum(record.load.running for record in list(self.fleet.deployments[deployment].members))

    @staticmethod
    def _now_ms() -> int:
        return time.monotonic_ns() // 1_000_000

    def _run(self) -> None:
        while not self._stop.is_set():
            while self._router.poll(10):
                peer, *frames = self._router.recv_multipart()
                self._handle(Received(peer, decode(frames)))
            self._handle(Tick())

    def _handle(self, event: Received | Tick) -> None:
        for effect in self.fleet.handle(event, self._now_ms()):
            if isinstance(effect, Send):
                self._router.send_multipart([effect.peer, *encode(effect.message)], zmq.NOBLOCK)


class RankProcess:
    """One process of the demo, and the events that it tells."""

    def __init__(self, *arguments: str, pass_fds: tuple[int, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-Im", "wavekeeper.worker_agent.demo.rank", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=pass_fds,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        self._events: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))

    def event(self, name: str) -> dict[str, object]:
        """The next event, which must be this one."""
        told = self._events.get(timeout=2 * DEADLINE_S)
        assert told["event"] == name, told
        return told

    def stop(self) -> dict[str, object]:
        """Ask it to stop; it ends well and tells its counters."""
        self.process.send_signal(signal.SIGTERM)
        self.event("stopping")
        counters = self.event("counters")
        assert self.process.wait(DEADLINE_S) == 0
        return counters

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Demo:
    """A coordinator's core, the ranks that a test starts, and the port of the experts' store."""

    def __init__(self, fleet: FleetThread, listener: socket.socket) -> None:
        self.fleet = fleet
        self._listener = listener
        self._started: list[RankProcess] = []

    def start(self, deployment: str, kind: str, rank: int = 0, dp_size: int = 1) -> RankProcess:
        identity = ["--deployment", deployment, "--kind", kind, "--rank", str(rank), "--dp-size", str(dp_size)]
        arguments = ["--control", self.fleet.endpoint, *identity, "--seed", str(SEED), "--parent", str(os.getpid())]
        fds: tuple[int, ...] = ()
        if kind == "moe":
            arguments += ["--store", f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"]
            if rank == 0:
                fds = (self._listener.fileno(),)
                arguments += ["--store-fd", str(fds[0])]
        process = RankProcess(*arguments, pass_fds=fds)
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in self._started:
            process.end()


@pytest.fixture
def demo() -> Iterator[Demo]:
    with FleetThread() as fleet, socket.create_server(("127.0.0.1", 0)) as listener:
        demo = Demo(fleet, listener)
        try:
            yield demo
        finally:
            demo.end()


@contextmanager
def clients(*ranks: dict[str, object]) -> Iterator[list[RankClient]]:
    made = [RankClient(str(ready["serve"])) for ready in ranks]
    try:
        yield made
    finally:
        for client in made:
            client.close()


def answers(clients: list[RankClient], asked: list[GenerateRequest]) -> dict[str, GenerateResult]:
    """Spread the requests over the ranks and return the results."""
    for number, request in enumerate(asked):
        assert clients[number % len(clients)].submit(request)
    results: dict[str, GenerateResult] = {}
    for number in range(len(asked)):
        result = clients[number % len(clients)].receive(int(DEADLINE_S * 1000))
        assert result is not None, f"{len(results)} of {len(asked)} results came"
        assert result.id not in results
        results[result.id] = result
    return results


def test_a_moe_deployment_serves_loses_a_rank_takes_a_replacement_and_serves_again(demo: Demo) -> None:
    asked = requests(12)
    expected = generate_alone(MoeDecoder(ModelConfig(seed=SEED), LocalAllToAll()), asked)
    first, second = (demo.start("demo-moe", "moe", rank, 2) for rank in range(2))
    with clients(first.event("ready"), second.event("ready")) as both:
        results = answers(both, asked)
        assert {id: result.tokens for id, result in results.items()} == expected
        assert {result.rank for result in results.values()} == {0, 1}

        wait_until(lambda: demo.fleet.running("demo-moe") == 0, "the reports of an empty queue")
        both[0].submit(GenerateRequest("long", [1], 500))
        wait_until(lambda: demo.fleet.running("demo-moe") == 1, "the request to begin")
        second.process.kill()
        failed = both[0].receive(int(DEADLINE_S * 1000))
        assert failed is not None
        assert failed.error
        assert len(failed.tokens) < 500

    third = demo.start("demo-moe", "moe", 1, 2)
    ready = third.event("ready")
    with clients(ready) as replacement:
        results = answers(replacement, asked)
        assert {id: result.tokens for id, result in results.items()} == expected

    counters = first.stop()
    third.stop()
    assert counters["default_group"] is True, "tokens of a moe deployment travel in the engine's own group"
    assert counters["torch_dist_imported"] is False, "the shm exchange needs no torch"
    agent, engine = counters["agent"], counters["engine"]
    assert isinstance(agent, dict)
    assert isinstance(engine, dict)
    assert agent["process_groups"] == 0
    assert agent["dummy_steps"] == engine["dummy_forwards"] > 0, "rank 0 ran dummies for the replacement's requests"
    assert (engine["requests_done"], engine["requests_failed"]) == (6, 1)


def test_a_dense_deployment_serves_without_any_group(demo: Demo) -> None:
    asked = requests(12)
    rank = demo.start("demo-dense", "dense")
    with clients(rank.event("ready")) as only:
        results = answers(only, asked)
    demo.fleet.stop()
    counters = rank.stop()  # neither stopping nor its counters need a coordinator
    alone = generate_alone(DenseDecoder(ModelConfig(seed=SEED)), asked)
    assert {id: result.tokens for id, result in results.items()} == alone
    assert counters["default_group"] is False
    assert counters["torch_dist_imported"] is False
    agent, engine = counters["agent"], counters["engine"]
    assert isinstance(agent, dict)
    assert isinstance(engine, dict)
    assert all(agent[name] == 0 for name in ("waves", "dummy_steps", "group_operations", "process_groups"))
    assert agent["wave_messages"] == engine["dummy_forwards"] == 0


def test_a_rank_of_the_wrong_kind_is_refused_and_ends_with_status_2(demo: Demo) -> None:
    rank = demo.start("demo-dense", "moe")
    assert rank.event("refused")["reason"] == "kind_mismatch"
    assert rank.process.wait(DEADLINE_S) == 2


def test_a_rank_that_is_stopped_before_its_group_is_complete_ends_well(demo: Demo) -> None:
    rank = demo.start("demo-moe", "moe", 0, 2)
    wait_until(lambda: len(demo.fleet.fleet.deployments["demo-moe"].members) == 1, "its registration")
    counters = rank.stop()
    assert counters["default_group"] is False, "there was no forward, so there is no group"


ORPHANER = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, *sys.argv[1:], "--parent", str(os.getpid())])
print(child.pid, flush=True)
child.wait()
"""


def test_a_rank_whose_parent_is_killed_is_gone_within_seconds(demo: Demo) -> None:
    arguments = ["--control", demo.fleet.endpoint, "--deployment", "demo-dense", "--kind", "dense", "--rank", "0"]
    rank = ["-Im", "wavekeeper.worker_agent.demo.rank", *arguments, "--dp-size", "1"]
    parent = subprocess.Popen(
        [sys.executable, "-I", "-c", ORPHANER, *rank], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    with parent.stdout as lines:
        pid = int(lines.readline())
        try:
            assert json.loads(lines.readline())["event"] == "ready"
            parent.kill()
            killed = time.monotonic()
            rest = [json.loads(line)["event"] for line in lines]  # ends when the orphan closes its end, by ending
            assert time.monotonic() - killed < 3
            assert rest == ["stopping", "counters"]
        finally:
            parent.kill()
            parent.wait()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
