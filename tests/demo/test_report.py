"""The report's figures and its judgement, from made-up counters; and how both are shown."""

import io
import json
from collections.abc import Sequence

import msgspec
import pytest
from rich.console import Console

from wavekeeper.proto.messages import Counters, Kind, Load, Mode, Phase
from wavekeeper.worker_agent.demo.display import Progress, progress_line, progress_view
from wavekeeper.worker_agent.demo.replay import Outcome, Tally
from wavekeeper.worker_agent.demo.report import (
    FOOTNOTES,
    DeploymentReport,
    DeploymentSeen,
    Disturbance,
    ExchangeSeen,
    Percentiles,
    RankFinal,
    RankSeen,
    Report,
    deployment_report,
    make_report,
    percentiles,
    report_view,
)
from wavekeeper.worker_agent.demo.trace import Arrival, Slice
from wavekeeper.worker_agent.demo.wire import GenerateRequest

SLICE = Slice("t.csv", (Arrival(0.0, 10, 10), Arrival(3.0, 10, 10)), 2)
LOCKSTEP = Counters(
    waves=3,
    empty_waves=1,
    steps=40,
    dummy_steps=10,
    steps_after_last_work=1,
    group_operations=40,
    wave_messages=7,
    exchange_p50_us=100.0,
    exchange_p99_us=900.0,
)
DENSE = Counters(steps=5)
SLOWER_AT_P50 = msgspec.structs.replace(LOCKSTEP, exchange_p50_us=300.0, exchange_p99_us=400.0)


def outcome(number: int, tokens: Sequence[int] = (1, 2), error: str = "", latency_s: float | None = 0.5) -> Outcome:
    return Outcome("d", GenerateRequest(f"r{number}", [1], 2), 0, latency_s, list(tokens), error)


def outputs(outcomes: Sequence[Outcome]) -> dict[str, list[int]]:
    return {outcome.request.id: outcome.tokens for outcome in outcomes}


def seen(kind: Kind, waves: int = 0, wave_messages: int = 0, told: int = 0) -> DeploymentSeen:
    """A view whose ranks have told `told` wave messages each, by their last heartbeat."""
    return DeploymentSeen(
        name="d",
        kind=kind,
        phase=Phase.IDLE if kind.lockstep else Phase.SERVING,
        waves=waves,
        wave_messages=wave_messages,
        exchange=ExchangeSeen("shm") if kind.lockstep else None,
        ranks=[RankSeen(rank, up=True, counters=Counters(wave_messages=told)) for rank in range(2)],
    )


def moe(
    *counters: Counters, outcomes: Sequence[Outcome] = (outcome(0), outcome(2)), waves: int = 3
) -> DeploymentReport:
    finals = [RankFinal(rank, agent) for rank, agent in enumerate(counters)]
    view = seen(Kind.MOE, waves=waves, wave_messages=20, told=4)
    return deployment_report(Kind.MOE, 2, outcomes, finals, view, outputs(outcomes))


def dense(*finals: RankFinal) -> DeploymentReport:
    return deployment_report(Kind.DENSE, 2, [outcome(1)], finals, seen(Kind.DENSE), outputs([outcome(1)]))


def test_figures_that_all_lockstep_ranks_share_are_told_once_and_the_others_added() -> None:
    report = moe(LOCKSTEP, SLOWER_AT_P50)

    assert report.problems == []
    assert (report.waves, report.empty_waves, report.steps, report.group_operations) == (3, 1, 40, 40)
    assert (report.dummy_steps, report.process_groups, report.steps_after_last_work) == (20, 0, 1)
    assert report.exchange_backend == "shm"
    assert report.tokens_generated == 4
    assert [rank.rank for rank in report.ranks] == [0, 1]


def test_wave_messages_are_the_coordinators_own_and_the_final_ones_of_the_ranks() -> None:
    assert moe(LOCKSTEP, LOCKSTEP).wave_messages == (20 - 2 * 4) + 2 * 7


def test_exchange_times_are_of_the_middle_and_of_the_worst_rank() -> None:
    assert moe(LOCKSTEP, SLOWER_AT_P50).exchange_us == Percentiles(100.0, 900.0)


