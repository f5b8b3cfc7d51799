"""Every route: what it says, when it refuses, and that asking changes nothing."""

import asyncio
from typing import Any

import httpx2
import msgspec
import pytest

from wavekeeper.coordinator.core import DeploymentSpec, Fleet, FleetSpec
from wavekeeper.coordinator.core import view as core_view
from wavekeeper.coordinator.status.app import make_app
from wavekeeper.coordinator.status.report import Status
from wavekeeper.proto.messages import Kind, Phase

from .fakes import (
    BrokenService,
    Service,
    StuckService,
    ask,
    busy_fleet,
    dense,
    deployment_view,
    faulted_moe,
    fleet_view,
    moe,
    rank_view,
    without,
)

ROUTES = ["/", "/livez", "/healthz", "/readyz", "/health", "/metrics", "/v1/status", "/v1/deployments"]
STUCK = "the coordinator's loop did not answer within 1 s"


def get(source: Service, path: str, **headers: str) -> httpx2.Response:
    return ask(make_app(source), path, **headers)


def problem(answer: httpx2.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["status"] == answer.status_code
    return body


# --- alive -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/livez", "/healthz"])
def test_a_loop_that_answers_is_alive(path: str) -> None:
    answer = get(Service(), path)
    assert (answer.status_code, answer.text) == (200, "ok")


@pytest.mark.parametrize("path", ["/livez", "/healthz"])
def test_a_loop_that_hangs_is_not_alive(path: str) -> None:
    assert problem(get(StuckService(), path))["detail"] == STUCK


def test_a_coordinator_whose_deployments_are_broken_or_that_stops_is_alive() -> None:
    assert get(Service(fleet_view(faulted_moe()), stopping=True), "/livez").status_code == 200


def test_verbose_livez_has_a_line_for_the_loop() -> None:
    assert get(Service(), "/livez?verbose").text == "[+]service-loop ok\nlivez check passed\n"
    stuck = get(StuckService(), "/livez?verbose")
    assert stuck.status_code == 503
    assert stuck.text == f"[-]service-loop failed: {STUCK}\nlivez check failed\n"


# --- ready -----------------------------------------------------------------------------------------------------------


def test_ready_when_every_deployment_can_serve() -> None:
    answer = get(Service(), "/readyz")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "reasons": [], "degraded": []})


def test_not_ready_names_the_deployment_and_what_it_waits_for() -> None:
    answer = get(Service(fleet_view(faulted_moe(), dense())), "/readyz")
    assert answer.status_code == 503
    assert answer.json()["ready"] is False
    assert answer.json()["degraded"] == [], "it is worse than degraded"
    assert answer.json()["reasons"] == [
        "demo-moe faulted (rank 3 fell silent for 5.0 s); waits for rank 3 to register, since 2.0 s"
    ]


def test_a_dense_deployment_without_some_of_its_replicas_stays_ready_and_is_called_degraded() -> None:
    answer = get(Service(fleet_view(without(dense(), 3))), "/readyz")
    assert answer.status_code == 200
    assert answer.json() == {"ready": True, "reasons": [], "degraded": ["demo-dense has 3 of 4 ranks"]}


def test_a_coordinator_that_stops_is_not_ready() -> None:
    answer = get(Service(stopping=True), "/readyz")
    assert answer.status_code == 503
    assert answer.json()["reasons"] == ["the coordinator is stopping"]


def test_a_hanging_loop_is_not_ready() -> None:
    assert problem(get(StuckService(), "/readyz"))["detail"] == STUCK


def test_verbose_readyz_has_a_line_for_each_deployment() -> None:
    answer = get(Service(fleet_view(faulted_moe(), without(dense(), 3)), stopping=True), "/readyz?verbose")
    assert answer.status_code == 503
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text.splitlines() == [
        "[+]service-loop ok",
        "[+]demo-dense ok: has 3 of 4 ranks",
        "[-]the coordinator is stopping",
        "[-]demo-moe faulted (rank 3 fell silent for 5.0 s); waits for rank 3 to register, since 2.0 s",
        "readyz check failed",
    ]
    assert get(Service(), "/readyz?verbose").text.endswith("readyz check passed\n")
    assert get(StuckService(), "/readyz?verbose").text.splitlines()[0] == f"[-]service-loop failed: {STUCK}"


@pytest.mark.parametrize(
    ("source", "code"),
    [(Service(), 200), (Service(fleet_view(faulted_moe())), 503), (Service(stopping=True), 503), (StuckService(), 503)],
    ids=["ready", "faulted", "stopping", "stuck"],
)
def test_health_says_what_readyz_says_with_an_empty_body(source: Service, code: int) -> None:
    answer = get(source, "/health")
    assert (answer.status_code, answer.content) == (code, b"")
    assert get(source, "/readyz").status_code == code


def test_a_fresh_core_is_alive_but_not_ready_and_says_whom_it_waits_for() -> None:
    specs = (
        DeploymentSpec(name="big", kind=Kind.MOE, dp_size=2),
        DeploymentSpec(name="small", kind=Kind.DENSE, dp_size=1),
    )
    core = Fleet(FleetSpec(boot="00000000000000ff", term=1, deployments=specs), 0)
    source = Service(core_view.fleet_view(core, 2_000))
    assert get(source, "/livez").status_code == 200
    assert get(source, "/readyz").json()["reasons"] == [
        "big waits for rank 0 and 1 to register, since 2.0 s",
        "small waits for rank 0 to register",
    ]


