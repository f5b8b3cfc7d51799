"""Twenty coordinators, one after the other, under load: no request is lost and no wave goes back."""

import signal
import threading
import time
from pathlib import Path

import pytest

from wavekeeper.proto.messages import Kind
from wavekeeper.worker_agent import FrontEnd
from wavekeeper.worker_agent.front_end import NoRankUpError

from .house import Coordinator, eventually
from .rank_process import Rank

CONFIG = """
coordinator:
  control: tcp://127.0.0.1:0
  feed: tcp://127.0.0.1:0
  http: {port: 0}
  timing: {heartbeat_ms: 100, stall_after_ms: 2000, dead_after_ms: 20000, start_ack_timeout_ms: 4000}
deployments:
  - {name: moe, kind: moe, dp_size: 3, exchange: shm}
  - {name: dense, kind: dense, dp_size: 2}
"""
RESTARTS = 20
LIFE_REQUESTS = 4
"""A coordinator is killed once so many more requests of each deployment have been served."""
PAUSE_S = 0.02
"""Between two requests: the group comes to rest and is woken again all the time."""
DRAIN_S = 60.0


class Sender:
    """Sends one request after the other to whatever rank its front-end picks, from a thread of its own."""

    def __init__(self, control: str, deployment: str, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.sent: list[str] = []
        self.waited = 0
        """How often no rank was known to be up, so that the request had to wait for one."""
        self.front_end = FrontEnd.connect(control, deployment=deployment)
        self.front_end.wait_ready(20)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sender-{deployment}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> list[str]:
        return [id for rank in self.ranks for id in rank.done]

    def end(self) -> None:
        self._ending.set()
        self._thread.join(10)
        self.front_end.close()

    def _run(self) -> None:
        while not self._ending.wait(PAUSE_S):
            try:
                choice = self.front_end.pick()
            except NoRankUpError:
                self.waited += 1
                continue
            id = f"r{len(self.sent)}"
            self.sent.append(id)
            self.ranks[choice.rank].work(id, 2)
            self.front_end.done(choice)


@pytest.fixture
def fleet(tmp_path: Path) -> "Fleet":
    return Fleet(tmp_path)


class Fleet:
    """A coordinator, and the ranks and a sender of each deployment."""

    def __init__(self, folder: Path) -> None:
        self.coordinator = Coordinator(folder, CONFIG)
        self.ranks: dict[str, list[Rank]] = {}
        self.senders: list[Sender] = []

    def __enter__(self) -> "Fleet":
        control = self.coordinator.start().facts["control"]
        try:
            for name, kind, dp_size in (("moe", Kind.MOE, 3), ("dense", Kind.DENSE, 2)):
                self.ranks[name] = [Rank(control, name, kind, rank, dp_size) for rank in range(dp_size)]
            eventually(lambda: all(rank.ready for ranks in self.ranks.values() for rank in ranks), "the ranks")
            self.senders = [Sender(control, name, ranks) for name, ranks in self.ranks.items()]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for sender in self.senders:
            sender.end()
        for ranks in self.ranks.values():
            for rank in ranks:
                rank.end()
        self.coordinator.kill()

    def serve_some(self) -> None:
        """Wait until each deployment has served some requests more."""
        goals = [len(sender.done) + LIFE_REQUESTS for sender in self.senders]
        eventually(
            lambda: all(len(sender.done) >= goal for sender, goal in zip(self.senders, goals, strict=True)),
            "both deployments to serve",
        )


def test_twenty_restarts_under_load_lose_no_request_and_no_wave_goes_back(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    gaps_s = []
    with fleet:
        wave = term = 0
        for _ in range(RESTARTS):
            fleet.serve_some()
            view = fleet.coordinator.deployment("moe")
            assert view["wave"] >= wave and fleet.coordinator.facts["term"] > term
            wave, term = view["wave"], fleet.coordinator.facts["term"]
            assert fleet.coordinator.process is not None
            fleet.coordinator.process.send_signal(signal.SIGKILL)
            fleet.coordinator.kill()
            began_s = time.monotonic()
            fleet.coordinator.restart_on_the_same_ports()
            waves = len(fleet.ranks["moe"][0].waves)
            eventually(lambda waves=waves: len(fleet.ranks["moe"][0].waves) > waves, "the next wave")  # type: ignore[misc]
            gaps_s.append(time.monotonic() - began_s)

        fleet.serve_some()
        for sender in fleet.senders:
            sender.end()
        for sender in fleet.senders:
            eventually(lambda sender=sender: len(sender.done) >= len(sender.sent), "all requests", DRAIN_S)  # type: ignore[misc]
            assert sorted(sender.done) == sorted(sender.sent), "each request is served, and once"
        view, dense = fleet.coordinator.deployment("moe"), fleet.coordinator.deployment("dense")

    assert (view["epoch"], view["lost_ranks"], dense["lost_ranks"]) == (1, 0, 0)
    waves_of = [rank.waves for rank in fleet.ranks["moe"]]
    assert all(waves == sorted(set(waves)) for waves in waves_of), "each wave begins once, in order"
    assert {epoch for waves in waves_of for epoch, _ in waves} == {1}
    assert not any(rank.losses for ranks in fleet.ranks.values() for rank in ranks)
    sent, waited = (sum(values) for values in zip(*((len(s.sent), s.waited) for s in fleet.senders), strict=True))
    with capsys.disabled():
        print(
            f"\n  measured: {RESTARTS} restarts, {sent} requests, 0 lost; start of a coordinator -> next wave: "
            f"median {sorted(gaps_s)[len(gaps_s) // 2]:.2f} s, longest {max(gaps_s):.2f} s; a request found no rank up "
            f"{waited} times"
        )