def test_a_dense_deployment_has_sums_and_zeros() -> None:
    report = dense(RankFinal(0, DENSE), RankFinal(1, DENSE))

    assert report.problems == []
    assert report.steps == 10
    zeros = (report.waves, report.dummy_steps, report.group_operations, report.process_groups, report.wave_messages)
    assert zeros == (0, 0, 0, 0, 0)
    assert report.exchange_backend is None
    assert report.exchange_us == Percentiles()


@pytest.mark.parametrize(
    ("counters", "problem"),
    [
        ([LOCKSTEP], "no final counters of rank 1"),
        ([LOCKSTEP, msgspec.structs.replace(LOCKSTEP, waves=2)], "the ranks differ in waves: [3, 2]"),
        (
            [msgspec.structs.replace(LOCKSTEP, group_operations=41)] * 2,
            "41 group operations in 40 steps; must be one in each",
        ),
        (
            [msgspec.structs.replace(LOCKSTEP, steps_after_last_work=2)] * 2,
            "a wave went on for 2 steps after its last work; 1 is enough",
        ),
    ],
)
def test_what_lockstep_forbids_is_a_problem(counters: list[Counters], problem: str) -> None:
    assert moe(*counters).problems == [problem]


def test_a_coordinator_that_has_counted_other_waves_is_a_problem() -> None:
    assert moe(LOCKSTEP, LOCKSTEP, waves=4).problems == ["the coordinator has counted 4 waves, the ranks 3"]


@pytest.mark.parametrize("name", ["waves", "dummy_steps", "group_operations", "process_groups", "wave_messages"])
def test_any_group_work_of_a_dense_rank_is_a_problem(name: str) -> None:
    busy = RankFinal(0, msgspec.structs.replace(DENSE, **{name: 1}))

    assert dense(busy, RankFinal(1, DENSE)).problems == [f"{name} is 1, must be 0"]


def test_a_dense_rank_that_has_loaded_torch_distributed_for_the_exchange_is_a_problem() -> None:
    for final in (RankFinal(1, DENSE, torch_dist_imported=True), RankFinal(1, DENSE, default_group=True)):
        assert dense(RankFinal(0, DENSE), final).problems == ["rank 1 has made or loaded what only a group needs"]


def test_a_lost_request_is_counted_and_its_output_not_compared() -> None:
    report = moe(LOCKSTEP, LOCKSTEP, outcomes=[outcome(0), outcome(2, tokens=(), error="gone", latency_s=None)])

    assert (report.requests_sent, report.requests_completed, report.requests_lost) == (2, 1, 1)
    assert report.output_check
    assert report.problems == ["1 of 2 requests were lost"]


def test_what_failed_with_a_killed_rank_is_told_apart_from_what_was_lost() -> None:
    killed = msgspec.structs.replace(outcome(2, tokens=(), error="its rank was killed", latency_s=None), with_rank=True)
    report = moe(LOCKSTEP, LOCKSTEP, outcomes=[outcome(0), killed])

    assert (report.requests_sent, report.requests_completed, report.requests_lost) == (2, 1, 0)
    assert report.requests_failed_with_rank == 1
    assert report.problems == []


def test_a_coordinator_that_was_restarted_need_not_know_all_waves() -> None:
    finals = [RankFinal(rank, LOCKSTEP) for rank in range(2)]
    report = deployment_report(Kind.MOE, 2, [], finals, seen(Kind.MOE, waves=1), {}, coordinator_restarted=True)

    assert report.problems == []


def test_an_output_that_one_rank_alone_would_not_make_is_a_problem() -> None:
    made = [outcome(0), outcome(2)]
    finals = [RankFinal(rank, LOCKSTEP) for rank in range(2)]
    view = seen(Kind.MOE, waves=3)

    for expected in ({"r0": [1, 2], "r2": [1, 3]}, {"r0": [1, 2]}):
        report = deployment_report(Kind.MOE, 2, made, finals, view, expected)
        assert not report.output_check
        assert report.problems == ["some outputs differ from those of one rank alone"]


def test_a_missing_view_is_a_problem() -> None:
    report = deployment_report(Kind.DENSE, 1, [], [RankFinal(0, DENSE)], None, {})

    assert report.problems == ["the coordinator's view could not be read"]


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles([float(n) for n in range(100, 0, -1)], digits=1) == Percentiles(50.0, 99.0)
    assert percentiles([3.0], digits=1) == Percentiles(3.0, 3.0)
    assert percentiles([1.0, 2.0], digits=1) == Percentiles(1.0, 2.0)
    assert percentiles([], digits=1) == Percentiles()