# --- status ----------------------------------------------------------------------------------------------------------


def test_status_is_the_whole_view_and_the_service() -> None:
    source = Service()
    body = get(source, "/v1/status").json()
    assert body["api_version"] == "v1"
    assert body["coordinator"] == msgspec.to_builtins(source.told)
    assert {key: body[key] for key in msgspec.to_builtins(source.view)} == msgspec.to_builtins(source.view)


def test_status_reads_back_as_the_struct_that_it_was() -> None:
    status = msgspec.json.decode(get(Service(), "/v1/status").content, type=Status)
    assert status.deployments == busy_fleet().deployments


def test_a_dense_deployment_shows_its_three_zeros() -> None:
    body = get(Service(), "/v1/deployments/demo-dense").json()
    assert {key: body[key] for key in ("group_operations", "process_groups", "wave_messages")} == {
        "group_operations": 0,
        "process_groups": 0,
        "wave_messages": 0,
    }


def test_deployments_are_all_and_one_by_name() -> None:
    every = get(Service(), "/v1/deployments").json()
    assert [deployment["name"] for deployment in every["deployments"]] == ["demo-moe", "demo-dense"]
    assert get(Service(), "/v1/deployments/demo-moe").json() == every["deployments"][0]


def test_a_deployment_is_found_by_any_legal_name() -> None:
    source = Service(fleet_view(deployment_view("qwen3-0.6B_v1", Kind.DENSE, [rank_view(0)])))
    assert get(source, "/v1/deployments/qwen3-0.6B_v1").status_code == 200


def test_what_is_not_known_is_null_and_not_zero() -> None:
    source = Service(fleet_view(deployment_view("a", Kind.DENSE, [rank_view(0, load_age_s=None)])))
    assert get(source, "/v1/deployments/a").json()["ranks"][0]["load_age_s"] is None


# --- refusals --------------------------------------------------------------------------------------------------------


def test_an_unknown_deployment_is_told_which_ones_are_known() -> None:
    answer = get(Service(), "/v1/deployments/nobody")
    body = problem(answer)
    assert answer.status_code == 404
    assert body["detail"] == "there is no deployment 'nobody'; there is demo-moe, demo-dense"
    assert body["known"] == ["demo-moe", "demo-dense"]
    assert body["instance"] == "/v1/deployments/nobody"
    assert body["title"] == "Not Found"


@pytest.mark.parametrize("path", ["/nowhere", "/v1/status/", "/v1/deployments/a/b", "/favicon.ico"])
def test_an_unknown_path_is_a_problem_and_no_redirect(path: str) -> None:
    answer = get(Service(), path)
    assert answer.status_code == 404
    assert "/v1/status" in problem(answer)["detail"]


@pytest.mark.parametrize("path", ROUTES)
def test_nothing_can_be_posted(path: str) -> None:
    source = Service()
    answer = ask(make_app(source), path, method="POST")
    assert answer.status_code == 405
    assert "read-only" in problem(answer)["detail"]
    assert "GET" in answer.headers["allow"]
    assert source.asked == []


@pytest.mark.parametrize(
    "path", ["/", "/livez", "/readyz", "/v1/status", "/v1/deployments", "/v1/deployments/demo-moe"]
)
def test_while_the_loop_hangs_every_route_is_a_503_problem(path: str) -> None:
    answer = get(StuckService(), path)
    assert answer.status_code == 503
    assert problem(answer)["detail"] == STUCK


def test_while_the_loop_hangs_a_scrape_fails_in_plain_text() -> None:
    answer = get(StuckService(), "/metrics")
    assert (answer.status_code, answer.text) == (503, STUCK)
    assert answer.headers["content-type"].startswith("text/plain")


def test_a_bug_is_a_500_that_tells_strangers_nothing() -> None:
    answer = get(BrokenService(), "/v1/status")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "bug" in problem(answer)["detail"]


@pytest.mark.parametrize("source", [Service(), StuckService(), BrokenService()], ids=["well", "stuck", "broken"])
@pytest.mark.parametrize("path", [*ROUTES, "/nowhere"])
def test_no_answer_may_be_kept(source: Service, path: str) -> None:
    assert get(source, path).headers["cache-control"] == "no-store"


def test_a_head_request_is_answered_like_a_get() -> None:
    assert ask(make_app(Service()), "/livez", method="HEAD").status_code == 200


# --- reading only ----------------------------------------------------------------------------------------------------


def test_a_thousand_probes_only_ask_for_the_view() -> None:
    source = Service()
    app = make_app(source)
    assert source.asked == []
    before = msgspec.json.encode(source.view)

    async def probe() -> None:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://coordinator") as client:
            for index in range(1_000):
                path = ("/livez", "/healthz", "/readyz", "/health")[index % 4]
                assert (await client.get(path)).status_code == 200

    asyncio.run(probe())
    assert source.asked.count("fleet") == 1_000
    assert set(source.asked) == {"fleet", "info"}
    assert msgspec.json.encode(source.view) == before


@pytest.mark.parametrize("path", [*ROUTES, "/v1/deployments/demo-moe"])
def test_one_request_asks_the_loop_once(path: str) -> None:
    source = Service()
    get(source, path)
    assert source.asked.count("fleet") == 1


def test_every_phase_can_be_shown_on_every_route() -> None:
    for phase in Phase:
        source = Service(fleet_view(moe(phase=phase), dense()))
        assert {get(source, path).status_code for path in ROUTES} == {200}, phase
