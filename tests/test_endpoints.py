"""Addresses: what is read, what is refused and with which advice, and that formatting gives it back."""

import pickle
import re
from ipaddress import IPv4Address, IPv6Address

import msgspec
import pytest
import zmq
from hypothesis import assume, example, given
from hypothesis import strategies as st

from wavekeeper.proto.endpoints import (
    IPC_PATH_BYTES_MAX,
    Endpoint,
    EndpointError,
    advertised,
    is_loopback_host,
    parse_endpoint,
    parse_host,
)

READ = {
    "tcp://127.0.0.1:29560": Endpoint("tcp", "127.0.0.1", 29560),
    "127.0.0.1:29560": Endpoint("tcp", "127.0.0.1", 29560),
    "TCP://Coordinator.Example:1": Endpoint("tcp", "coordinator.example", 1),
    "tcp://coordinator-0.wk.svc.cluster.local.:29560": Endpoint("tcp", "coordinator-0.wk.svc.cluster.local.", 29560),
    "tcp://my_host:80": Endpoint("tcp", "my_host", 80),
    "tcp://[::1]:29560": Endpoint("tcp", "::1", 29560),
    "tcp://[2001:DB8:0:0:0:0:0:1]:65535": Endpoint("tcp", "2001:db8::1", 65535),
    "tcp://[fe80::1%eth0]:29560": Endpoint("tcp", "fe80::1%eth0", 29560),
    "tcp://*:0": Endpoint("tcp", "*", 0),
    "tcp://[::]:29560": Endpoint("tcp", "::", 29560),
    "ipc:///run/wavekeeper/control.sock": Endpoint("ipc", path="/run/wavekeeper/control.sock"),
    "ipc://@wavekeeper": Endpoint("ipc", path="@wavekeeper"),
}


@pytest.mark.parametrize("text", READ)
def test_an_address_is_read(text: str) -> None:
    assert parse_endpoint(text) == READ[text]


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("::", "::"),
        ("2001:db8::5", "2001:db8::5"),
        ("1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7:8"),
        ("localhost", "localhost"),
        ("tcp://10.0.0.7", "10.0.0.7"),
        ("*", "*"),
    ],
)
def test_the_default_port_is_taken_where_there_is_none(text: str, host: str) -> None:
    assert parse_endpoint(text, default_port=29560) == Endpoint("tcp", host, 29560)
    with pytest.raises(EndpointError, match="has no port"):
        parse_endpoint(text)


