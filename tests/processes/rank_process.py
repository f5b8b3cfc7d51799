"""One rank as a process, with an engine that is a counter: what signals are sent to.

Both sides are here. The child (`python -P rank_process.py ...`) reads one command a line, `work STEPS ID` or `leave`,
and writes one JSON event a line: `ready`, `wave` (the first step of each), `done` (a request), `lost` (out of an
exchange by an error), each with the time of the monotonic clock, which all processes of a machine share. It ends with
its standard input, so it cannot outlive the test. `Rank` is the test's side.

Nothing of a request lies in the group, so the loss of a rank costs the survivors' requests a step and no more.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from wavekeeper.proto.messages import Kind, Load
from wavekeeper.proto.rows import DUMMY, Row
from wavekeeper.worker_agent import RankAgent, Role
from wavekeeper.worker_agent.errors import AgentClosedError, AgentError, RegistrationRefusedError

END_S = 10.0
READY_S = 60.0


class Rank:
    """A rank's process, as the test sees it. `events` grows while it lives."""

    def __init__(
        self,
        control: str,
        deployment: str,
        kind: Kind,
        rank: int,
        dp_size: int,
        *,
        exchange: str = "shm",
        step_s: float = 0.0,
        log: Path | None = None,
    ) -> None:
        self.deployment = deployment
        self.rank = rank
        self.events: list[dict[str, Any]] = []
        self.signalled_ns = 0
        """When the newest signal was sent."""
        arguments = (control, deployment, kind.value, rank, dp_size, exchange, step_s)
        with open(log or os.devnull, "ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )
        self._reader = threading.Thread(target=self._read, name=f"events-{deployment}-{rank}", daemon=True)
        self._reader.start()

    def work(self, id: str, steps: int = 3) -> None:
        """Hand it a request of so many forward steps."""
        self._say(f"work {steps} {id}")

    def leave(self) -> None:
        """Make it leave its deployment and end."""
        self._say("leave")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to its process."""
        self.signalled_ns = time.monotonic_ns()
        self.process.send_signal(number)

    @property
    def done(self) -> list[str]:
        """Ids of the requests that it has served, in order."""
        return [event["id"] for event in self.of("done")]

    @property
    def ready(self) -> bool:
        return bool(self.of("ready"))

    @property
    def losses(self) -> list[dict[str, Any]]:
        """Each time that it left an exchange by an error: `error`, `type`, `lost`, `wave`, `step`, `at_ns`."""
        return self.of("lost")

    @property
    def waves(self) -> list[tuple[int, int]]:
        """(epoch, wave) of every wave that it has stepped in, in order."""
        return [(event["epoch"], event["wave"]) for event in self.of("wave")]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in list(self.events) if event["event"] == name]

    def end(self) -> None:
        """Leave nothing behind, whatever state it is in."""
        self.process.kill()  # also ends a stopped one
        self.process.wait(END_S)
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # a command that it did not live to read
        self._reader.join(END_S)

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.events.append(json.loads(line))


class Engine:
    """The child's side: a queue of requests, each a number of forward steps."""

    def __init__(self, agent: RankAgent, step_s: float) -> None:
        self.agent = agent
        self.step_s = step_s
        self.queue: deque[tuple[str, int]] = deque()
        self.place = (0, 0)

    def obey(self) -> None:
        """Read commands until there are no more."""
        for line in sys.stdin:
            command, *words = line.strip().split(" ", 2)
            if command == "leave":
                break
            self.queue.append((words[1], int(words[0])))
            self.agent.notify_work()
        self.agent.close()

    def run(self) -> None:
        self.agent.wait_ready(READY_S)
        tell("ready")
        while True:
            try:
                self.turn()
            except AgentClosedError:
                return
            except RegistrationRefusedError as error:
                tell("refused", error=str(error))
                return
            except AgentError as error:
                where = {name: getattr(error, name, None) for name in ("rank", "wave", "step")}
                tell("lost", error=str(error), type=type(error).__name__, **where)

    def turn(self) -> None:
        if not self.agent.wait(0.5):
            return
        with self.agent.turn() as turn:
            plan = turn.step(Row(num_tokens=1, has_work=True) if self.queue else DUMMY)
        if (plan.epoch, plan.wave) != self.place and plan.step:
            self.place = plan.epoch, plan.wave
            tell("wave", epoch=plan.epoch, wave=plan.wave)
        if plan.runs_forward:
            time.sleep(self.step_s)  # the model
            if self.agent.role(plan) is Role.REAL:
                self.forward()
        self.agent.report_load(Load(running=len(self.queue)))

    def forward(self) -> None:
        id, steps = self.queue[0]
        if steps > 1:
            self.queue[0] = id, steps - 1
        else:
            self.queue.popleft()
            tell("done", id=id)


def tell(name: str, **facts: object) -> None:
    print(json.dumps({"event": name, "at_ns": time.monotonic_ns(), **facts}), flush=True)


def main(control: str, deployment: str, kind: Kind, rank: int, dp_size: int, exchange: str, step_s: float) -> None:
    agent = RankAgent.connect(
        control,
        deployment=deployment,
        rank=rank,
        dp_size=dp_size,
        kind=kind,
        exchanges=(exchange,) if kind.lockstep else None,
        serve=f"test://{deployment}/{rank}/{os.getpid()}",
        attributes={"pid": str(os.getpid())},
    )
    engine = Engine(agent, step_s)
    threading.Thread(target=engine.obey, name="commands", daemon=True).start()
    try:
        engine.run()
    finally:
        agent.close()


if __name__ == "__main__":
    _, control, deployment, kind, rank, dp_size, exchange, step_s = sys.argv
    main(control, deployment, Kind(kind), int(rank), int(dp_size), exchange, float(step_s))
