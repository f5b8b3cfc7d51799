"""The coordinator's core and the ranks' cores together, against a model of three numbers a rank.

Hypothesis plays the network and the users: it decides which message arrives next, which is lost, when a request comes,
when an engine turns, when time passes, who is cut off, and who dies. The model knows only how much work was handed
out. Whatever was played, afterwards the network is kind again, and then all work is done and all ranks stand idle in
the same wave (DESIGN.md section 10, invariants 1 to 4 and 9).
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from wavekeeper.coordinator.core import Tick
from wavekeeper.proto.messages import Mode

from .cluster import Cluster, formed_cluster
from .stories import TIMING

RANKS = 3
RANK = st.integers(0, RANKS - 1)


class Machine(RuleBasedStateMachine):
    """One deployment of three ranks, formed and idle at the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster: Cluster = formed_cluster(RANKS)
        self.handed_out = [0] * RANKS
        self.positions = [(0, 0, 0)] * RANKS

    @rule(rank=RANK, steps=st.integers(1, 3))
    def request(self, rank: int, steps: int) -> None:
        self.handed_out[rank] += steps
        self.cluster.request(rank, steps)

    @rule(rank=RANK)
    def hear(self, rank: int) -> None:
        if self.cluster.up[rank]:
            self.cluster.hear(rank)

    @rule(rank=RANK)
    def obey(self, rank: int) -> None:
        if self.cluster.down[rank]:
            self.cluster.obey(rank)

    @rule(rank=RANK)
    def lose_what_a_rank_says(self, rank: int) -> None:
        if self.cluster.up[rank]:
            self.cluster.up[rank].popleft()

    @rule(rank=RANK)
    def lose_what_a_rank_is_told(self, rank: int) -> None:
        if self.cluster.down[rank]:
            self.cluster.down[rank].popleft()

    @rule(rank=RANK)
    def double_and_overtake(self, rank: int) -> None:
        for link in (self.cluster.up[rank], self.cluster.down[rank]):
            if link:
                link.append(link[0])
                link.rotate(1)

    @rule(rank=RANK)
    def post(self, rank: int) -> None:
        self.cluster.post(rank)

    @rule(rank=RANK)
    def read(self, rank: int) -> None:
        self.cluster.read(rank)

    @rule(wait_ms=st.sampled_from([1, 30, TIMING.heartbeat_ms]))
    def time_passes(self, wait_ms: int) -> None:
        self.cluster.now_ms += wait_ms
        self.cluster.coordinator(Tick())
        for engine in self.cluster.engines:
            self.cluster.tick(engine)

    @rule(rank=RANK)
    def a_rank_is_cut_off_until_it_is_given_up(self, rank: int) -> None:
        for _ in range(TIMING.dead_after_ms // 100 + 1):
            self.time_passes(100)
            self.cluster.flow(lambda other: other != rank)
            self.cluster.up[rank].clear()
            self.cluster.down[rank].clear()

    @rule(rank=RANK)
    def a_rank_dies_and_is_replaced(self, rank: int) -> None:
        self.cluster.replace(rank)
        self.handed_out[rank] = 0
        self.positions[rank] = (0, 0, 0)

    @precondition(lambda self: self.cluster.fleet is not None)
    @rule()
    def the_coordinator_dies(self) -> None:
        self.cluster.crash()

    @precondition(lambda self: self.cluster.fleet is None)
    @rule()
    def the_coordinator_returns(self) -> None:
        self.cluster.restart()

    @invariant()
    def waves_are_together_and_never_go_back(self) -> None:
        cluster = self.cluster
        for rank, engine in enumerate(cluster.engines):
            stepper = engine.core.stepper
            now = engine.core.term, stepper.epoch, stepper.wave
            assert now[0] >= self.positions[rank][0] and now[1:] >= self.positions[rank][1:]
            self.positions[rank] = now
        in_group = [e.core.stepper.wave for e in cluster.engines if e.group and e.group == cluster.engines[0].group]
        assert not in_group or max(in_group) - min(in_group) <= 1, "no rank is two waves ahead of another"

    def teardown(self) -> None:
        if self.cluster.fleet is None:
            self.cluster.restart()
        for _ in range(200):
            self.cluster.pass_time(200)
            work = sum(engine.work for engine in self.cluster.engines)
            places = {
                (*place, e.core.stepper.epoch)
                for place, e in zip(self.cluster.waves(), self.cluster.engines, strict=True)
            }
            if not work and len(places) == 1 and next(iter(places))[0] is Mode.IDLE:
                break
        else:
            raise AssertionError(f"never idle again: {self.cluster.waves()}, {self.cluster.fleet!r}")
        assert [engine.done for engine in self.cluster.engines] == self.handed_out, "all work is done, once"
        operations = [engine.operations for engine in self.cluster.engines]
        if all(engine.core.stepper.epoch == 1 for engine in self.cluster.engines):
            assert operations[1:] == operations[:-1], "every rank did the same group operations in the same order"


Machine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_whatever_the_network_does_all_work_is_done_and_all_ranks_end_in_the_same_wave = Machine.TestCase