REFUSED = {
    "tcp://::1:29560": "write tcp://[::1]:29560",
    "tcp://2001:db8::1:5": "write tcp://[2001:db8::1]:5, or tcp://[2001:db8::1:5]:29560",
    "tcp://1:2:3:4:5:6:7:8:29560": "write tcp://[1:2:3:4:5:6:7:8]:29560",
    "tcp://::1": "write tcp://[::1]:29560",
    "tcp://127.0.0.1": "write tcp://127.0.0.1:29560",
    "tcp://127.0.0.1:": "write a number from 1 to 65535, such as tcp://127.0.0.1:29560",
    "tcp://127.0.0.1:*": "write tcp://127.0.0.1:0",
    "tcp://[::1]:65536": "such as tcp://[::1]:29560",
    "tcp://127.0.0.1:0080": "such as tcp://127.0.0.1:29560",
    "tcp://127.0.0.1:-1": "such as tcp://127.0.0.1:29560",
    "tcp://127.0.0.1:٨٠": "such as tcp://127.0.0.1:29560",
    "tcp://127.0.0.1:29560/": "such as tcp://127.0.0.1:29560",
    "tcp://127.0.0.01:29560": "write tcp://127.0.0.1:29560",
    "tcp://127.1:29560": "write tcp://127.0.0.1:29560",
    "29560": "write tcp://127.0.0.1:29560",
    "tcp://:29560": "write tcp://127.0.0.1:29560",
    "tcp://[127.0.0.1]:29560": "write tcp://[::1]:29560",
    "tcp://[::1:29560": "write tcp://[::1]:29560",
    "tcp://[::1]29560": "write tcp://[::1]:29560",
    "tcp://a:b:c": "write tcp://127.0.0.1:29560 or tcp://[::1]:29560",
    "tcp://-bad:29560": "write tcp://127.0.0.1:29560",
    "tcp://user@host:29560": "write tcp://127.0.0.1:29560",
    "tcp:// 127.0.0.1:29560": "write tcp://127.0.0.1:29560",
    "tcp://münchen:29560": "xn--",
    "tcp://" + "a" * 64 + ":29560": "write tcp://127.0.0.1:29560",
    "http://127.0.0.1:29560": "write tcp://127.0.0.1:29560",
    "": "write tcp://127.0.0.1:29560",
    "tcp://": "write tcp://127.0.0.1:29560",
    "ipc://run/control.sock": "write ipc:///run/wavekeeper/control.sock",
    "ipc://*": "write ipc:///run/wavekeeper/control.sock",
    "ipc://@": "write ipc:///run/wavekeeper/control.sock",
    "ipc:///run/a\nb": "write ipc:///run/wavekeeper/control.sock",
    "ipc:///" + "a" * IPC_PATH_BYTES_MAX: "such as ipc:///run/wavekeeper/control.sock",
    "/run/control.sock": "write tcp://127.0.0.1:29560",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_comes_with_an_address_that_works(text: str) -> None:
    with pytest.raises(EndpointError) as caught:
        parse_endpoint(text)
    assert REFUSED[text] in str(caught.value)
    assert caught.value.found == text
    for remedy in re.findall(r"(?:tcp|ipc)://[^\s,;]+", caught.value.remedy):
        assert parse_endpoint(remedy).text == remedy


def test_a_default_port_does_not_make_an_ambiguous_address_clear() -> None:
    with pytest.raises(EndpointError, match="ambiguous"):
        parse_endpoint("2001:db8::1:5", default_port=29560)


ADDRESSES = st.one_of(
    st.builds(IPv4Address, st.integers(0, 2**32 - 1)), st.builds(IPv6Address, st.integers(0, 2**128 - 1))
)
NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?(\.[a-z]([a-z0-9]{0,5}))?", fullmatch=True)
TCP = st.builds(
    Endpoint,
    st.just("tcp"),
    st.one_of(ADDRESSES.map(str), NAMES.filter(lambda name: not name.split(".")[-1].isdigit()), st.just("*")),
    st.integers(0, 65_535),
)
IPC = st.builds(
    Endpoint,
    st.just("ipc"),
    path=st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=26).map(
        lambda s: "/" + s
    ),
)


@given(st.one_of(TCP, IPC))
def test_formatting_and_reading_give_the_same_address(endpoint: Endpoint) -> None:
    assume(endpoint.path != "//" or endpoint.transport == "tcp")
    assert parse_endpoint(endpoint.text) == endpoint
    assert str(endpoint) == endpoint.text


@given(st.text())
@example("tcp://[::1%\n]:1")
@example("tcp://[]:1")
@example("ipc://")
@example("::ffff:1.2.3.4")
def test_any_text_is_either_read_or_refused_and_reading_is_stable(text: str) -> None:
    for prefix in ("", "tcp://", "ipc:///"):
        try:
            endpoint = parse_endpoint(prefix + text, default_port=1)
        except EndpointError:
            continue
        assert parse_endpoint(endpoint.text) == endpoint


