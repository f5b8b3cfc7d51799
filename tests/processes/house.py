"""Real processes for tests: start, wait for a condition with a deadline, stop, leave nothing."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 30.0


def eventually(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Return the first true value of `condition`, or fail naming what was waited for."""
    until = time.monotonic() + limit_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < until, f"waited {limit_s} s for {what}"
        time.sleep(0.01)  # a pause between two looks, not a synchronisation


class Coordinator:
    """A `wavekeeper serve` process."""

    def __init__(self, folder: Path, config: str, *flags: str) -> None:
        self.folder = folder
        self.config = folder / "fleet.yaml"
        self.config.write_text(config)
        self.flags = flags
        self.facts: dict[str, Any] = {}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Coordinator":
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        self.log = open(self.folder / "coordinator.log", "ab")
        command = [sys.executable, "-P", "-m", "wavekeeper.coordinator", "serve", "--config", str(self.config)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WAVEKEEPER_")}
        self.process = subprocess.Popen(
            [*command, "--ready-file", str(ready), "--log-format", "text", *self.flags],
            stderr=self.log,
            env=environment,
        )
        eventually(lambda: ready.exists() or self.process is None or self.process.poll() is not None, "the ready file")
        assert ready.exists(), self.logged()
        self.facts = json.loads(ready.read_text())
        return self

    def restart_on_the_same_ports(self) -> None:
        """Start a new process where the killed one was."""
        control, feed, http = (self.facts[key] for key in ("control", "feed", "http"))
        self.flags = (
            f"--set=coordinator.control={control}",
            f"--set=coordinator.feed={feed}",
            f"--set=coordinator.http.port={http.rpartition(':')[2]}",
        )
        self.start()

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(LIMIT_S)
        self.log.close()

    def get(self, path: str) -> tuple[int, bytes]:
        """Status code and body of one HTTP request."""
        try:
            with urllib.request.urlopen(self.facts["http"] + path, timeout=5) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def deployment(self, name: str) -> dict[str, Any]:
        status, body = self.get(f"/v1/deployments/{name}")
        assert status == 200, body
        view: dict[str, Any] = json.loads(body)
        return view

    def logged(self) -> str:
        return (self.folder / "coordinator.log").read_text()


FLEET = """
coordinator:
  control: tcp://127.0.0.1:0
  feed: tcp://127.0.0.1:0
  http: {port: 0}
  timing: {heartbeat_ms: 100, stall_after_ms: 1000, dead_after_ms: 1500, start_ack_timeout_ms: 2000}
deployments:
  - {name: moe, kind: moe, dp_size: 3, exchange: shm}
  - {name: dense, kind: dense, dp_size: 2}
"""
