"""What an operator may ask for over HTTP, and how a wish that can have no effect is answered."""

import asyncio
from typing import Any

import httpx2
import pytest

from wavekeeper.coordinator.core.events import Wish
from wavekeeper.coordinator.core.holds import HoldWish, Operation, Refusal, ResumeWish
from wavekeeper.coordinator.core.regroups import Regroup, RegroupState
from wavekeeper.coordinator.status.app import make_app
from wavekeeper.coordinator.status.operate import BODY_BYTES_MAX
from wavekeeper.coordinator.status.report import StatusUnavailableError
from wavekeeper.proto.messages import HoldMode

from .fakes import Service

JSON = {"Content-Type": "application/json"}


class Yes:
    """Begins whatever it is asked for."""

    def __init__(self) -> None:
        self.wishes: list[tuple[str, Wish]] = []

    async def wish(self, deployment: str, wish: Wish) -> Operation | Refusal:
        self.wishes.append((deployment, wish))
        return Operation(3, wish if isinstance(wish, HoldWish) else HoldWish(), 0)


class No:
    """Refuses for one reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    async def wish(self, deployment: str, wish: Wish) -> Operation | Refusal:
        return Refusal(self.reason, "because")


class Scaling:
    """Begins a change of ranks."""

    async def wish(self, deployment: str, wish: Wish) -> Operation | Regroup | Refusal:
        return Regroup(7, (0, 1), (0, 1, 2), 0, 0, RegroupState.PREPARING)


class Stuck:
    """Its loop does not answer."""

    async def wish(self, deployment: str, wish: Wish) -> Operation | Refusal:
        raise StatusUnavailableError("no answer")


def post(operator: Any, path: str, body: bytes = b"", headers: dict[str, str] = JSON) -> httpx2.Response:
    async def send() -> httpx2.Response:
        transport = httpx2.ASGITransport(make_app(Service(), operator))
        async with httpx2.AsyncClient(transport=transport, base_url="http://coordinator") as client:
            return await client.post(path, content=body, headers=headers)

    return asyncio.run(send())


def test_a_hold_is_accepted_with_its_number_and_its_wish_arrives_whole() -> None:
    operator = Yes()
    answer = post(operator, "/v1/deployments/demo-moe:hold", b'{"mode": "keep", "key": "w1", "refuse": true}')

    assert answer.status_code == 202 and answer.headers["cache-control"] == "no-store"
    assert answer.json() == {"deployment": "demo-moe", "operation": 3, "mode": "keep", "key": "w1", "refuse": True}
    assert operator.wishes == [("demo-moe", HoldWish(HoldMode.KEEP, "w1", True))]


def test_a_change_of_ranks_is_accepted_with_its_number_and_its_target() -> None:
    answer = post(Scaling(), "/v1/deployments/demo-moe:scale", b'{"to": 2, "deadline_s": 5}')
    assert answer.status_code == 202
    assert answer.json() == {"deployment": "demo-moe", "regroup": 7, "to": [0, 1], "state": "preparing"}
    assert post(Scaling(), "/v1/deployments/demo-moe:scale", b'{"to": 0}').status_code == 400
    assert post(Scaling(), "/v1/deployments/demo-moe:scale", b"{}").status_code == 400, "to what?"
    assert post(Scaling(), "/v1/deployments/demo-moe:recover", b"{}").status_code == 202


def test_an_empty_body_means_the_defaults() -> None:
    operator = Yes()
    post(operator, "/v1/deployments/demo-moe:hold")
    post(operator, "/v1/deployments/demo-moe:resume")

    assert operator.wishes == [("demo-moe", HoldWish()), ("demo-moe", ResumeWish())]


@pytest.mark.parametrize(
    ("reason", "code"),
    [("busy", 409), ("not_held", 409), ("dense", 409), ("not_formed", 409), ("unknown_deployment", 404)],
)
def test_a_wish_without_effect_is_answered_with_its_reason(reason: str, code: int) -> None:
    answer = post(No(reason), "/v1/deployments/x:hold")

    assert answer.status_code == code and "because" in answer.json()["detail"]
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (b"", {"Content-Type": "text/plain"}, 415),
        (b"mode=keep", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        (b"{", JSON, 400),
        (b'{"mode": "sometimes"}', JSON, 400),
        (b"[" * 5_000, JSON, 400),
        (b'{"key": "' + b"x" * BODY_BYTES_MAX + b'"}', JSON, 413),
    ],
)
def test_a_body_that_is_no_wish_reaches_nobody(body: bytes, headers: dict[str, str], code: int) -> None:
    operator = Yes()
    assert post(operator, "/v1/deployments/demo-moe:hold", body, headers).status_code == code
    assert operator.wishes == []


def test_a_stuck_loop_is_a_503() -> None:
    assert post(Stuck(), "/v1/deployments/demo-moe:hold").status_code == 503


def test_holding_is_a_post_and_looking_is_not() -> None:
    operator = Yes()
    assert post(operator, "/v1/deployments/demo-moe").status_code == 405
    assert post(None, "/v1/deployments/demo-moe:hold").status_code == 405, "without an operator there is no such route"
    assert operator.wishes == []
