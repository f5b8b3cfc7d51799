"""SIGKILL and SIGSTOP of every part in every phase: what DESIGN.md section 9 promises, on real processes.

The law of this file: a deadline here is generous and only ends a hang; how long things really took is measured and
printed. A phase is reached and kept by stopping rank 0 where the group has to wait for it: `Fleet.enter` leaves the
deployment there, `Fleet.go_on` lets rank 0 continue.
"""

import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from wavekeeper.proto.messages import Kind, Phase

from .house import Coordinator, eventually
from .rank_process import Rank

CONFIG = """
coordinator:
  control: tcp://127.0.0.1:0
  feed: tcp://127.0.0.1:0
  http: {port: 0}
  timing: {heartbeat_ms: 100, stall_after_ms: 1000, dead_after_ms: DEAD, start_ack_timeout_ms: ACK}
deployments:
  - {name: moe, kind: moe, dp_size: 3, exchange: EXCHANGE}
  - {name: dense, kind: dense, dp_size: 2}
"""
DP_SIZE = 3
STALL_AFTER_S = 1.0
DEAD_AFTER_MS = 2_500
PATIENT_MS = 60_000
"""`dead_after` of a fleet in which nobody is given up."""
STEP_S = 0.002
ENDLESS = 1_000_000
"""Steps of a request that outlasts its test."""
MEASURE_S_MAX = 20.0
"""A figure above that is no figure of a slow machine any more."""

PHASES = [Phase.GATHERING, Phase.FORMING, Phase.IDLE, Phase.STARTING, Phase.RUNNING, Phase.HELD]

