"""What Prometheus reads: every rank in both kinds, nothing of those that are gone, nothing unknown told as zero."""

import math
from collections.abc import Iterable

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from wavekeeper.coordinator.core.view import DeploymentView, FleetView
from wavekeeper.coordinator.status.app import make_app
from wavekeeper.proto.messages import Kind, Load, Phase

from .fakes import (
    Service,
    ask,
    busy_fleet,
    dense,
    deployment_view,
    faulted_moe,
    fleet_view,
    hostile_fleet,
    moe,
    rank_view,
    without,
)

Labels = frozenset[tuple[str, str]]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
PER_RANK = {
    "wavekeeper_rank_up",
    "wavekeeper_rank_requests_running",
    "wavekeeper_rank_requests_waiting",
    "wavekeeper_rank_kv_cache_usage_ratio",
    "wavekeeper_rank_heartbeat_age_seconds",
    "wavekeeper_rank_load_age_seconds",
    "wavekeeper_rank_steps_total",
    "wavekeeper_rank_dummy_steps_total",
    "wavekeeper_rank_exchanging_seconds_total",
    "wavekeeper_rank_exchange_waiting_seconds_total",
    "wavekeeper_rank_last_arrivals_total",
    "wavekeeper_rank_forced_eager_total",
    "wavekeeper_rank_forced_padding_total",
    "wavekeeper_rank_padding_tokens_total",
    "wavekeeper_rank_exchange_seconds",
}
PER_DEPLOYMENT = {
    "wavekeeper_deployment_size",
    "wavekeeper_deployment_ready",
    "wavekeeper_deployment_phase",
    "wavekeeper_wave",
    "wavekeeper_epoch",
    "wavekeeper_waves_total",
    "wavekeeper_empty_waves_total",
    "wavekeeper_group_operations_total",
    "wavekeeper_process_groups",
    "wavekeeper_wave_messages_total",
    "wavekeeper_dummy_steps_total",
    "wavekeeper_deployment_requests_running",
    "wavekeeper_deployment_requests_waiting",
    "wavekeeper_deployment_load_imbalance_ratio",
    "wavekeeper_waiting_starts",
    "wavekeeper_lost_ranks_total",
    "wavekeeper_feed_gap_longest_seconds",
}
GLOBAL = {
    "wavekeeper_build_info",
    "wavekeeper_config_info",
    "wavekeeper_term",
    "wavekeeper_uptime_seconds",
    "wavekeeper_messages_received_total",
    "wavekeeper_messages_dropped_total",
}


def scrape(fleet: FleetView) -> dict[str, dict[Labels, float]]:
    """Sample name -> labels -> value."""
    return samples(parse_text(ask(make_app(Service(fleet)), "/metrics").text))


def samples(families: Iterable[Metric]) -> dict[str, dict[Labels, float]]:
    found: dict[str, dict[Labels, float]] = {}
    for family in families:
        for sample in family.samples:
            rows, labels = found.setdefault(sample.name, {}), frozenset(sample.labels.items())
            assert labels not in rows, f"{sample.name} {dict(labels)} comes twice"
            rows[labels] = sample.value
    return found


def at(**labels: str) -> Labels:
    return frozenset(labels.items())


def ranks_of(rows: dict[Labels, float], deployment: str) -> list[str]:
    return sorted({dict(labels)["rank"] for labels in rows if dict(labels)["deployment"] == deployment})


def test_the_names_are_those_that_are_documented_and_no_others() -> None:
    ours = {name for name in scrape(busy_fleet()) if name.startswith("wavekeeper_")}
    assert ours == PER_RANK | PER_DEPLOYMENT | GLOBAL


@pytest.mark.parametrize("deployment", [moe(), dense()], ids=["moe", "dense"])
def test_every_rank_has_its_row_in_every_metric_of_ranks_in_both_kinds(deployment: DeploymentView) -> None:
    found = scrape(fleet_view(deployment))
    for name in PER_RANK:
        assert ranks_of(found[name], deployment.name) == ["0", "1", "2", "3"], name
        each = 2 if name == "wavekeeper_rank_exchange_seconds" else 1
        assert len(found[name]) == 4 * each, name


