"""Stories of request waves: who may start one, when it runs, when it is over, and that none is ever lost or rewound."""

from copy import deepcopy
from itertools import permutations
from random import Random

import pytest

from wavekeeper.coordinator.core import Received, Tick
from wavekeeper.proto import messages as m
from wavekeeper.proto.messages import Mode, Phase

from .cluster import Cluster, formed_cluster
from .stories import FRONT_END, TIMING, Stage, moe, picture, published, sent

# --- B01: the hand-over between waves --------------------------------------------------------------------------------


def cluster_reading_the_last_exchange_of_wave_5() -> Cluster:
    """Two ranks, wave 5 runs; both have written the row without work, and neither has read the other's."""
    cluster = formed_cluster()
    for _ in range(5):
        cluster.request(0)
        cluster.settle()
    cluster.request(0)
    cluster.flow()
    assert [cluster.post(0), cluster.post(1), cluster.read(0), cluster.read(1)] == [True] * 4
    assert cluster.post(0) and cluster.post(1)
    assert cluster.waves() == [(Mode.RUNNING, 5)] * 2
    cluster.said.clear()
    return cluster


MOVES = ("A0 ends wave 5", "A1 ends wave 5", "a request reaches A1", "C hears A0", "C hears A1", "C hears A1 again")


def play(cluster: Cluster, order: tuple[str, ...]) -> bool:
    """Play the moves in this order; False if the order is impossible, because a link is empty."""
    for move in order:
        match move:
            case "A0 ends wave 5":
                cluster.read(0)
            case "A1 ends wave 5":
                cluster.read(1)
            case "a request reaches A1":
                cluster.request(1)
            case "C hears A0" if cluster.up[0]:
                cluster.hear(0)
            case "C hears A1" | "C hears A1 again" if cluster.up[1]:
                cluster.hear(1)
            case _:
                return False
    return True


def test_whatever_the_order_around_the_end_of_a_wave_the_next_one_starts_once_on_every_rank() -> None:
    """Case B01, vllm PR 16277: all delivery orders that keep each link's own order."""
    prepared = cluster_reading_the_last_exchange_of_wave_5()
    played = 0
    for order in permutations(MOVES):
        cluster = deepcopy(prepared)
        if not play(cluster, order):
            continue
        played += 1
        cluster.settle()
        starts = [message for message in cluster.said if isinstance(message, m.Start)]
        assert sorted((start.rank, start.wave) for start in starts) == [(0, 6), (1, 6)], order
        assert [engine.done for engine in cluster.engines] == [6, 1], order
        assert cluster.waves() == [(Mode.IDLE, 7)] * 2, order
        assert cluster.lockstep.wave == 7 and cluster.lockstep.waves_run == 7, order
        assert cluster.engines[0].operations == cluster.engines[1].operations, order
        assert cluster.engines[0].operations[-2:] == ["step epoch 1 wave 6 step 1", "step epoch 1 wave 6 step 2"]
    assert played > 50


# --- B02: cold start -------------------------------------------------------------------------------------------------


def test_the_first_request_of_all_needs_nobody_but_the_rank_that_got_it() -> None:
    """Case B02, vllm PR 51983: no front-end asks; the rank's own word is enough, in one round trip."""
    cluster = formed_cluster(4)

    cluster.request(2)
    cluster.hear(2)
    for rank in range(4):
        cluster.obey(rank)

    assert cluster.waves() == [(Mode.RUNNING, 0)] * 4
    assert [cluster.post(rank) for rank in range(4)] == [True] * 4
    cluster.settle()
    assert [engine.starts for engine in cluster.engines] == [1, 1, 1, 1]
    assert cluster.engines[2].done == 1


def test_a_request_that_comes_before_the_last_rank_has_registered_waits_and_is_served() -> None:
    """Case B02, second part."""
    cluster = Cluster(4)
    cluster.flow(lambda rank: rank != 3)
    assert cluster.is_in(Phase.GATHERING)

    cluster.request(2)
    cluster.flow(lambda rank: rank != 3)
    assert cluster.waves() == [(Mode.JOINING, 0)] * 4

    cluster.settle()
    assert cluster.engines[2].done == 1
    assert [engine.starts for engine in cluster.engines] == [1, 1, 1, 1]


@pytest.mark.parametrize("formed", [0, 1])
def test_a_start_that_is_asked_for_too_early_is_remembered_and_shown_as_waiting(formed: int) -> None:
    stage = Stage(moe(2))
    for rank in stage.ranks[: 1 + formed]:
        stage.join(rank)

    effects = stage.tell(stage.asks_for_start(0))
    assert not sent(effects, m.Start)
    assert list(stage.deployment.asks) == [f"front-end {FRONT_END}"]

    for rank in stage.ranks[1 + formed :]:
        stage.join(rank)
    for rank in stage.ranks:
        rank.move(mode=Mode.IDLE, term=1, epoch=1, applied=1)
        effects = stage.tell(rank.says(m.Formed, exchange="shm"))
    assert [start.rank for start in sent(effects, m.Start)] == [0, 1]
    assert not stage.deployment.asks