@given(st.builds(IPv6Address, st.integers(0, 2**128 - 1)), st.integers(1, 65_535))
def test_an_ipv6_address_with_a_port_is_never_guessed_without_brackets(address: IPv6Address, port: int) -> None:
    with pytest.raises(EndpointError):
        parse_endpoint(f"tcp://{address}:{port}")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("*", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_only_this_machine_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback_host(host) is expected
    assert Endpoint("tcp", host, 1).is_loopback is expected


def test_a_unix_socket_is_loopback() -> None:
    assert parse_endpoint("ipc:///run/a.sock").is_loopback


@pytest.mark.parametrize("text", ["tcp://*:29560", "tcp://0.0.0.0:29560", "tcp://[::]:29560", "tcp://127.0.0.1:0"])
def test_nobody_can_connect_to_a_wildcard_or_to_port_0(text: str) -> None:
    endpoint = parse_endpoint(text)
    assert endpoint.for_bind() == endpoint
    with pytest.raises(EndpointError) as caught:
        endpoint.for_connect()
    parse_endpoint(caught.value.remedy).for_connect()


def test_a_name_can_be_connected_to_but_not_bound_to() -> None:
    endpoint = parse_endpoint("tcp://coordinator.example:29560")
    assert endpoint.for_connect() == endpoint
    with pytest.raises(EndpointError, match=re.escape("advertise: tcp://coordinator.example:29560")):
        endpoint.for_bind()
    assert parse_endpoint("tcp://localhost:0").for_bind() == Endpoint("tcp", "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("bind", "advertise", "told"),
    [
        ("tcp://127.0.0.1:0", "", "tcp://127.0.0.1:40001"),
        ("tcp://*:0", "coordinator.example", "tcp://coordinator.example:40001"),
        ("tcp://[::]:29560", "2001:db8::1", "tcp://[2001:db8::1]:40001"),
        ("tcp://0.0.0.0:29560", "tcp://gateway.example:30000", "tcp://gateway.example:30000"),
        ("ipc:///run/a.sock", "", "ipc:///run/a.sock"),
    ],
)
def test_peers_are_told_an_address_with_the_real_port(bind: str, advertise: str, told: str) -> None:
    assert advertised(parse_endpoint(bind), 40001, advertise).text == told


@pytest.mark.parametrize(
    ("bind", "advertise", "problem"),
    [
        ("tcp://0.0.0.0:29560", "", "peers cannot connect to 0.0.0.0"),
        ("tcp://*:29560", "tcp://*:29560", "nobody can connect to it"),
        ("tcp://*:29560", "tcp://host.example:0", "has port 0"),
        ("tcp://*:29560", "ipc:///run/a.sock", "cannot reach a socket that is bound to"),
        ("tcp://*:29560", "::1:29560", "ambiguous"),
    ],
)
def test_what_peers_cannot_use_is_not_advertised(bind: str, advertise: str, problem: str) -> None:
    with pytest.raises(EndpointError, match=re.escape(problem)):
        advertised(parse_endpoint(bind), 29560, advertise)


def test_a_host_without_a_port_is_read_for_http() -> None:
    assert [parse_host(text) for text in ("127.0.0.1", "::1", "LOCALHOST", "0.0.0.0")] == [
        "127.0.0.1",
        "::1",
        "localhost",
        "0.0.0.0",
    ]


@pytest.mark.parametrize(
    ("text", "remedy"), [("*", "0.0.0.0"), ("[::1]", "'::1'"), ("127.0.0.1:80", "127.0.0.1"), ("", "127")]
)
def test_a_host_that_is_none_is_refused(text: str, remedy: str) -> None:
    with pytest.raises(EndpointError, match=re.escape(remedy)):
        parse_host(text)


def test_the_error_survives_pickling_and_shortens_what_it_shows() -> None:
    with pytest.raises(EndpointError) as caught:
        parse_endpoint("tcp://" + "x" * 10_000)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert len(str(again)) < 400


class Peer(msgspec.Struct):
    address: str

    def __post_init__(self) -> None:
        parse_endpoint(self.address)


def test_msgspec_reports_it_as_a_validation_error() -> None:
    with pytest.raises(msgspec.ValidationError, match=re.escape("write tcp://[::1]:29560")):
        msgspec.json.decode(b'{"address": "tcp://::1:29560"}', type=Peer)


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:0", "tcp://localhost:0", "ipc://@wavekeeper-test-endpoints"])
def test_zeromq_takes_what_is_formatted(text: str) -> None:
    bind = parse_endpoint(text).for_bind()
    context = zmq.Context()
    try:
        server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        server.bind(bind.text)
        real = parse_endpoint(server.getsockopt_string(zmq.LAST_ENDPOINT))
        client.connect(advertised(bind, real.port).text)
        client.send(b"hello")
        assert server.poll(2_000), "nothing came from the client within 2 s"
    finally:
        context.destroy(linger=0)
