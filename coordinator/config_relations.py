"""What must hold between the parts of a configuration.

The law of this file: it tells every relation that is broken and not only the first, each with a value that would work.
It sees a configuration as a map from path to value (`flatten` in config.py), because it must judge the sound part of a
broken file too.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..proto.endpoints import Endpoint, EndpointError, advertised, is_loopback_host, parse_endpoint, parse_host
from ..proto.messages import Kind

START_ACK_TIMEOUT_MS_MIN = 100  # below it a rank that is only busy with Python's garbage would be called lost
BEATS_BEFORE_DEAD = 3  # one heartbeat lost, one late, one to spare


class Broken(NamedTuple):
    """A relation that does not hold. `keys` are the fields that take part in it, the one to blame first."""

    keys: tuple[str, ...]
    message: str


def relations(values: Mapping[str, Any]) -> Iterator[Broken]:
    """Yield every relation that does not hold.

    `values` is what `flatten` yields. A field that is wrong by itself is missing in it: what depends on it is not
    judged, so that one mistake is told once.
    """
    yield from _timing(values)
    yield from _addresses(values)
    yield from _deployments(values)


def _timing(values: Mapping[str, Any]) -> Iterator[Broken]:
    def times(low: str, high: str) -> tuple[int, int] | None:
        keys = f"coordinator.{low}", f"coordinator.{high}"
        return (values[keys[0]], values[keys[1]]) if all(key in values for key in keys) else None

    def broken(high: str, low: str, must: str) -> Broken:
        return Broken((f"coordinator.{high}", f"coordinator.{low}"), must)

    heartbeat, stall, dead = "timing.heartbeat_ms", "timing.stall_after_ms", "timing.dead_after_ms"
    deadline, ack = "timing.step_deadline_ms", "timing.start_ack_timeout_ms"
    if (pair := times(heartbeat, stall)) and pair[0] >= pair[1]:
        must = f"stall_after_ms is {pair[1]}, but must be more than heartbeat_ms ({pair[0]})"
        why = "every rank would seem to stall between two heartbeats"
        yield broken(stall, heartbeat, f"{must}: {why}; write stall_after_ms: {2 * pair[0]}")
    if (pair := times(heartbeat, dead)) and pair[1] < BEATS_BEFORE_DEAD * pair[0]:
        least = BEATS_BEFORE_DEAD * pair[0]
        must = f"dead_after_ms is {pair[1]}, but must be at least {least} ({BEATS_BEFORE_DEAD} x heartbeat_ms)"
        yield broken(dead, heartbeat, f"{must}: one late heartbeat must not kill a rank; write dead_after_ms: {least}")
    if (pair := times(stall, deadline)) and pair[0] >= pair[1]:
        must = f"step_deadline_ms is {pair[1]}, but must be more than stall_after_ms ({pair[0]})"
        why = "a hanging rank is named before the group gives it up"
        yield broken(deadline, stall, f"{must}: {why}; write step_deadline_ms: {10 * pair[0]}")
    acknowledged = values.get(f"coordinator.{ack}")
    if acknowledged is not None and acknowledged < START_ACK_TIMEOUT_MS_MIN:
        must = f"start_ack_timeout_ms is {acknowledged}, but must be at least {START_ACK_TIMEOUT_MS_MIN}"
        yield broken(
            ack, ack, f"{must}: a rank that is only slow must not be called lost; write start_ack_timeout_ms: 2000"
        )
    if (pair := times("publish.interval_ms", "publish.keepalive_ms")) and pair[0] > pair[1]:
        must = f"keepalive_ms is {pair[1]}, but must be at least interval_ms ({pair[0]})"
        yield broken("publish.keepalive_ms", "publish.interval_ms", f"{must}; write keepalive_ms: {10 * pair[0]}")


def _addresses(values: Mapping[str, Any]) -> Iterator[Broken]:
    bound: list[tuple[str, Endpoint]] = []
    for name in ("control", "feed"):
        key, advertise_key = f"coordinator.{name}.bind", f"coordinator.{name}.advertise"
        text, advertise = values.get(key), values.get(advertise_key)
        if text is None:
            continue
        try:
            bind = parse_endpoint(text).for_bind()
        except EndpointError as error:
            yield Broken((key,), str(error))
            continue
        bound.append((key, bind))
        try:
            if advertise is not None:
                # Port 0 gets a real one only when it is bound; 1 stands for it here.
                advertised(bind, bind.port or 1, advertise)
        except EndpointError as error:
            yield Broken((advertise_key,) if advertise else (key,), str(error))
    yield from _http(values, bound)
    for index, (key, endpoint) in enumerate(bound):
        for earlier_key, earlier in bound[:index]:
            if _collide(earlier, endpoint):
                taken = f"{endpoint.text} is already taken by {earlier_key} ({earlier.text})"
                yield Broken((key, earlier_key), f"{taken}; write another port, or 0 for any free one")


def _http(values: Mapping[str, Any], bound: list[tuple[str, Endpoint]]) -> Iterator[Broken]:
    key = "coordinator.http.host"
    text, port, insecure = values.get(key), values.get("coordinator.http.port"), values.get("coordinator.http.insecure")
    if text is None:
        return
    try:
        host = parse_host(text)
    except EndpointError as error:
        yield Broken((key,), str(error))
        return
    if insecure is False and not is_loopback_host(host):
        yield Broken(
            (key,),
            f"other machines can reach {host}, and this version knows no tokens: everybody there could give commands; "
            "write host: 127.0.0.1, or insecure: true beside it",
        )
    if port is not None:
        bound.append(("coordinator.http.port", Endpoint("tcp", host, port)))


def _collide(one: Endpoint, other: Endpoint) -> bool:
    if one.transport != other.transport:
        return False
    if one.transport == "ipc":
        return one.path == other.path
    hosts = {"127.0.0.1" if endpoint.host == "localhost" else endpoint.host for endpoint in (one, other)}
    return one.port == other.port != 0 and (len(hosts) == 1 or one.is_wildcard or other.is_wildcard)


def _deployments(values: Mapping[str, Any]) -> Iterator[Broken]:
    count = values.get("deployments")
    if count == 0:
        yield Broken(("deployments",), "holds no deployment; write at least one, with name, kind and dp_size")
    owners: dict[str, str] = {}
    for index in range(count or 0):
        path = f"deployments[{index}]"
        name = values.get(f"{path}.name")
        if name is not None and owners.setdefault(name, path) != path:
            yield Broken((f"{path}.name",), f'"{name}" is already the name of {owners[name]}; write another one')
        if values.get(f"{path}.kind") is Kind.DENSE and values.get(f"{path}.exchange") is not None:
            yield Broken((f"{path}.exchange",), "a dense deployment exchanges nothing: remove this key")
        for setting, value in (values.get(f"{path}.settings") or {}).items():
            if isinstance(value, float) and not math.isfinite(value):
                # NaN differs from itself, so every rank would be refused for a setting that looks the same.
                yield Broken(
                    (f"{path}.settings.{setting}",), f"{value} is not a finite number; write it as text in quotes"
                )