# --- B03: late and repeated messages ---------------------------------------------------------------------------------


def test_a_late_first_request_starts_the_present_wave_and_excludes_nobody() -> None:
    """Case B03, vllm PR 46833: held first request, completion twice, then the held one; wave 7 never comes again."""
    stage = Stage(moe(5))
    stage.form(wave=7)
    held = stage.asks_for_start(7, rank=1, front_end="a" * 16)
    stage.run()
    assert stage.place == (Phase.RUNNING, 1, 7)

    a0, a4 = stage.ranks[0], stage.ranks[4]
    stage.tell(a0.move(mode=Mode.IDLE, wave=8).says(m.WaveComplete, steps=3))
    assert stage.place == (Phase.IDLE, 1, 8)
    effects = stage.tell(a4.move(mode=Mode.IDLE, wave=8).says(m.WaveComplete, steps=3))
    assert stage.place == (Phase.IDLE, 1, 8) and not published(effects)

    effects = stage.tell(held)
    assert [(start.rank, start.wave) for start in sent(effects, m.Start)] == [(rank, 8) for rank in range(5)]
    assert stage.place == (Phase.STARTING, 1, 8)
    assert stage.deployment.dropped["stale"] == 1, "the late request is counted, and served"


def test_a_completion_that_is_delivered_twice_is_dropped_and_counted() -> None:
    """Case B03, vllm PR 18502."""
    stage = Stage(moe(2))
    stage.form()
    stage.run()
    done = stage.ranks[0].move(mode=Mode.IDLE, wave=1).says(m.WaveComplete, steps=1)
    stage.tell(done)
    before = picture(stage.deployment)

    assert stage.tell(done) == []
    assert picture(stage.deployment) == before
    assert stage.deployment.dropped == {"stale": 1}


def every_event_of_a_wave(stage: Stage) -> list[Received]:
    """One message of each kind that a rank says in a wave, newest numbers, all heard already."""
    rank = stage.ranks[0]
    kinds: list[tuple[type[m.FromRank], dict[str, object]]] = [
        (m.Started, {}),
        (m.NeedWave, {}),
        (m.Heartbeat, {}),
        (m.LoadReport, {"load": m.Load(running=3)}),
        (m.WaveComplete, {"steps": 2}),
        (m.Formed, {"exchange": "shm"}),
        (m.FormFailed, {"reason": "x"}),
        (m.Halted, {"reason": "x"}),
        (m.Register, rank.register),
        (m.Leave, {}),
    ]
    return [rank.says(kind, **fields) for kind, fields in kinds]


def test_an_older_message_of_any_kind_changes_nothing() -> None:
    """Invariant 10: the same event twice has the effect of once; reordered ones have none."""
    stage = Stage(moe(2))
    stage.form()
    stage.run()
    late = every_event_of_a_wave(stage)
    stage.tell(stage.ranks[0].says(m.Heartbeat))
    before = picture(stage.deployment)

    for event in late:
        assert stage.tell(event) == [], event
    assert picture(stage.deployment) == before
    assert stage.deployment.dropped == {"stale": len(late)}


def test_a_first_request_that_is_delivered_twice_starts_one_wave() -> None:
    stage = Stage(moe(2))
    stage.form()
    ask = stage.asks_for_start(0)
    stage.tell(ask)
    for rank in stage.ranks:
        stage.tell(rank.move(mode=Mode.RUNNING, applied=2).says(m.Started))
    stage.end()
    assert stage.place == (Phase.IDLE, 1, 1)

    assert stage.tell(ask) == []
    assert stage.place == (Phase.IDLE, 1, 1)


# --- B05: running is evidence, not a guess ---------------------------------------------------------------------------


def test_running_is_published_when_the_last_rank_has_acknowledged_and_not_before() -> None:
    """Case B05, vllm PR 51481."""
    stage = Stage(moe(3))
    stage.form()
    a0, a1, a2 = (rank.move(mode=Mode.RUNNING, applied=2) for rank in stage.ranks)
    story: list[tuple[Received, list[Phase]]] = [
        (stage.asks_for_start(0), [Phase.STARTING]),
        (a1.says(m.Started), []),
        (a1.says(m.Heartbeat), []),
        (a0.says(m.Started), []),
        (stage.asks_for_start(0), []),
        (a2.says(m.Heartbeat), [Phase.RUNNING]),  # any later message acknowledges as well
    ]
    for event, phases in story:
        assert published(stage.tell(event)) == phases, event


def test_a_wave_may_be_over_before_its_last_acknowledgement_arrives() -> None:
    stage = Stage(moe(2))
    stage.form()
    stage.tell(stage.asks_for_start(0))
    effects = stage.tell(
        stage.ranks[0].move(mode=Mode.IDLE, wave=1, applied=2).says(m.WaveComplete, steps=1, empty=True)
    )

    assert published(effects) == [Phase.IDLE], "running was never published: there was no evidence from rank 1"
    assert stage.place == (Phase.IDLE, 1, 1)
    assert stage.deployment.waves_run == 1


