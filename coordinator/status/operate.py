"""What an operator may ask for over HTTP: hold a deployment, let it go on, change its ranks.

    POST /v1/deployments/{name}:hold     {"mode": "wait" | "now" | "keep", "key": "...", "refuse": false}
    POST /v1/deployments/{name}:resume   {"operation": 3}
    POST /v1/deployments/{name}:scale    {"to": 2, "deadline_s": 60}
    POST /v1/deployments/{name}:recover  {"shrink": true}

The answer is 202 with the operation: it has begun, and `/v1/deployments/{name}` shows how far it is (`phase`, `hold`,
`waits_for`). A wish that can have no effect is a 409 with the reason. A body must say that it is JSON: a form on a
foreign web page cannot.
"""

from http import HTTPStatus
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..core.events import Wish
from ..core.holds import HoldWish, Operation, Refusal, ResumeWish
from ..core.regroups import RecoverWish, Regroup, ScaleWish
from .answers import json_answer, problem

BODY_BYTES_MAX = 16_384


class Operator(Protocol):
    """Who carries out wishes. Called on the HTTP server's thread."""

    async def wish(self, deployment: str, wish: Wish) -> Operation | Regroup | Refusal:
        """Begin an operation, or say why not.

        Raises:
            StatusUnavailableError: The coordinator's loop did not answer in time.
        """
        ...


class Begun(msgspec.Struct, frozen=True):
    """The body of a 202 to a hold or resume."""

    deployment: str
    operation: int
    mode: str
    key: str
    refuse: bool


class BegunRegroup(msgspec.Struct, frozen=True):
    """The body of a 202 to a change of ranks."""

    deployment: str
    regroup: int
    to: list[int]
    state: str


def routes(operator: Operator) -> list[Route]:
    """The operator's routes."""

    def route(verb: str, kind: type[Wish]) -> Route:
        async def endpoint(request: Request) -> Response:
            return await _operate(request, operator, kind)

        return Route(f"/v1/deployments/{{name}}:{verb}", endpoint, methods=["POST"])

    return [
        route("hold", HoldWish),
        route("resume", ResumeWish),
        route("scale", ScaleWish),
        route("recover", RecoverWish),
    ]


async def _operate(request: Request, operator: Operator, kind: type[Wish]) -> Response:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return problem(request, HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send Content-Type: application/json")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            return problem(request, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {BODY_BYTES_MAX} bytes")
    try:
        wish = msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return problem(request, HTTPStatus.BAD_REQUEST, str(error))
    name = request.path_params["name"]
    match await operator.wish(name, wish):
        case Refusal(reason="unknown_deployment", detail=detail):
            return problem(request, HTTPStatus.NOT_FOUND, detail)
        case Refusal(reason=reason, detail=detail):
            return problem(request, HTTPStatus.CONFLICT, f"{reason}: {detail}")
        case Operation(number=number, wish=of):
            return json_answer(Begun(name, number, of.mode, of.key, of.refuse), HTTPStatus.ACCEPTED)
        case Regroup(number=number, target=target, state=state):
            return json_answer(BegunRegroup(name, number, list(target), state), HTTPStatus.ACCEPTED)