def whole(*, failure: str = "", lost: bool = False) -> Report:
    outcomes = [outcome(0), outcome(2, error="gone" if lost else "")]
    deployments = {
        "demo-moe": moe(LOCKSTEP, LOCKSTEP, outcomes=outcomes),
        "demo-dense": dense(RankFinal(0, DENSE), RankFinal(1, DENSE)),
    }
    return make_report(SLICE, speed=1.5, replay_s=2.0, elapsed_s=9.0, deployments=deployments, failure=failure)


def test_the_report_is_well_only_without_problems_and_failure() -> None:
    assert whole().ok
    assert not whole(lost=True).ok
    assert not whole(failure="rank 1 of demo-moe ended with 1").ok


def test_the_json_has_the_figures_under_their_names() -> None:
    body = json.loads(msgspec.json.encode(whole()))

    assert body["trace"]["span_s"] == 3.0
    assert body["elapsed_s"] == 9.0
    assert body["deployments"]["demo-moe"]["latency_s"] == {"p50": 0.5, "p99": 0.5}
    assert body["deployments"]["demo-moe"]["ranks"][1] == {
        "rank": 1,
        "steps": 40,
        "group_operations": 40,
        "dummy_steps": 10,
        "process_groups": 0,
        "wave_messages": 7,
        "torch_dist_imported": False,
    }
    assert body["deployments"]["demo-dense"]["exchange_us"] == {"p50": None, "p99": None}


def drawn(renderable: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_closing_table_fits_80_columns_and_names_what_is_wrong() -> None:
    well, lost = drawn(report_view(whole()), 80), drawn(report_view(whole(lost=True, failure="it broke")), 80)

    assert "all is well" in well
    assert "demo-moe 1" in well
    assert "all is well" not in lost
    assert "it broke\ndemo-moe: 1 of 2 requests were lost" in lost
    assert "…" not in well
    assert all(note in well.splitlines() for note in FOOTNOTES), "none is broken in two"


def test_the_closing_words_name_what_chaos_has_killed() -> None:
    blows = [Disturbance("rank 1 of demo-dense", at_s=11.9, back_s=2.25, requests_out=2)]
    report = msgspec.structs.replace(whole(), chaos=blows)

    assert "killed after 11.9 s, back 2.2 s later: rank 1 of demo-dense" in drawn(report_view(report), 80)


def progress(status_age_s: float | None = 0.1) -> Progress:
    ranks = [
        RankSeen(0, up=True, mode=Mode.RUNNING, wave=3, step=12, load=Load(running=2, waiting=1)),
        RankSeen(1),
    ]
    view = DeploymentSeen(name="demo-moe", kind=Kind.MOE, phase=Phase.RUNNING, epoch=1, wave=3, ranks=ranks)
    tallies = {"demo-moe": Tally(total=30, sent=9, done=6, lost=1)}
    return Progress("replaying", 12.34, tallies, {"demo-moe": view}, status_age_s)


def test_progress_fits_one_line() -> None:
    assert progress_line(progress()) == (" 12.3 s  replaying | demo-moe running in wave 3: 6/30 done, 2 open, 1 lost")


def test_a_status_that_no_longer_comes_is_said_to_be_old() -> None:
    assert "no status for 7.0 s" in progress_line(progress(7.0))
    assert "no status" not in progress_line(progress(None))


def test_the_live_table_shows_every_rank_within_80_columns() -> None:
    lines = drawn(progress_view(progress()), 80).splitlines()

    assert any(line.split() == ["demo-moe", "moe", "running", "1", "3", "9/30", "6", "2", "1"] for line in lines)
    assert any(line.split() == ["demo-moe", "0", "running", "3", "12", "2", "1"] for line in lines)
    assert any(line.split() == ["1", "not", "there"] for line in lines)


def test_rest_means_no_wave_and_no_request_anywhere() -> None:
    busy = RankSeen(1, load=Load(waiting=1))

    assert seen(Kind.MOE).at_rest
    assert not msgspec.structs.replace(seen(Kind.MOE), phase=Phase.RUNNING).at_rest
    assert not msgspec.structs.replace(seen(Kind.DENSE), ranks=[busy]).at_rest
