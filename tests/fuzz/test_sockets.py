"""Junk on the control and the feed socket: counted by reason, answered at most by a rejection, and nothing else."""

import contextlib
import socket
from collections import Counter

import msgspec
import zmq
from hypothesis import given
from hypothesis import strategies as st

from wavekeeper.proto import messages
from wavekeeper.proto.codec import HEADER, decode, encode
from wavekeeper.proto.errors import RemoteProtocolError
from wavekeeper.worker_agent import FrontEnd

from .fleet import BOUNDED, STRANGER, FuzzedFleet

TAGS = sorted(
    str(cls.__struct_config__.tag)
    for cls in vars(messages).values()
    if isinstance(cls, type) and issubclass(cls, messages.Message) and cls is not messages.Message
)
FIELDS = sorted(
    {
        name
        for cls in vars(messages).values()
        if isinstance(cls, type) and issubclass(cls, messages.Message)
        for name in cls.__struct_fields__
    }
)
FIXED = ("deployment", "rank", "incarnation", "front_end", "number", "at")

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.sampled_from(["moe", "dense", STRANGER, "idle", "running", "halted"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
places = st.fixed_dictionaries(
    {"mode": st.sampled_from([mode.value for mode in messages.Mode])},
    optional={
        "term": st.integers(0, 1 << 53),
        "epoch": st.integers(0, 1 << 31),
        "applied": st.integers(0, 1 << 40),
        "wave": st.integers(0, 1 << 31),
        "has_work": st.booleans(),
    },
)
near_misses = st.fixed_dictionaries(
    {
        "t": st.sampled_from(TAGS),
        "deployment": st.sampled_from(["moe", "dense", "nowhere"]),
        "rank": st.integers(-1, 5),
        "incarnation": st.just(STRANGER),
        "front_end": st.just(STRANGER),
        "number": st.integers(0, 1 << 40),
        "at": places,
    },
    optional={
        **{name: values for name in FIELDS if name not in FIXED},
        "kind": st.sampled_from(["moe", "dense"]),
        "dp_size": st.integers(0, 5),
        "ask": st.integers(0, 10),
        "wave": st.integers(0, 1 << 31),
        "activity": st.sampled_from(["idle", "stepping", "flying"]),
    },
)
"""Messages of a stranger: many can be read, and some of them are even right."""

bodies = (
    st.binary(max_size=200)
    | values.map(msgspec.msgpack.encode)
    | near_misses.map(msgspec.msgpack.encode)
    | st.builds(
        lambda body, at, byte: body[: at % len(body)] + bytes([byte]) + body[at % len(body) + 1 :],
        near_misses.map(msgspec.msgpack.encode),
        st.integers(0, 500),
        st.integers(0, 255),
    )
)
frames = st.lists(st.binary(max_size=40), min_size=1, max_size=5) | bodies.map(lambda body: [HEADER, body])


@BOUNDED
@given(st.lists(frames, min_size=1, max_size=20))
def test_junk_on_the_control_socket_is_counted_by_reason(fleet: FuzzedFleet, junk: list[list[bytes]]) -> None:
    expected: Counter[str] = Counter()
    for each in junk:
        try:
            decode(each)
        except RemoteProtocolError as error:
            expected[error.reason] += 1
    before = fleet.dropped()
    dealer = fleet.dealer()
    try:
        for each in junk:
            dealer.send_multipart(each)
        fleet.settle(dealer)
    finally:
        dealer.close()

    grown = fleet.dropped() - before
    assert {reason: grown[reason] for reason in expected} == dict(expected)
    assert fleet.standing() == fleet.before


@BOUNDED
@given(near_misses)
def test_whatever_a_stranger_says_in_good_form_moves_no_rank(fleet: FuzzedFleet, said: dict[str, object]) -> None:
    dealer = fleet.dealer()
    try:
        dealer.send_multipart([HEADER, msgspec.msgpack.encode(said)])
        fleet.settle(dealer)
    finally:
        dealer.close()

    assert fleet.standing() == fleet.before


@BOUNDED
@given(st.sampled_from(["control", "feed", "http"]), st.lists(st.binary(max_size=300), min_size=1, max_size=4))
def test_bytes_that_are_no_protocol_at_all_change_nothing(fleet: FuzzedFleet, port: str, chunks: list[bytes]) -> None:
    address = ("127.0.0.1", int(fleet.coordinator.facts[port].rpartition(":")[2]))
    with socket.create_connection(address, timeout=5) as raw, contextlib.suppress(ConnectionError):
        for chunk in chunks:
            raw.sendall(chunk)  # the other side may have hung up after the first

    assert fleet.standing() == fleet.before


@BOUNDED
@given(st.lists(st.binary(max_size=80), min_size=1, max_size=10))
def test_what_subscribers_say_on_the_feed_changes_nothing(fleet: FuzzedFleet, said: list[bytes]) -> None:
    """An XSUB may send whatever it likes towards the publisher, subscriptions and their ends among it."""
    reader = fleet.context.socket(zmq.XSUB)
    try:
        reader.setsockopt(zmq.LINGER, 1_000)
        reader.connect(fleet.coordinator.facts["feed"])
        for each in said:
            reader.send(each)
    finally:
        reader.close()

    assert fleet.standing() == fleet.before


@BOUNDED
@given(near_misses)
def test_a_valid_message_cut_short_or_made_long_is_malformed(fleet: FuzzedFleet, said: dict[str, object]) -> None:
    body = encode(messages.Attach(front_end=STRANGER, deployment="moe"))[1]
    before = fleet.dropped()
    dealer = fleet.dealer()
    try:
        dealer.send_multipart([HEADER, body[:-1]])
        dealer.send_multipart([HEADER, body + msgspec.msgpack.encode(said)])
        fleet.settle(dealer)
    finally:
        dealer.close()

    assert (fleet.dropped() - before)["malformed"] == 2


def test_the_feed_still_reaches_its_readers(fleet: FuzzedFleet) -> None:
    front_end = FrontEnd.connect(fleet.coordinator.facts["control"], deployment="moe")
    try:
        front_end.wait_ready(20)
        wave = front_end.wait_for(lambda state: True, 20, "a state").wave
        fleet.engines[0].submit(1)
        front_end.wait_for(lambda state: state.wave > wave, 20, "an update")
    finally:
        front_end.close()
    fleet.assert_unharmed()