@pytest.mark.parametrize("deployment", [moe(), dense()], ids=["moe", "dense"])
def test_every_metric_of_deployments_is_there_in_both_kinds(deployment: DeploymentView) -> None:
    found = scrape(fleet_view(deployment))
    for name in PER_DEPLOYMENT:
        assert {dict(labels)["deployment"] for labels in found[name]} == {deployment.name}, name


def test_the_load_of_one_rank_stands_in_its_row_and_idle_ones_say_zero() -> None:
    for name, running in (("demo-moe", 3), ("demo-dense", 5)):
        rows = scrape(busy_fleet())["wavekeeper_rank_requests_running"]
        assert [rows[at(deployment=name, rank=str(rank))] for rank in range(4)] == [0, 0, running, 0]


def test_a_rank_whose_load_reports_stop_is_marked_by_their_age() -> None:
    stale = rank_view(1, load=Load(running=7), load_age_s=42.5)
    found = scrape(fleet_view(deployment_view("a", Kind.DENSE, [rank_view(0), stale])))
    assert found["wavekeeper_rank_load_age_seconds"][at(deployment="a", rank="1")] == 42.5
    assert found["wavekeeper_rank_requests_running"][at(deployment="a", rank="1")] == 7


def test_a_load_that_was_never_reported_is_infinitely_old() -> None:
    found = scrape(fleet_view(deployment_view("a", Kind.DENSE, [rank_view(0, load_age_s=None)])))
    assert found["wavekeeper_rank_load_age_seconds"][at(deployment="a", rank="0")] == math.inf


def test_the_series_of_a_departed_rank_vanish_and_its_place_says_zero() -> None:
    before, after = scrape(fleet_view(moe())), scrape(fleet_view(faulted_moe()))
    gone = at(deployment="demo-moe", rank="3")
    for name in PER_RANK - {"wavekeeper_rank_up"}:
        assert ranks_of(before[name], "demo-moe") == ["0", "1", "2", "3"], name
        assert ranks_of(after[name], "demo-moe") == ["0", "1", "2"], name
    assert (before["wavekeeper_rank_up"][gone], after["wavekeeper_rank_up"][gone]) == (1, 0)


def test_a_dense_deployment_says_zero_for_what_a_group_would_cost() -> None:
    found = scrape(busy_fleet())
    for name in ("group_operations_total", "process_groups", "wave_messages_total", "dummy_steps_total", "waves_total"):
        assert found[f"wavekeeper_{name}"][at(deployment="demo-dense")] == 0, name
    assert found["wavekeeper_group_operations_total"][at(deployment="demo-moe")] == 480
    assert found["wavekeeper_wave_messages_total"][at(deployment="demo-moe")] == 140


def test_exchange_times_are_seconds_and_not_a_number_where_nothing_was_exchanged() -> None:
    rows = scrape(busy_fleet())["wavekeeper_rank_exchange_seconds"]
    assert rows[at(deployment="demo-moe", rank="0", quantile="0.5")] == pytest.approx(9e-6)
    assert rows[at(deployment="demo-moe", rank="0", quantile="0.99")] == pytest.approx(80e-6)
    assert math.isnan(rows[at(deployment="demo-dense", rank="0", quantile="0.5")])


@pytest.mark.parametrize("phase", Phase)
def test_exactly_one_phase_is_one(phase: Phase) -> None:
    rows = scrape(fleet_view(moe(phase=phase)))["wavekeeper_deployment_phase"]
    assert {dict(labels)["phase"] for labels, value in rows.items() if value == 1} == {phase.value}
    assert len(rows) == len(Phase)


def test_sizes_tell_configured_and_registered() -> None:
    rows = scrape(fleet_view(without(dense(), 1)))["wavekeeper_deployment_size"]
    assert rows[at(deployment="demo-dense", state="configured")] == 4
    assert rows[at(deployment="demo-dense", state="registered")] == 3


