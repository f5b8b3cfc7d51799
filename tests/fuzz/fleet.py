"""A formed fleet that strangers throw junk at, and what must be true of it all the same.

Every place of every deployment is taken: a well-formed registration of a stranger is then a duplicate. A well-formed
request for a start is no junk either, and may cost an empty wave; so waves are not compared, and everything else is.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any, Self

import zmq
from hypothesis import HealthCheck, settings

from wavekeeper.proto.codec import encode
from wavekeeper.proto.messages import Attach, Kind

from ..processes.engines import CountingEngine
from ..processes.house import FLEET, Coordinator, eventually

BOUNDED = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
"""A few seconds for each test, and the same examples in every run."""

STRANGER = "f" * 16
WAIT_MS = 10_000


class FuzzedFleet:
    """A coordinator's process and all of its ranks."""

    def __init__(self, folder: Path) -> None:
        self.coordinator = Coordinator(folder, FLEET)
        self.engines: list[CountingEngine] = []
        self.before: dict[str, Any] = {}
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def __enter__(self) -> Self:
        control = self.coordinator.start().facts["control"]
        try:
            self.engines += [CountingEngine(control, "moe", Kind.MOE, rank, 3) for rank in range(3)]
            self.engines += [CountingEngine(control, "dense", Kind.DENSE, rank, 2) for rank in range(2)]
            for engine in self.engines:
                engine.agent.wait_ready(20)
            self.before = self.standing()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)
        for engine in self.engines:
            engine.close()
        self.coordinator.kill()

    def dealer(self) -> "zmq.Socket[bytes]":
        """A stranger's socket to the control endpoint."""
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        socket.connect(self.coordinator.facts["control"])
        return socket

    def status(self) -> dict[str, Any]:
        code, body = self.coordinator.get("/v1/status")
        assert code == 200
        status: dict[str, Any] = json.loads(body)
        return status

    def dropped(self) -> Counter[str]:
        """Everything that was dropped, by reason."""
        status = self.status()
        parts = [status["dropped"], *(deployment["dropped"] for deployment in status["deployments"])]
        return sum((Counter(part) for part in parts), Counter())

    def standing(self) -> dict[str, Any]:
        """What no stranger may change."""
        status = self.status()
        same = ("epoch", "lost_ranks", "ranks_up", "ready", "fault", "hold")
        return {
            "term": status["term"],
            **{
                d["name"]: [d.get(key) for key in same] + [rank["incarnation"] for rank in d["ranks"]]
                for d in status["deployments"]
            },
        }

    def assert_unharmed(self) -> None:
        """Nothing has changed, nothing was logged that needs a programmer, and both deployments serve."""
        assert self.standing() == self.before
        for engine in self.engines:
            goal = engine.done + 1
            engine.submit(1)
            eventually(lambda engine=engine, goal=goal: engine.has_done(goal), f"rank {engine.rank} to serve")  # type: ignore[misc]
            assert not engine.errors
        assert "Traceback" not in self.coordinator.logged()

    def settle(self, socket: "zmq.Socket[bytes]") -> None:
        """Wait until everything that was sent on this socket has been handled: its messages keep their order."""
        socket.send_multipart(encode(Attach(front_end=STRANGER, deployment="moe")))
        while b"attached" not in b"".join(socket.recv_multipart()):
            pass
