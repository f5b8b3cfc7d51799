"""Junk over HTTP: every route, any method, any body. No 500, no traceback, no change; and the answer is in words."""

import http.client
import json
from urllib.parse import quote

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from wavekeeper.coordinator.core.holds import HoldWish
from wavekeeper.coordinator.status.operate import BODY_BYTES_MAX

from .fleet import BOUNDED, FuzzedFleet

PATHS = ["/", "/livez", "/healthz", "/readyz", "/health", "/metrics", "/v1/status", "/v1/deployments"]
NAMES = [
    "moe",
    "dense",
    "nowhere",
    "",
    ".",
    "..",
    "moe:hold",
    "moe:resume",
    "dense:hold",
    "dense:resume",
    "nowhere:hold",
]
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"]
CODES = {200, 202, 400, 404, 405, 409, 413, 415, 422}

paths = (
    st.sampled_from(PATHS)
    | st.sampled_from(NAMES).map(lambda name: f"/v1/deployments/{name}")
    | st.text(max_size=40).map(lambda text: f"/v1/deployments/{quote(text, safe='')}")
    | st.text(max_size=40).map(lambda text: f"/{quote(text)}")
    | st.sampled_from(
        ["/readyz?verbose", "/livez?verbose=%00", "/v1/status?" + "a=1&" * 200, "//v1//status", "/%2e%2e"]
    )
)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
wishes = st.dictionaries(
    st.sampled_from(["mode", "key", "refuse", "operation", "other"]),
    plain | st.sampled_from(["wait", "now"]),
    max_size=4,
).map(lambda wish: json.dumps(wish).encode())
bodies = st.binary(max_size=300) | wishes | st.sampled_from([b"", b"[" * 5_000, b"x" * (BODY_BYTES_MAX + 1), b"\xff"])
types = st.sampled_from(
    ["application/json", "application/json; charset=utf-8", "text/plain", "", "multipart/form-data"]
)


def holds(path: str, body: bytes, content_type: str) -> bool:
    """Whether this is no junk but an operator's wish that would be carried out."""
    if not path.endswith(("moe:hold", "dense:hold")) or not content_type.startswith("application/json"):
        return False
    try:
        msgspec.json.decode(body or b"{}", type=HoldWish)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return True


@BOUNDED
@given(st.lists(st.tuples(st.sampled_from(METHODS), paths, bodies, types), min_size=1, max_size=8))
def test_no_request_harms_or_goes_unanswered(fleet: FuzzedFleet, requests: list[tuple[str, str, bytes, str]]) -> None:
    port = int(fleet.coordinator.facts["http"].rpartition(":")[2])
    for method, path, body, content_type in requests:
        if method == "POST" and holds(path, body, content_type):
            continue
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request(method, path, body, {"Content-Type": content_type})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        assert answer.status in CODES, (method, path, body, answer.status, text)
        if answer.status >= 400 and method != "HEAD" and answer.headers["Content-Type"] == "application/problem+json":
            assert json.loads(text)["detail"], "an error says what is wrong"

    assert fleet.standing() == fleet.before


def test_the_fleet_serves_as_before(fleet: FuzzedFleet) -> None:
    fleet.assert_unharmed()
    assert fleet.coordinator.get("/readyz")[0] == 200
