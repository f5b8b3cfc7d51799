"""The routes of the status endpoint.

The law of this file: it only reads; what an operator may change is in operate.py. Each request asks the coordinator's
loop for one view, at most once, and renders it; so a probe can be sent at any rate without moving a wave, a load or a
rotation (sglang PR 35721). Health comes from the loop's answer and readiness from the deployments' progress, never
from the fact that HTTP answers.

    /livez /healthz    is the loop alive?                        200 or 503
    /readyz /health    can every deployment serve?               200 or 503 with the reasons; /health has no body
    /v1/status         everything
    /v1/deployments    all, or one by its name
    /metrics           Prometheus
    /                  the page

`?verbose` makes text of /livez and /readyz, one line for each check. Errors are `application/problem+json` (RFC 9457);
where the loop does not answer, that is a 503 on every route, but plain text on /metrics and empty on /health.
"""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from ..core.replies import no_such_deployment
from ..core.view import DeploymentView
from . import metrics, page
from .answers import HEADERS, json_answer, problem
from .operate import Operator
from .operate import routes as operator_routes
from .report import (
    API_VERSION,
    ServiceInfo,
    Status,
    StatusSource,
    StatusUnavailableError,
    degradation,
    readiness,
    status_of,
)

__all__ = ["ServiceInfo", "StatusSource", "StatusUnavailableError", "make_app"]


class DeploymentList(msgspec.Struct, frozen=True):
    """The body of `/v1/deployments`."""

    api_version: str
    deployments: list[DeploymentView]


class UnknownDeploymentError(Exception):
    """A path names a deployment that is not configured; `known` are those that are."""

    def __init__(self, name: str, known: list[str]) -> None:
        self.name = name
        self.known = known
        super().__init__(name, known)

    def __str__(self) -> str:
        return no_such_deployment(self.name, self.known)


def make_app(source: StatusSource, operator: Operator | None = None) -> Starlette:
    """Return the application that tells what `source` knows, and takes wishes for `operator` if there is one."""
    routes = _Routes(source)
    table: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/": routes.page,
        "/livez": routes.livez,
        "/healthz": routes.livez,
        "/readyz": routes.readyz,
        "/health": routes.health,
        "/metrics": routes.metrics,
        "/v1/status": routes.status,
        "/v1/deployments": routes.deployments,
        "/v1/deployments/{name}": routes.deployment,
    }
    app = Starlette(
        routes=[
            *(operator_routes(operator) if operator is not None else ()),
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in table.items()),
        ],
        exception_handlers={
            HTTPException: _on_http_error,
            StatusUnavailableError: _on_unavailable,
            UnknownDeploymentError: _on_unknown_deployment,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False  # one name for one thing; the redirect would also trust the Host header
    return app


class _Routes:
    def __init__(self, source: StatusSource) -> None:
        self._source = source

    async def livez(self, request: Request) -> Response:
        """The loop answers; nothing else is asked."""
        verbose = "verbose" in request.query_params
        try:
            await self._source.fleet()
        except StatusUnavailableError as error:
            if verbose:
                return _checks("livez", [], [f"service-loop failed: {error}"])
            raise
        return _checks("livez", ["service-loop ok"], []) if verbose else _text("ok")

    async def readyz(self, request: Request) -> Response:
        """Every deployment can serve, and the coordinator does not stop."""
        verbose = "verbose" in request.query_params
        try:
            status = await self._status()
        except StatusUnavailableError as error:
            if verbose:
                return _checks("readyz", [], [f"service-loop failed: {error}"])
            raise
        judged = readiness(status)
        if not verbose:
            return json_answer(judged, HTTPStatus.OK if judged.ready else HTTPStatus.SERVICE_UNAVAILABLE)
        serving = [f"{d.name} ok: {degradation(d) or 'all ranks are up'}" for d in status.deployments if d.ready]
        return _checks("readyz", ["service-loop ok", *serving], judged.reasons)

    async def health(self, request: Request) -> Response:
        """The answer of /readyz without its words: what vLLM's own /health looks like."""
        try:
            ready = readiness(await self._status()).ready
        except StatusUnavailableError:
            ready = False
        return Response(status_code=HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE, headers=HEADERS)

    async def status(self, request: Request) -> Response:
        return json_answer(await self._status())

    async def deployments(self, request: Request) -> Response:
        return json_answer(DeploymentList(API_VERSION, (await self._source.fleet()).deployments))

    async def deployment(self, request: Request) -> Response:
        name = request.path_params["name"]
        known = {deployment.name: deployment for deployment in (await self._source.fleet()).deployments}
        if name not in known:
            raise UnknownDeploymentError(name, list(known))
        return json_answer(known[name])

    async def metrics(self, request: Request) -> Response:
        try:
            fleet = await self._source.fleet()
        except StatusUnavailableError as error:
            return _text(str(error), HTTPStatus.SERVICE_UNAVAILABLE)  # Prometheus shows the status, people the text
        body, content_type = metrics.render(fleet, self._source.info(), request.headers.get("Accept", ""))
        # Set by hand: starlette would add a second charset to a type that has one.
        return Response(body, headers={**HEADERS, "Content-Type": content_type, "Vary": "Accept"})

    async def page(self, request: Request) -> Response:
        return HTMLResponse(page.render(await self._status()), headers={**HEADERS, **page.HEADERS})

    async def _status(self) -> Status:
        return status_of(await self._source.fleet(), self._source.info())


def _checks(probe: str, passed: list[str], failed: list[str]) -> Response:
    """Text in the habit of kube-apiserver: a line for each check, and the verdict. Machines go by the status code."""
    lines = [*(f"[+]{text}" for text in passed), *(f"[-]{text}" for text in failed)]
    verdict = f"{probe} check {'failed' if failed else 'passed'}"
    code = HTTPStatus.SERVICE_UNAVAILABLE if failed else HTTPStatus.OK
    return _text("\n".join([*lines, verdict, ""]), code)


def _text(text: str, code: HTTPStatus = HTTPStatus.OK) -> Response:
    return PlainTextResponse(text, code, headers=HEADERS)


async def _on_http_error(request: Request, error: Any) -> Response:
    detail = {
        HTTPStatus.NOT_FOUND: "there is nothing here; see /, /v1/status, /v1/deployments, /livez, /readyz and /metrics",
        HTTPStatus.METHOD_NOT_ALLOWED: "this endpoint is read-only: GET and HEAD",
    }.get(error.status_code, str(error.detail))
    return problem(request, error.status_code, detail, headers=error.headers)


async def _on_unavailable(request: Request, error: Exception) -> Response:
    return problem(request, HTTPStatus.SERVICE_UNAVAILABLE, str(error))


async def _on_unknown_deployment(request: Request, error: Any) -> Response:
    return problem(request, HTTPStatus.NOT_FOUND, str(error), error.known)


async def _on_bug(request: Request, error: Exception) -> Response:
    # starlette raises the error again after this answer, and uvicorn logs it; a stranger learns nothing from it.
    return problem(request, HTTPStatus.INTERNAL_SERVER_ERROR, "a bug of the coordinator; its log has the traceback")
