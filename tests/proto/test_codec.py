"""The codec: every message comes back as it went, and nothing else ever comes out but `RemoteProtocolError`."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from wavekeeper.proto import messages as m
from wavekeeper.proto.codec import FRAME_BYTES_MAX, HEADER, PROTOCOL_VERSION, decode, encode, topic
from wavekeeper.proto.errors import LocalProtocolError, RemoteProtocolError

TYPES: tuple[type[m.Message], ...] = get_args(m.WireMessage)
UINT64_MAX = (1 << 64) - 1
INCARNATION = "00c0ffee00c0ffee"


def values(of: inspect.Type) -> st.SearchStrategy[Any]:
    """Any legal value of a field's type, from the constraints that the struct itself declares."""
    match of:
        case inspect.Metadata(type=inner):
            return values(inner)
        case inspect.IntType(ge=least, lt=below, le=most):
            upper = below - 1 if below is not None else UINT64_MAX if most is None else most
            return st.integers(-(1 << 63) if least is None else least, upper)
        case inspect.FloatType(ge=least, le=most):
            return st.floats(least, most, allow_nan=False)
        case inspect.StrType(pattern=None, max_length=most):
            return st.text(max_size=min(most or 50, 50))
        case inspect.StrType(pattern=pattern) if pattern is not None and "{16}" in pattern:
            return st.text("0123456789abcdef", min_size=16, max_size=16)
        case inspect.StrType():
            return st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,20}[A-Za-z0-9])?", fullmatch=True)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.EnumType(cls=words):
            return st.sampled_from(words)
        case inspect.UnionType(types=types):
            return st.one_of([values(one) for one in types])
        case inspect.ListType(item_type=item):
            return st.lists(values(item), max_size=3)
        case inspect.DictType(value_type=value):
            return st.dictionaries(st.text(max_size=10), values(value), max_size=3)
        case inspect.StructType(cls=struct, fields=fields):
            return st.builds(struct, **{field.name: values(field.type) for field in fields})
        case _:
            raise AssertionError(f"a type that this test does not know: {of}")


@pytest.mark.parametrize("message_type", TYPES, ids=lambda message_type: message_type.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_a_message_comes_back_as_it_went(message_type: type[m.Message], data: st.DataObject) -> None:
    message = data.draw(values(inspect.type_info(message_type)))
    assert decode(encode(message)) == message


def test_every_message_has_a_tag_of_its_own() -> None:
    tags = [message_type.__struct_config__.tag for message_type in TYPES]
    assert len(set(tags)) == len(TYPES) and all(tag == str(tag).lower() for tag in tags)


def heartbeat(**fields: Any) -> dict[str, Any]:
    """A heartbeat as plain values, to be spoiled."""
    known = {
        "t": "heartbeat",
        "deployment": "moe",
        "rank": 3,
        "incarnation": INCARNATION,
        "number": 1,
        "at": {"mode": "idle"},
    }
    return {**known, **fields}


def read(fields: Any) -> m.Message:
    return decode([HEADER, msgspec.msgpack.encode(fields)])


def reason(frames: list[bytes]) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(frames)
    return caught.value.reason


# --- what is not a message -------------------------------------------------------------------------------------------

GOOD = [HEADER, msgspec.msgpack.encode(heartbeat())]
BAD_FRAMES = {
    "none": ([], "frames"),
    "one": (GOOD[:1], "frames"),
    "three": ([*GOOD, b""], "frames"),
    "an empty header": ([b"", GOOD[1]], "magic"),
    "another protocol": ([b"GET", GOOD[1]], "magic"),
    "a longer header": ([HEADER + b"x", GOOD[1]], "magic"),
    "a shorter header": ([HEADER[:2], GOOD[1]], "magic"),
    "a version from the future": ([b"WK" + bytes([PROTOCOL_VERSION + 1]), GOOD[1]], "version"),
    "an empty body": ([HEADER, b""], "malformed"),
    "a cut body": ([HEADER, GOOD[1][:-1]], "malformed"),
    "more than a body": ([HEADER, GOOD[1] + b"\xc0"], "malformed"),
    "one byte too many": ([HEADER, bytes(FRAME_BYTES_MAX + 1)], "oversize"),
    "the largest body, of zeros": ([HEADER, bytes(FRAME_BYTES_MAX)], "malformed"),
    "endless nesting": ([HEADER, b"\x91" * 100_000], "malformed"),
    "nesting inside an unknown key": (
        [HEADER, GOOD[1][:1].replace(b"\x86", b"\x87") + b"\xa1x" + b"\x91" * 100_000],
        "malformed",
    ),
    "a list that claims four billion items": ([HEADER, b"\xdd\xff\xff\xff\xff"], "malformed"),
    "a text that claims four billion bytes": ([HEADER, b"\x81\xa1t\xdb\xff\xff\xff\xff"], "malformed"),
}


@pytest.mark.parametrize("frames, expected", BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_a_frame_that_is_not_ours_is_refused_with_a_countable_reason(frames: list[bytes], expected: str) -> None:
    assert reason(frames) == expected


BAD_FIELDS: dict[str, Any] = {
    "not a map": [],
    "no type": {"deployment": "moe"},
    "an unknown type": heartbeat(t="hello"),
    "a type that is not text": heartbeat(t=5),
    "no position": {key: value for key, value in heartbeat().items() if key != "at"},
    "a mode that does not exist": heartbeat(at={"mode": "sleeping"}),
    "a negative rank": heartbeat(rank=-1),
    "a rank above every deployment": heartbeat(rank=m.DP_SIZE_MAX),
    "a rank as text": heartbeat(rank="3"),
    "a rank as a fraction": heartbeat(rank=3.5),
    "a negative wave": heartbeat(at={"mode": "idle", "wave": -1}),
    "a wave that no row can carry": heartbeat(at={"mode": "idle", "wave": 1 << 31}),
    "an epoch that no row can carry": heartbeat(at={"mode": "idle", "epoch": 1 << 31}),
    "a negative number": heartbeat(number=-1),
    "an incarnation of another shape": heartbeat(incarnation="C0FFEE"),
    "an incarnation with a line break": heartbeat(incarnation=INCARNATION + "\n"),
    "an empty name": heartbeat(deployment=""),
    "a name that could be another topic": heartbeat(deployment="moe/2"),
    "a name with a line break": heartbeat(deployment="moe\n"),
    "a name of 64 letters": heartbeat(deployment="m" * 64),
    "a reason without end": heartbeat(t="leave", reason="x" * 4097),
    "a cache that is fuller than full": heartbeat(t="loadreport", load={"kv_cache_usage": 1.01}),
}


@pytest.mark.parametrize("fields", BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_a_value_out_of_its_range_is_refused(fields: Any) -> None:
    """Case B35 among others: nothing is coerced, and nothing falls back to a default."""
    assert reason([HEADER, msgspec.msgpack.encode(fields)]) == "malformed"


def test_an_unknown_key_of_a_newer_peer_is_ignored() -> None:
    message = read(heartbeat(colour="blue", at={"mode": "idle", "mood": [1, {"x": None}]}))
    assert message == m.Heartbeat(
        deployment="moe", rank=3, incarnation=INCARNATION, number=1, at=m.At(mode=m.Mode.IDLE)
    )


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=64), max_size=4) | st.binary(max_size=200).map(lambda body: [HEADER, body]))
def test_noise_never_raises_anything_else(frames: list[bytes]) -> None:
    """Junk on a port is dropped and counted by reason: never a traceback."""
    try:
        decode(frames)
    except RemoteProtocolError as error:
        assert error.reason in ("frames", "magic", "version", "oversize", "malformed") and str(error)