def test_a_start_is_sent_again_until_it_is_acknowledged_and_only_to_those_who_have_not() -> None:
    """Cases B05 and B29 (c), B06 in the core: a lost start is made up for within an eighth of its deadline."""
    stage = Stage(moe(3))
    stage.form()
    stage.tell(stage.asks_for_start(0))
    for rank in stage.ranks[:2]:
        stage.tell(rank.move(mode=Mode.RUNNING, applied=2).says(m.Started))

    again = stage.tell(Tick(), wait_ms=TIMING.start_ack_timeout_ms // 8)
    assert [start.rank for start in sent(again, m.Start)] == [2]
    assert sent(stage.tell(Tick(), wait_ms=1), m.Start) == []
    stage.tell(stage.ranks[2].move(mode=Mode.RUNNING, applied=2).says(m.Started))
    assert stage.place == (Phase.RUNNING, 1, 0)
    assert sent(stage.tell(Tick(), wait_ms=TIMING.start_ack_timeout_ms), m.Start) == []


def test_an_ask_while_a_wave_starts_or_runs_is_not_kept_for_later() -> None:
    """The rank that gets the request asks by itself, should the wave be over by then: nothing latches."""
    stage = Stage(moe(2))
    stage.form()
    stage.tell(stage.asks_for_start(0), stage.asks_for_start(0))
    stage.run_acknowledged()
    stage.tell(stage.asks_for_start(0))
    stage.end()

    assert stage.place == (Phase.IDLE, 1, 1)
    assert stage.tell(Tick(), wait_ms=50) == []


def test_a_wave_number_that_is_ahead_of_the_coordinator_s_is_evidence_that_its_wave_has_ended() -> None:
    """DESIGN.md section 5: NeedWave(w+1) while w is believed to run."""
    stage = Stage(moe(2))
    stage.form()
    stage.run()
    effects = stage.tell(stage.ranks[1].move(mode=Mode.IDLE, wave=1, has_work=True).says(m.NeedWave))

    assert [start.wave for start in sent(effects, m.Start)] == [1, 1]
    assert stage.place == (Phase.STARTING, 1, 1)


def test_work_that_was_reported_before_the_last_wave_starts_no_other() -> None:
    """That wave has seen it: the rank's newer word is on its way, and it would be an empty wave each time."""
    stage = Stage(moe(2))
    stage.form()
    stage.tell(stage.ranks[1].move(has_work=True).says(m.NeedWave))
    assert stage.is_in(Phase.STARTING)
    effects = stage.tell(stage.ranks[0].move(wave=1, applied=2).says(m.WaveComplete, steps=2))

    assert sent(effects, m.Start) == [] and stage.place == (Phase.IDLE, 1, 1)
    effects = stage.tell(stage.ranks[1].move(wave=1, applied=2).says(m.NeedWave))
    assert [start.wave for start in sent(effects, m.Start)] == [1, 1], "what is reported for this wave starts it"


# --- B07: who decides that a wave is over ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
def test_every_rank_does_the_same_group_operations_whatever_the_arrivals(seed: int) -> None:
    """Case B07, vllm PR 45223: no cadence, no cached answers; one exchange after the last work, and none when idle."""
    random, cluster = Random(seed), formed_cluster(4)
    handed_out = 0
    for _ in range(150):
        rank = random.randrange(4)
        move = random.choice(("request", "request", "post", "read", "hear", "obey", "post", "read"))
        if move == "request" and random.random() < 0.3:
            steps = random.randint(1, 3)
            handed_out += steps
            cluster.request(rank, steps)
        elif move == "hear" and cluster.up[rank]:
            cluster.hear(rank)
        elif move == "obey" and cluster.down[rank]:
            cluster.obey(rank)
        elif move in ("post", "read"):
            getattr(cluster, move)(rank)
    cluster.settle()

    counters = [engine.core.stepper.counters() for engine in cluster.engines]
    assert sum(engine.done for engine in cluster.engines) == handed_out
    assert all(engine.operations == cluster.engines[0].operations for engine in cluster.engines)
    assert {c.steps_after_last_work for c in counters} <= {0, 1}
    assert len({(c.waves, c.steps, c.group_operations) for c in counters}) == 1


def test_an_idle_group_exchanges_nothing() -> None:
    """Case B07 (b), vllm PR 52957."""
    cluster = formed_cluster(2)
    cluster.pass_time(10_000)

    assert [engine.core.stepper.counters().group_operations for engine in cluster.engines] == [0, 0]
    assert cluster.lockstep.waves_run == 0


def test_a_start_that_comes_before_its_request_makes_an_empty_wave_that_is_counted() -> None:
    cluster = formed_cluster(2)
    ask = m.FirstRequest(front_end=FRONT_END, deployment="moe", ask=1, wave=0, rank=1)
    cluster.coordinator(Received(b"fe", ask))
    cluster.settle()

    assert cluster.waves() == [(Mode.IDLE, 1)] * 2
    counters = [engine.core.stepper.counters() for engine in cluster.engines]
    assert [(c.waves, c.empty_waves, c.steps) for c in counters] == [(1, 1, 1)] * 2
    assert cluster.lockstep.members.totals().empty_waves == 1
