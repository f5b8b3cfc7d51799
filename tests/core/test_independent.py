"""Stories of dense deployments: registration, loads, liveness, and nothing else at all."""

from typing import Any

import pytest

from wavekeeper.coordinator.core import Effect, Publish, Send
from wavekeeper.coordinator.core.view import deployment_view
from wavekeeper.proto import messages as m

from .stories import TIMING, Stage, dense, moe, picture, sent


def serving(dp_size: int = 4) -> Stage:
    """All dense ranks registered."""
    stage = Stage(dense(dp_size))
    stage.tell(*(rank.registers() for rank in stage.ranks))
    return stage


def test_a_dense_rank_serves_as_soon_as_it_is_registered() -> None:
    """Case B45: no forming barrier."""
    stage = Stage(dense(4))
    assert not stage.deployment.ready(stage.now_ms)
    effects = stage.tell(stage.ranks[2].registers())

    (welcome,) = sent(effects, m.Welcome)
    assert (welcome.phase, welcome.seq, welcome.epoch) == (m.Phase.SERVING, 0, 0)
    assert stage.deployment.ready(stage.now_ms)


def test_a_dense_deployment_is_never_given_a_command_whatever_happens() -> None:
    """Case B45, invariant 8: no start, no form, no fault; only welcomes and pulses go out."""
    stage = serving()
    effects: list[Effect] = []
    for rank in stage.ranks:
        effects += stage.tell(
            rank.move(has_work=True).says(m.Heartbeat), rank.says(m.LoadReport, load=m.Load(running=1))
        )
    effects += stage.tell(stage.asks_for_start(0))
    effects += stage.live(TIMING.dead_after_ms + 500, *stage.ranks[1:])
    effects += stage.tell(stage.ranks[0].registers(), stage.ranks[3].says(m.Leave))

    assert {type(e.message) for e in effects if isinstance(e, Send)} == {m.Pulse, m.Welcome}
    assert (stage.deployment.seq, stage.deployment.epoch, stage.deployment.wave) == (0, 0, 0)


WAVE_MESSAGES: list[tuple[type[m.FromRank], dict[str, Any]]] = [
    (m.Started, {}),
    (m.NeedWave, {}),
    (m.WaveComplete, {"steps": 1}),
    (m.Halted, {"reason": "x"}),
]


@pytest.mark.parametrize("kind, fields", WAVE_MESSAGES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wave_message_about_a_dense_deployment_is_counted_where_everybody_sees_it_and_dropped(
    kind: type[m.FromRank], fields: dict[str, Any]
) -> None:
    """Case B45: zero is counted, not assumed."""
    stage = serving(1)
    before = deployment_view(stage.deployment, stage.now_ms)
    assert before.wave_messages == 0
    stage.tell(stage.ranks[0].says(kind, **fields))

    view = deployment_view(stage.deployment, stage.now_ms)
    assert (view.wave_messages, view.dropped) == (1, {"wave_message_to_dense": 1})
    assert view.ranks == before.ranks


def test_a_front_end_that_asks_a_dense_deployment_for_a_start_gets_nothing() -> None:
    stage = serving(2)
    before = picture(stage.deployment)
    assert stage.tell(stage.asks_for_start(0)) == []
    assert picture(stage.deployment) == before


@pytest.mark.parametrize("make", [moe, dense])
def test_loads_of_every_rank_are_visible_in_both_kinds(make: Any) -> None:
    """Case B43, vllm PR 49204: the statistics' path is not the wave's path; rank 0 is there when idle."""
    stage = Stage(make(4))
    stage.tell(*(rank.registers() for rank in stage.ranks))
    stage.tell(stage.ranks[2].says(m.LoadReport, load=m.Load(running=3, waiting=5, kv_cache_usage=0.9)))
    effects = stage.live(200)

    updates = [e.message for e in effects if isinstance(e, Publish) and isinstance(e.message, m.Update)]
    seen = {rank.rank: rank.load.waiting for update in updates for rank in update.ranks}
    assert seen[2] == 5
    view = deployment_view(stage.deployment, stage.now_ms)
    assert [(rank.rank, rank.load.running) for rank in view.ranks] == [(0, 0), (1, 0), (2, 3), (3, 0)]
    assert (view.load.running, view.load.waiting, view.load.kv_cache_usage) == (3, 5, 0.9)


def test_a_rank_that_stops_reporting_is_shown_with_its_age_and_not_as_zero() -> None:
    """Case B43; and case B19: ages are of the coordinator's clock, never negative."""
    stage = serving(2)
    stage.tell(stage.ranks[1].says(m.LoadReport, load=m.Load(running=4)))
    stage.live(7_000)

    view = deployment_view(stage.deployment, stage.now_ms)
    assert (view.ranks[1].load.running, view.ranks[1].load_age_s) == (4, 7.0)
    assert view.ranks[0].load_age_s is None, "never reported is not the same as idle"


def test_no_time_stamp_of_another_machine_is_believed() -> None:
    """Case B19, sglang PR 27164: a rank may say that it has been busy since long before we began."""
    stage = serving(1)
    stage.tell(stage.ranks[0].says(m.Heartbeat, age_ms=7_200_000))
    rank = deployment_view(stage.deployment, stage.now_ms).ranks[0]

    assert rank.activity_s == 7_200.0 and rank.heard_s == 0.0
    assert stage.deployment.members.get(0).heard_ms == stage.now_ms


def test_an_idle_dense_deployment_wakes_the_coordinator_for_its_keepalive_alone() -> None:
    """Case B45: idle is blocked in poll."""
    stage = serving(4)
    stage.live(2_000)
    wakes = 0
    until_ms = stage.now_ms + 1_000
    while stage.now_ms < until_ms:
        due_ms = stage.fleet.next_deadline_ms(stage.now_ms)
        assert due_ms > stage.now_ms
        stage.tell(wait_ms=due_ms - stage.now_ms)
        wakes += 1
    assert wakes <= 6, "one for the keepalive, one for each rank that might have died by then"


def test_ranks_that_have_not_come_are_named_and_block_nobody() -> None:
    stage = Stage(dense(4))
    stage.tell(stage.ranks[0].registers(), stage.ranks[2].registers())

    assert stage.deployment.waits_for(stage.now_ms) == "waits for rank 1 and 3 to register"
    assert stage.deployment.ready(stage.now_ms)