@settings(max_examples=300)
@given(data=st.data())
def test_a_damaged_message_is_a_message_or_an_error_and_never_a_traceback(data: st.DataObject) -> None:
    message = data.draw(st.sampled_from(TYPES).flatmap(lambda kind: values(inspect.type_info(kind))))
    body = bytearray(encode(message)[1])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode([HEADER, bytes(body)])
    except RemoteProtocolError as error:
        assert error.reason == "malformed"


# --- what we send ----------------------------------------------------------------------------------------------------


def test_a_body_above_the_limit_is_our_own_error_and_is_not_sent() -> None:
    at = m.At(mode=m.Mode.JOINING)
    big = {"x": "x" * FRAME_BYTES_MAX}
    register = m.Register(
        deployment="moe", rank=0, incarnation=INCARNATION, number=1, at=at, kind=m.Kind.MOE, dp_size=1, attributes=big
    )
    with pytest.raises(LocalProtocolError, match=f"Register takes .* bytes, at most {FRAME_BYTES_MAX}"):
        encode(register)


def test_the_whole_state_of_the_largest_deployment_fits_into_one_frame() -> None:
    rank = m.RankState(
        rank=m.DP_SIZE_MAX - 1,
        up=True,
        incarnation=INCARNATION,
        serve="tcp://[2001:db8:1234:5678:9abc:def0:1234:5678]:55555",
        load=m.Load(running=4_096, waiting=100_000, kv_cache_usage=0.987654321, waiting_tokens=1 << 40),
        load_number=1 << 40,
        load_age_ms=1 << 30,
    )
    state = m.DeploymentState(
        name="m" * 63, kind=m.Kind.MOE, dp_size=m.DP_SIZE_MAX, phase=m.Phase.RUNNING, ranks=[rank] * m.DP_SIZE_MAX
    )
    body = encode(m.Snapshot(deployment="m" * 63, term=1 << 60, seq=1 << 60, state=state))[1]
    assert len(body) <= FRAME_BYTES_MAX


def test_defaults_are_not_sent() -> None:
    body = encode(m.Heartbeat(deployment="moe", rank=0, incarnation=INCARNATION, number=1, at=m.At(mode=m.Mode.IDLE)))[
        1
    ]
    assert set(msgspec.msgpack.decode(body)) == {"t", "deployment", "rank", "incarnation", "number", "at"}


def test_one_deployment_s_topic_is_never_the_beginning_of_another_s() -> None:
    assert topic("moe") == b"moe/" and not topic("moe-2").startswith(topic("moe"))
