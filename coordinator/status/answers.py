"""How the status endpoint answers: JSON, and errors as problem+json (RFC 9457). Nothing here may be stored by a
proxy.
"""

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response

HEADERS = {
    "Cache-Control": "no-store",  # a proxy's copy of a readiness would outlive the readiness
    "X-Content-Type-Options": "nosniff",
}
_encoder = msgspec.json.Encoder()


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of an error (RFC 9457). `type` is absent, which means about:blank: `status` says it all."""

    title: str
    status: int
    detail: str
    instance: str
    known: list[str] = []
    """Names that would have worked."""


def json_answer(body: msgspec.Struct, code: HTTPStatus = HTTPStatus.OK) -> Response:
    """A struct as JSON."""
    return Response(_encoder.encode(body), code, headers=HEADERS, media_type="application/json")


def problem(
    request: Request,
    code: int,
    detail: str,
    known: list[str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error, in words; `known` are names that would have worked."""
    body = Problem(HTTPStatus(code).phrase, code, detail, request.url.path, known or [])
    every = {**HEADERS, **(headers or {})}
    return Response(_encoder.encode(body), code, headers=every, media_type="application/problem+json")