Say = Callable[[str], None]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Print a figure where it is seen also when the test passes."""

    def print_it(text: str) -> None:
        with capsys.disabled():
            print(f"\n  measured: {text}")

    return print_it


class Fleet:
    """A coordinator and the ranks of a lockstep deployment, all of them processes."""

    def __init__(self, folder: Path, *, dead_after_ms: int, exchange: str) -> None:
        ack_ms = min(dead_after_ms, 10_000)
        config = CONFIG.replace("DEAD", str(dead_after_ms)).replace("ACK", str(ack_ms)).replace("EXCHANGE", exchange)
        self.folder = folder
        self.exchange = exchange
        self.coordinator = Coordinator(folder, config).start()
        self.control = self.coordinator.facts["control"]
        self.ranks: dict[int, Rank] = {}
        self.started: list[Rank] = []
        self.held = False

    def start(self, *ranks: int) -> None:
        """Start these ranks, in place of those that are gone."""
        for rank in ranks:
            self.ranks[rank] = Rank(
                self.control,
                "moe",
                Kind.MOE,
                rank,
                DP_SIZE,
                exchange=self.exchange,
                step_s=STEP_S,
                log=self.folder / f"moe-{rank}.log",
            )
            self.started.append(self.ranks[rank])

    def start_dense(self) -> list[Rank]:
        dense = [Rank(self.control, "dense", Kind.DENSE, rank, 2, step_s=STEP_S) for rank in range(2)]
        self.started += dense
        return dense

    def start_formed(self) -> None:
        self.start(*range(DP_SIZE))
        self.reach(Phase.IDLE)
        eventually(lambda: all(rank.ready for rank in self.ranks.values()), "the ranks to be ready")

    def enter(self, phase: Phase) -> None:
        """Bring the deployment into this phase and keep it there."""
        match phase:
            case Phase.GATHERING:
                self.start(0, 1)
                eventually(lambda: self.coordinator.deployment("moe")["ranks_up"] == 2, "two ranks to register")
            case Phase.FORMING:
                self.start(0)
                eventually(lambda: self.coordinator.deployment("moe")["ranks_up"] == 1, "rank 0 to register")
                self.ranks[0].send(signal.SIGSTOP)
                self.start(1, 2)
            case Phase.IDLE:
                self.start_formed()
            case Phase.STARTING:
                self.start_formed()
                self.ranks[0].send(signal.SIGSTOP)
                self.ranks[2].work("begun", 5)
            case Phase.RUNNING:
                self.start_formed()
                self.ranks[2].work("begun", 400)
                eventually(lambda: all(rank.waves for rank in self.ranks.values()), "all ranks to be in the wave")
            case Phase.HELD:
                self.enter(Phase.RUNNING)
                assert self.operate("hold", {"mode": "keep"}) == 202
                self.held = True
            case _:
                raise ValueError(f"no test stays in phase {phase}")
        self.reach(phase)

    def go_on(self, phase: Phase) -> None:
        """Let go of what `enter` has stopped, and start what it has left out."""
        if phase is Phase.GATHERING:
            self.start(2)
        self.ranks[0].send(signal.SIGCONT)

    def reach(self, phase: Phase) -> None:
        eventually(lambda: self.coordinator.deployment("moe")["phase"] == phase, f"phase {phase}")

    def serve_all(self) -> None:
        """What was begun and one more request at each rank: all of it is served, and once, after a hold is over."""
        if self.held:  # a hold outlives its coordinator, and a fault: the ranks keep it
            eventually(lambda: self.operate("resume", {}) == 202, f"the resume to be taken: {self.why()}")
        for rank in self.ranks.values():
            rank.work("after")
        for number, rank in self.ranks.items():
            eventually(lambda rank=rank: "after" in rank.done, f"rank {number} to serve: {self.why()}")  # type: ignore[misc]
            assert len(set(rank.done)) == len(rank.done)

    def operate(self, verb: str, wish: dict[str, str]) -> int:
        """Ask for a hold or its end, and return the status code."""
        url = f"{self.coordinator.facts['http']}/v1/deployments/moe:{verb}"
        request = urllib.request.Request(url, json.dumps(wish).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    def why(self) -> str:
        return str(self.coordinator.deployment("moe")["waits_for"])

    def end(self) -> None:
        for rank in self.started:
            rank.end()
        self.coordinator.kill()


MakeFleet = Callable[..., Fleet]


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[MakeFleet]:
    made: list[Fleet] = []

    def make(*, dead_after_ms: int = DEAD_AFTER_MS, exchange: str = "shm") -> Fleet:
        made.append(Fleet(tmp_path, dead_after_ms=dead_after_ms, exchange=exchange))
        return made[-1]

    yield make
    for fleet in made:
        fleet.end()


# --- a rank of a lockstep deployment ----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_is_killed_is_named_and_its_replacement_serves(make_fleet: MakeFleet, phase: Phase) -> None:
    fleet = make_fleet()
    fleet.enter(phase)
    killed = fleet.ranks[1]

    killed.send(signal.SIGKILL)
    if phase is not Phase.GATHERING:
        fleet.go_on(phase)
        eventually(lambda: "rank 1" in fleet.why(), "the lost rank to be named")
    fleet.start(1)
    if phase is Phase.GATHERING:
        fleet.go_on(phase)

    fleet.serve_all()
    if phase in (Phase.STARTING, Phase.RUNNING, Phase.HELD):
        assert "begun" in fleet.ranks[2].done, "what a survivor held is served in the new epoch"
    assert fleet.coordinator.deployment("moe")["epoch"] <= 3
    for survivor in (fleet.ranks[0], fleet.ranks[2]):
        assert all((loss["type"], loss["rank"]) == ("RankLostError", 1) for loss in survivor.losses), survivor.losses
        assert len(survivor.losses) <= 1
        assert survivor.waves == sorted(survivor.waves), "neither epoch nor wave goes back"


@pytest.mark.parametrize("exchange", ["shm", "gloo"])
def test_survivors_of_a_killed_rank_leave_the_exchange(make_fleet: MakeFleet, exchange: str, say: Say) -> None:
    fleet = make_fleet(exchange=exchange)
    fleet.start_formed()
    fleet.ranks[0].work("endless", ENDLESS)
    eventually(lambda: all(rank.waves for rank in fleet.ranks.values()), "all ranks to be in the wave")

    fleet.ranks[1].send(signal.SIGKILL)

    survivors = (fleet.ranks[0], fleet.ranks[2])
    eventually(lambda: all(rank.losses for rank in survivors), "the survivors to leave the exchange")
    took_s = (max(rank.losses[0]["at_ns"] for rank in survivors) - fleet.ranks[1].signalled_ns) / 1e9
    say(f"SIGKILL of a rank -> last survivor out of the exchange ({exchange}): {took_s * 1000:.0f} ms")
    assert took_s < MEASURE_S_MAX
    assert all((rank.losses[0]["type"], rank.losses[0]["rank"]) == ("RankLostError", 1) for rank in survivors)
    eventually(lambda: "rank 1" in fleet.why(), "status to name the lost rank")


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_is_stopped_for_a_while_costs_nothing_but_time(make_fleet: MakeFleet, phase: Phase) -> None:
    fleet = make_fleet(dead_after_ms=PATIENT_MS)
    fleet.enter(phase)

    fleet.ranks[1].send(signal.SIGSTOP)
    fleet.go_on(phase)
    fleet.ranks[2].work("meanwhile")  # asks for a wave that cannot run without rank 1
    eventually(
        lambda: fleet.coordinator.deployment("moe")["ranks"][1]["heard_s"] > STALL_AFTER_S, "rank 1 to be silent"
    )
    assert "meanwhile" not in fleet.ranks[2].done, "no rank runs ahead of a stopped one"
    fleet.ranks[1].send(signal.SIGCONT)

    fleet.serve_all()
    view = fleet.coordinator.deployment("moe")
    assert (view["epoch"], view["lost_ranks"]) == (1, 0)
    assert not any(rank.losses for rank in fleet.ranks.values())


def test_a_stopped_rank_is_named_by_status_and_readiness(make_fleet: MakeFleet, say: Say) -> None:
    """DESIGN.md section 9: after `stall_after` status and /readyz name it."""
    fleet = make_fleet(dead_after_ms=PATIENT_MS)
    fleet.start_dense()
    fleet.start_formed()
    fleet.ranks[0].work("endless", ENDLESS)
    eventually(lambda: all(rank.waves for rank in fleet.ranks.values()), "all ranks to be in the wave")
    eventually(lambda: fleet.coordinator.get("/readyz")[0] == 200, "readiness")

    fleet.ranks[1].send(signal.SIGSTOP)

    def not_ready() -> str:
        status, body = fleet.coordinator.get("/readyz")
        return body.decode() if status == 503 else ""

    body = eventually(not_ready, "/readyz to follow the stall")
    took_s = (time.monotonic_ns() - fleet.ranks[1].signalled_ns) / 1e9
    say(f"SIGSTOP of a rank -> /readyz names it: {took_s:.2f} s (stall_after is {STALL_AFTER_S:g} s)")
    assert "rank 1" in body and "rank 1" in fleet.why()
    assert took_s < MEASURE_S_MAX
    fleet.ranks[1].send(signal.SIGCONT)
    eventually(lambda: fleet.coordinator.get("/readyz")[0] == 200, "readiness to come back with the rank")


def test_a_rank_that_was_given_up_while_it_was_stopped_comes_back(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.enter(Phase.RUNNING)

    fleet.ranks[1].send(signal.SIGSTOP)
    eventually(lambda: fleet.ranks[0].losses and fleet.ranks[2].losses, "the survivors to be told")
    fleet.ranks[1].send(signal.SIGCONT)

    fleet.serve_all()
    view = fleet.coordinator.deployment("moe")
    assert (view["epoch"], view["lost_ranks"]) == (2, 1)
    assert len(fleet.ranks[1].losses) == 1, "the one that slept leaves the old exchange by an error as well"


def test_a_stopped_rank_that_was_replaced_is_fenced_when_it_wakes(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.enter(Phase.RUNNING)
    zombie = fleet.ranks[1]

    zombie.send(signal.SIGSTOP)
    fleet.start(1)
    fleet.serve_all()
    zombie.send(signal.SIGCONT)

    eventually(lambda: zombie.of("refused"), "the zombie to be refused")
    assert (
        "replaced by incarnation" in zombie.of("refused")[0]["error"] or "no longer" in zombie.of("refused")[0]["error"]
    )
    for rank in fleet.ranks.values():
        rank.work("after the zombie")
        eventually(lambda rank=rank: "after the zombie" in rank.done, "the new group to serve on")  # type: ignore[misc]
    assert fleet.coordinator.deployment("moe")["epoch"] == 2


# --- the coordinator -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_a_coordinator_that_is_killed_in_any_phase_is_replaced_without_a_loss(
    make_fleet: MakeFleet, phase: Phase
) -> None:
    fleet = make_fleet(dead_after_ms=PATIENT_MS)
    fleet.enter(phase)
    wave = fleet.coordinator.deployment("moe")["wave"]

    fleet.coordinator.kill()
    fleet.go_on(phase)
    fleet.ranks[1].work("asked for in the gap")
    fleet.coordinator.restart_on_the_same_ports()

    fleet.serve_all()
    assert "asked for in the gap" in fleet.ranks[1].done
    view = fleet.coordinator.deployment("moe")
    assert view["lost_ranks"] == 0
    assert view["wave"] >= wave
    if phase in (Phase.IDLE, Phase.STARTING, Phase.RUNNING, Phase.HELD):
        assert view["epoch"] == 1, "a group that stood is adopted"
        assert not any(rank.losses for rank in fleet.ranks.values()), "no rank was thrown out of its wave"
    if phase in (Phase.STARTING, Phase.RUNNING, Phase.HELD):
        assert "begun" in fleet.ranks[2].done


@pytest.mark.parametrize("phase", PHASES)
def test_a_coordinator_that_is_stopped_in_any_phase_gives_nobody_up(make_fleet: MakeFleet, phase: Phase) -> None:
    fleet = make_fleet()
    fleet.enter(phase)
    assert fleet.coordinator.process is not None

    fleet.coordinator.process.send_signal(signal.SIGSTOP)
    fleet.go_on(phase)
    fleet.ranks[1].work("asked for in the gap")
    time.sleep(DEAD_AFTER_MS / 1000 + 0.5)  # the fault itself: longer than any rank may be silent
    fleet.coordinator.process.send_signal(signal.SIGCONT)

    fleet.serve_all()
    view = fleet.coordinator.deployment("moe")
    assert (view["epoch"], view["lost_ranks"]) == (1, 0)
    assert not any(rank.losses for rank in fleet.ranks.values())


def test_a_request_that_waits_for_a_coordinator_is_served_soon_after_its_return(
    make_fleet: MakeFleet, say: Say
) -> None:
    fleet = make_fleet(dead_after_ms=PATIENT_MS)
    fleet.start_formed()
    fleet.coordinator.kill()
    fleet.ranks[0].work("asked for in the gap")

    began_ns = time.monotonic_ns()
    fleet.coordinator.restart_on_the_same_ports()
    ready_ns = time.monotonic_ns()

    eventually(lambda: fleet.ranks[0].waves, "the first wave")
    wave_ns = fleet.ranks[0].of("wave")[0]["at_ns"]
    say(
        f"start of a new coordinator -> first wave: {(wave_ns - began_ns) / 1e9:.2f} s "
        f"({max(0, wave_ns - ready_ns) / 1e9:.2f} s of them after it had bound its ports)"
    )
    assert (wave_ns - began_ns) / 1e9 < MEASURE_S_MAX
    assert fleet.coordinator.deployment("moe")["epoch"] == 1


# --- a rank of a dense deployment -------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_dense_rank_that_is_killed_leaves_routing_and_touches_no_other(make_fleet: MakeFleet, busy: bool) -> None:
    fleet = make_fleet()
    dense = fleet.start_dense()
    fleet.enter(Phase.RUNNING)
    eventually(lambda: all(rank.ready for rank in dense), "the dense ranks to serve")
    if busy:
        dense[0].work("endless", ENDLESS)

    dense[0].send(signal.SIGKILL)
    dense[1].work("at once")

    eventually(lambda: "at once" in dense[1].done, "the other replica to serve")
    eventually(lambda: not fleet.coordinator.deployment("dense")["ranks"][0]["up"], "the killed rank to leave routing")
    view = fleet.coordinator.deployment("dense")
    assert "rank 0" in view["waits_for"] and view["ranks"][1]["up"]
    assert [view[zero] for zero in ("group_operations", "process_groups", "wave_messages", "dummy_steps")] == [0] * 4
    fleet.serve_all()
    assert not any(rank.losses for rank in fleet.ranks.values())
    assert fleet.coordinator.deployment("moe")["epoch"] == 1


def test_a_dense_rank_that_is_stopped_serves_its_queue_when_it_goes_on(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    dense = fleet.start_dense()
    eventually(lambda: all(rank.ready for rank in dense), "the dense ranks to serve")

    dense[0].send(signal.SIGSTOP)
    dense[0].work("queued")
    dense[1].work("at once")
    eventually(lambda: "at once" in dense[1].done, "the other replica to serve")
    eventually(lambda: not fleet.coordinator.deployment("dense")["ranks"][0]["up"], "the silent rank to leave routing")
    dense[0].send(signal.SIGCONT)

    eventually(lambda: "queued" in dense[0].done, "what it had queued to be served")
    eventually(lambda: fleet.coordinator.deployment("dense")["ranks"][0]["up"], "it to come back to routing")