def test_imbalance_is_the_fullest_rank_by_the_mean() -> None:
    def imbalance(*running: int) -> dict[Labels, float]:
        ranks = [rank_view(rank, load=Load(running=count)) for rank, count in enumerate(running)]
        found = scrape(fleet_view(deployment_view("a", Kind.DENSE, ranks)))
        return found.get("wavekeeper_deployment_load_imbalance_ratio", {})

    assert imbalance(3, 1) == {at(deployment="a"): 1.5}
    assert imbalance(4, 4, 4) == {at(deployment="a"): 1.0}
    assert imbalance(0, 0) == {at(deployment="a"): 1.0}, "nothing to do is balanced"


def test_without_any_rank_there_is_no_imbalance() -> None:
    found = scrape(fleet_view(without(deployment_view("a", Kind.DENSE, [rank_view(0)]), 0)))
    assert "wavekeeper_deployment_load_imbalance_ratio" not in found


def test_messages_are_counted_by_type_and_drops_by_deployment_and_reason() -> None:
    found = scrape(busy_fleet())
    assert found["wavekeeper_messages_received_total"][at(type="Heartbeat")] == 1000
    assert found["wavekeeper_messages_dropped_total"] == {
        at(deployment="", reason="malformed"): 2,
        at(deployment="demo-moe", reason="stale"): 7,
    }


def test_the_program_and_its_configuration_are_named() -> None:
    found = scrape(busy_fleet())
    assert [dict(labels)["version"] for labels in found["wavekeeper_build_info"]] == ["0.1.0"]
    assert found["wavekeeper_config_info"] == {at(config_hash="0123456789ab"): 1}
    assert found["wavekeeper_term"] == {at(): 3}
    assert found["wavekeeper_uptime_seconds"] == {at(): 754.2}


def test_the_process_itself_is_measured_too() -> None:
    found = scrape(busy_fleet())
    assert found["process_resident_memory_bytes"][at()] > 0
    assert "python_info" in found


def test_names_have_no_colon_and_every_family_has_a_help() -> None:
    families = list(parse_text(ask(make_app(Service()), "/metrics").text))
    assert not [family.name for family in families if ":" in family.name or not family.documentation]


def test_nothing_that_a_stranger_writes_becomes_a_label() -> None:
    assert "onerror" not in ask(make_app(Service(hostile_fleet())), "/metrics").text


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=0.0.4;q=0.5", "text/plain; version=0.0.4; charset=utf-8"),
        (f"{OPENMETRICS};q=0.8,text/plain;q=0.5", "application/openmetrics-text; version=1.0.0; charset=utf-8"),
    ],
)
def test_the_accept_header_chooses_the_format(accept: str, content_type: str) -> None:
    answer = ask(make_app(Service()), "/metrics", Accept=accept)
    assert answer.headers["content-type"].split("; escaping=")[0] == content_type
    assert answer.headers["vary"] == "Accept"
    assert answer.text.endswith("# EOF\n") is content_type.startswith("application/openmetrics-text")


def test_both_formats_say_the_same() -> None:
    app = make_app(Service())
    text = ask(app, "/metrics", Accept=OPENMETRICS).text
    strict = samples(parse_openmetrics(text))  # type: ignore[no-untyped-call]
    plain = samples(parse_text(ask(app, "/metrics").text))
    ours = {name for name in plain if name.startswith("wavekeeper_")}
    assert {name for name in strict if name.startswith("wavekeeper_")} == ours
    for name in ours - {"wavekeeper_rank_exchange_seconds"}:  # NaN is not equal to itself
        assert strict[name] == plain[name], name


def test_two_scrapes_of_one_application_do_not_add_up() -> None:
    app = make_app(Service())
    first, second = (samples(parse_text(ask(app, "/metrics").text)) for _ in range(2))
    assert first["wavekeeper_rank_up"] == second["wavekeeper_rank_up"]
