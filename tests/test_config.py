"""The configuration: what is read, what is refused with which advice and where, what overrides what."""

# ruff: noqa: E501  (the expected sentences stay whole, so that they can be searched for)

import pickle
import re
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from wavekeeper.coordinator.config import (
    Address,
    Config,
    ConfigError,
    CoordinatorConfig,
    DeploymentConfig,
    Exchange,
    HttpConfig,
    LogLevel,
    Problem,
    config_hash,
    config_schema,
    flatten,
)
from wavekeeper.coordinator.config_load import load_config, parse_config
from wavekeeper.coordinator.config_relations import relations
from wavekeeper.coordinator.yaml_source import NODES_MAX, TEXT_BYTES_MAX, read_yaml
from wavekeeper.proto.messages import Kind, Timing

EXAMPLES = sorted((Path(__file__).parent.parent / "deploy" / "config").glob("*.yaml"))
ONE = "deployments:\n  - {name: m, kind: moe, dp_size: 4}\n"
"""The least that is valid. Put a section `coordinator` before it."""


def problems(text: str | bytes, environ: dict[str, str] | None = None, sets: tuple[str, ...] = ()) -> list[str]:
    """Return every mistake as text; none if the configuration is valid."""
    try:
        parse_config(text, "f.yaml", environ=environ, sets=sets)
    except ConfigError as error:
        assert error.exit_code == 78
        return str(error).splitlines()
    return []


# --- what is read ----------------------------------------------------------------------------------------------------


def test_what_is_not_said_has_the_defaults_of_the_design() -> None:
    config = parse_config(ONE, "f.yaml")
    coordinator = config.coordinator
    assert (coordinator.control.bind, coordinator.feed.bind) == ("tcp://127.0.0.1:29560", "tcp://127.0.0.1:29561")
    assert coordinator.http.url(9257) == "http://127.0.0.1:9257"
    assert coordinator.timing == Timing()
    assert (coordinator.publish.interval_ms, coordinator.publish.keepalive_ms) == (100, 1000)
    assert coordinator.state_file == ""
    assert config.deployments == (
        DeploymentConfig(name="m", kind=Kind.MOE, dp_size=4, exchange=Exchange.AUTO, settings={}),
    )


def test_an_address_is_a_text_or_a_section() -> None:
    short = parse_config(f"coordinator:\n  control: tcp://127.0.0.1:5\n{ONE}", "f.yaml")
    long = parse_config(f"coordinator:\n  control: {{bind: tcp://127.0.0.1:5}}\n{ONE}", "f.yaml")
    assert short == long
    text = 'coordinator:\n  control: {bind: "tcp://*:0", advertise: wk.example}\n'
    control = parse_config(text + ONE, "f.yaml").coordinator.control
    assert control.bind_endpoint.text == "tcp://*:0"
    assert control.advertised_endpoint(40001).text == "tcp://wk.example:40001"


def test_an_ipv6_host_gets_its_brackets_in_the_url() -> None:
    assert HttpConfig(host="::1").url(80) == "http://[::1]:80"


def test_a_section_with_everything_commented_out_is_empty() -> None:
    text = "coordinator:\n  http:\n  #  port: 1\n  log:\n"
    assert parse_config(text + ONE, "f.yaml") == parse_config(ONE, "f.yaml")


def test_only_a_lockstep_deployment_has_an_exchange() -> None:
    text = "deployments: [{name: a, kind: moe, dp_size: 1, exchange: shm}, {name: b, kind: dense, dp_size: 1}]"
    assert [d.exchange for d in parse_config(text, "f.yaml").deployments] == [Exchange.SHM, None]


def test_settings_keep_their_types() -> None:
    text = "deployments: [{name: a, kind: moe, dp_size: 1, settings: {m: x/y, n: 8, f: 0.5, b: true, none: null}}]"
    settings = parse_config(text, "f.yaml").deployments[0].settings
    assert settings == {"m": "x/y", "n": 8, "f": 0.5, "b": True, "none": None}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_loads_and_fits_the_schema(path: Path) -> None:
    load_config(path)
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(config_schema()).validate(yaml.safe_load(path.read_text()))


def test_the_commented_example_says_the_defaults() -> None:
    (mixed,) = (path for path in EXAMPLES if path.name == "mixed.yaml")
    assert load_config(mixed).coordinator == CoordinatorConfig()


def test_the_demo_takes_free_ports_only() -> None:
    (demo,) = (path for path in EXAMPLES if path.name == "demo.yaml")
    config = load_config(demo)
    coordinator = config.coordinator
    ports = [coordinator.control.bind_endpoint.port, coordinator.feed.bind_endpoint.port, coordinator.http.port]
    assert ports == [0, 0, 0]
    assert [(d.name, d.kind, d.dp_size, d.exchange) for d in config.deployments] == [
        ("demo-moe", Kind.MOE, 4, Exchange.SHM),
        ("demo-dense", Kind.DENSE, 2, None),
    ]


# --- what is refused -------------------------------------------------------------------------------------------------

FIVE_MISTAKES = """\
coordinator:
  control: tcp://::1:29560
  http: {port: 70000}
  timing:
    heartbeat_ms: 500
    stall_after_ms: 400
deployments:
  - name: a
    kind: moe
    dp_size: 4
  - name: b
    kind: MOE
    dp_sise: 2
    dp_size: 2
"""


def test_five_mistakes_are_told_at_once_with_their_places() -> None:
    assert problems(FIVE_MISTAKES) == [
        "f.yaml:2:12: coordinator.control: 'tcp://::1:29560' is ambiguous: an IPv6 address before a port needs brackets; "
        "write tcp://[::1]:29560",
        "f.yaml:3:16: coordinator.http.port: expected a whole number from 0 to 65535, found 70000; write port: 65535",
        "f.yaml:6:21: coordinator.timing.stall_after_ms: stall_after_ms is 400, but must be more than heartbeat_ms (500): "
        "every rank would seem to stall between two heartbeats; write stall_after_ms: 1000",
        'f.yaml:12:11: deployments[1].kind: expected "moe" or "dense", found "MOE"; write kind: moe',
        "f.yaml:13:5: deployments[1].dp_sise: unknown key; did you mean dp_size?",
    ]


COORDINATOR_MISTAKES = {
    "htp: {}": "2:3: coordinator.htp: unknown key; did you mean http?",
    "zzz: 1": "2:3: coordinator.zzz: unknown key; known are control, feed, http, timing, publish, log, state_file",
    "http: 9257": "2:9: coordinator.http: expected a section with the keys host, port, insecure, found 9257",
    "http: [1]": "2:9: coordinator.http: expected a section with the keys host, port, insecure, found a list",
    'http: {port: "80"}': '2:16: coordinator.http.port: expected a whole number from 0 to 65535, found "80"; remove the quotes',
    "http: {port: 0123}": "2:16: coordinator.http.port: YAML reads 0123 as the number 83; write 83 if that is meant",
    "http: {port: 1:30}": "2:16: coordinator.http.port: YAML reads 1:30 as the number 90; write 90 if that is meant",
    "http: {port: 1.5}": "2:16: coordinator.http.port: expected a whole number from 0 to 65535, found 1.5",
    "http: {port: -1}": "2:16: coordinator.http.port: expected a whole number from 0 to 65535, found -1; write port: 0",
    "http: {port: yes}": "2:16: coordinator.http.port: expected a whole number from 0 to 65535, found yes, "
    "which YAML reads as true",
    "http: {port: }": "2:15: coordinator.http.port: expected a whole number from 0 to 65535, found nothing",
    "http: {insecure: 1}": "2:20: coordinator.http.insecure: expected true or false, found 1",
    'http: {insecure: "yes"}': '2:20: coordinator.http.insecure: expected true or false, found "yes"; remove the quotes',
    "http: {host: 0.0.0.0}": "2:16: coordinator.http.host: other machines can reach 0.0.0.0, and this version knows no "
    "tokens: everybody there could give commands; write host: 127.0.0.1, or insecure: true beside it",
    'http: {host: "*"}': "2:16: coordinator.http.host: '*' is not a host; write 0.0.0.0 for every IPv4 address, "
    "or '::' for IPv6 as well",
    "log: {level: off}": '2:16: coordinator.log.level: expected "debug" or "info" or "warning" or "error", found off, '
    "which YAML reads as false",
    "log: {level: INFO}": '2:16: coordinator.log.level: expected "debug" or "info" or "warning" or "error", found "INFO"; '
    "write level: info",
    "state_file: on": '2:15: coordinator.state_file: expected text, found on, which YAML reads as true; quote it: "on"',
    "state_file: 12:30": "2:15: coordinator.state_file: expected text, found 12:30, which YAML reads as 750; "
    'quote it: "12:30"',
    "state_file: 0123": '2:15: coordinator.state_file: expected text, found 0123, which YAML reads as 83; quote it: "0123"',
    "state_file: 2026-12-01": '2:15: coordinator.state_file: expected text, found 2026-12-01; quote it: "2026-12-01"',
    "state_file: ~": '2:15: coordinator.state_file: expected text, found ~, which YAML reads as nothing; quote it: "~"',
    'control: "tcp://0.0.0.0:1"': "2:12: coordinator.control: 'tcp://0.0.0.0:1' alone is not enough: peers cannot connect "
    "to 0.0.0.0; write bind: tcp://0.0.0.0:1 and advertise: the address or the name by which peers reach this machine",
    "control: tcp://wk.example:1": "2:12: coordinator.control: 'tcp://wk.example:1' is a name, and a socket is bound to an "
    "address; write bind: tcp://*:1 and advertise: tcp://wk.example:1",
    "control: {advertise: a:1}": "2:12: coordinator.control: the key bind is missing; write bind: tcp://127.0.0.1:29560",
    'feed: {bind: "tcp://*:1", advertise: "tcp://*:1"}': "2:40: coordinator.feed.advertise: 'tcp://*:1' means every address "
    "of the machine that binds it, so nobody can connect to it; write tcp://127.0.0.1:1",
    "feed: tcp://127.0.0.1:29560": "2:9: coordinator.feed: tcp://127.0.0.1:29560 is already taken by "
    "coordinator.control.bind (tcp://127.0.0.1:29560); write another port, or 0 for any free one",
    "http: {port: 29561, host: localhost}": "2:16: coordinator.http.port: tcp://localhost:29561 is already taken by "
    "coordinator.feed.bind (tcp://127.0.0.1:29561); write another port, or 0 for any free one",
    "timing: {heartbeat_ms: 2000}": "2:26: coordinator.timing.heartbeat_ms: dead_after_ms is 5000, but must be at least "
    "6000 (3 x heartbeat_ms): one late heartbeat must not kill a rank; write dead_after_ms: 6000",
    "timing: {step_deadline_ms: 5000}": "2:30: coordinator.timing.step_deadline_ms: step_deadline_ms is 5000, but must be "
    "more than stall_after_ms (5000): a hanging rank is named before the group gives it up; write step_deadline_ms: 50000",
    "timing: {start_ack_timeout_ms: 99}": "2:34: coordinator.timing.start_ack_timeout_ms: start_ack_timeout_ms is 99, but "
    "must be at least 100: a rank that is only slow must not be called lost; write start_ack_timeout_ms: 2000",
    "timing: {heartbeat_ms: 1}": "2:26: coordinator.timing.heartbeat_ms: expected a whole number from 10 to 60000, "
    "found 1; write heartbeat_ms: 10",
    "publish: {interval_ms: 2000}": "2:26: coordinator.publish.interval_ms: keepalive_ms is 1000, but must be at least "
    "interval_ms (2000); write keepalive_ms: 20000",
    "on: 1": '2:3: coordinator: YAML reads the key on as True and not as text; quote it: "on"',
    "<<: {log: {}}": "2:3: coordinator: merge keys (<<) are not supported; write the keys out",
    "? [a]\n  : 1": "2:5: coordinator: a key must be text",
}


@pytest.mark.parametrize("line", COORDINATOR_MISTAKES)
def test_a_mistake_is_told_with_its_place_and_what_would_work(line: str) -> None:
    assert problems(f"coordinator:\n  {line}\n{ONE}") == [f"f.yaml:{COORDINATOR_MISTAKES[line]}"]


DEPLOYMENT_MISTAKES = {
    "{kind: moe, dp_size: 1}": "2:5: deployments[0]: the key name is missing; write name: deepseek-v3",
    "{name: a, dp_size: 1}": '2:5: deployments[0]: the key kind is missing; write kind: "moe" or "dense"',
    "{name: a, kind: moe}": "2:5: deployments[0]: the key dp_size is missing; write dp_size: a whole number from 1 to 4096",
    "{name: a b, kind: moe, dp_size: 1}": "2:12: deployments[0].name: expected 1 to 63 letters, digits, '.', '_' or '-', "
    'the first and the last a letter or a digit, found "a b"; write name: deepseek-v3',
    "{name: a, kind: moe, dp_size: 4097}": "2:35: deployments[0].dp_size: expected a whole number from 1 to 4096, "
    "found 4097; write dp_size: 4096",
    "{name: a, kind: moe, dp_size: 1, exchange: hybrid}": "2:48: deployments[0].exchange: the hybrid exchange is not in "
    "this version; write auto, shm, gloo, nccl or hccl",
    "{name: a, kind: moe, dp_size: 1, exchange: glooo}": '2:48: deployments[0].exchange: expected "auto" or "shm" or '
    '"nccl" or "hccl" or "gloo", found "glooo"; write exchange: gloo',
    "{name: a, kind: dense, dp_size: 1, exchange: auto}": "2:50: deployments[0].exchange: a dense deployment exchanges "
    "nothing: remove this key",
    "{name: a, kind: moe, dp_size: 1, settings: [1]}": "2:48: deployments[0].settings: expected a section of keys and "
    "values, found a list",
    "{name: a, kind: moe, dp_size: 1, settings: {x: [1]}}": "2:52: deployments[0].settings.x: expected text, a number, "
    "true or false, found a list",
    "{name: a, kind: moe, dp_size: 1, settings: {x: .nan}}": "2:52: deployments[0].settings.x: nan is not a finite number; "
    "write it as text in quotes",
    "{name: a, kind: moe, dp_size: 1, settings: {x: 0644}}": "2:52: deployments[0].settings.x: YAML reads 0644 as the "
    'number 420; write 420 if that is meant, or "0644" in quotes if it is text',
    "7": "2:5: deployments[0]: expected a section with the keys name, kind, dp_size, exchange, settings, found 7",
}


@pytest.mark.parametrize("entry", DEPLOYMENT_MISTAKES)
def test_a_mistake_in_a_deployment_is_told_with_its_index(entry: str) -> None:
    assert problems(f"deployments:\n  - {entry}\n") == [f"f.yaml:{DEPLOYMENT_MISTAKES[entry]}"]


def test_the_budget_of_time_is_exact_at_its_bounds() -> None:
    def timing(**times: int) -> bool:
        return not problems(f"coordinator: {{timing: {times}}}\n{ONE}")

    assert timing(heartbeat_ms=100, dead_after_ms=300)
    assert not timing(heartbeat_ms=100, dead_after_ms=299)
    assert timing(heartbeat_ms=100, stall_after_ms=101)
    assert not timing(heartbeat_ms=100, stall_after_ms=100)
    assert timing(stall_after_ms=59_999)
    assert not timing(stall_after_ms=60_000)
    assert timing(start_ack_timeout_ms=100)


@pytest.mark.parametrize(
    ("control", "feed", "collide"),
    [
        ("tcp://127.0.0.1:5", "tcp://127.0.0.1:5", True),
        ("tcp://localhost:5", "tcp://127.0.0.1:5", True),
        ("tcp://[::1]:5", "tcp://[0:0::1]:5", True),
        ("{bind: 'tcp://*:5', advertise: a}", "tcp://127.0.0.1:5", True),
        ("tcp://127.0.0.1:5", "{bind: 'tcp://0.0.0.0:5', advertise: a}", True),
        ("ipc:///run/a.sock", "ipc:///run/a.sock", True),
        ("tcp://127.0.0.1:5", "tcp://127.0.0.1:6", False),
        ("tcp://127.0.0.1:5", "tcp://127.0.0.2:5", False),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", False),
        ("ipc:///run/a.sock", "ipc:///run/b.sock", False),
        ("ipc:///run/a.sock", "tcp://127.0.0.1:5", False),
    ],
)
def test_two_sockets_cannot_have_one_address(control: str, feed: str, collide: bool) -> None:
    told = problems(f"coordinator:\n  control: {control}\n  feed: {feed}\n{ONE}")
    assert ["is already taken by coordinator.control.bind" in problem for problem in told] == [True] * collide


def test_two_deployments_cannot_have_one_name_even_if_something_else_is_wrong_with_them() -> None:
    text = "deployments:\n  - {name: a, kind: moe, dp_size: 0}\n  - {name: a, kind: dense, dp_size: 1}\n"
    assert problems(text) == [
        "f.yaml:2:35: deployments[0].dp_size: expected a whole number from 1 to 4096, found 0; write dp_size: 1",
        'f.yaml:3:12: deployments[1].name: "a" is already the name of deployments[0]; write another one',
    ]


FILE_MISTAKES = {
    "": "f.yaml: the key deployments is missing; write deployments: with one entry for each",
    "# nothing": "f.yaml: the key deployments is missing; write deployments: with one entry for each",
    "coordinator: {}": "f.yaml:1:1: the key deployments is missing; write deployments: with one entry for each",
    "deployments: []": "f.yaml:1:14: deployments: holds no deployment; write at least one, with name, kind and dp_size",
    "deployments:": "f.yaml:1:13: deployments: expected a list, found nothing; begin each entry with a dash",
    "deployments: {a: 1}": "f.yaml:1:14: deployments: expected a list, found a section; begin each entry with a dash",
    "- 1": "f.yaml:1:1: expected a section with the keys coordinator, deployments, found a list",
    "a: b: c": "f.yaml:1:5: a second colon in one line, or a wrong indentation; "
    "put text with a colon and a space into quotes",
    "a:\n\tb: 1": "f.yaml:2:1: a tab stands where YAML wants spaces; indent with spaces",
    "a: [1": "f.yaml:1:6: this is not valid YAML: expected ',' or ']', but got '<stream end>' "
    "(while parsing a flow sequence)",
    "a: 1\n---\nb: 1": "f.yaml:2:1: this is not valid YAML: but found another document "
    "(expected a single document in the stream)",
    "a: {b: ::1}": "f.yaml:1:8: this is not valid YAML: expected the node content, but found ':'; "
    "put text with special characters into quotes",
    "a: *x": "f.yaml:1:4: this is not valid YAML: found undefined alias 'x'",
    "a: &x [*x]": "f.yaml:1:4: this is not valid YAML: this alias stands inside of its own anchor",
    "a: !!python/name:os.system x": "f.yaml:1:4: this is not valid YAML: could not determine a constructor for the tag "
    "'tag:yaml.org,2002:python/name:os.system'",
    "a: \x07": "f.yaml: character 3 is U+0007, which YAML does not allow",
    "a: " + "[" * 5_000: "f.yaml: the sections are nested too deeply",
    "#" * (TEXT_BYTES_MAX + 1): f"f.yaml: the file has {TEXT_BYTES_MAX + 1} bytes, at most {TEXT_BYTES_MAX}",
}


@pytest.mark.parametrize("text", FILE_MISTAKES, ids=lambda text: repr(text[:20]))
def test_a_file_that_is_no_configuration_is_told_as_one_line(text: str) -> None:
    assert problems(text) == [FILE_MISTAKES[text]]


def test_bytes_that_are_no_utf_8_are_told() -> None:
    assert problems(b"a: \xff") == ["f.yaml: byte 3 is not UTF-8; save the file as UTF-8"]
    assert problems(b"\xef\xbb\xbf" + ONE.encode()) == [], "a byte order mark is harmless"


def test_a_doubled_key_is_told_with_both_lines() -> None:
    text = "coordinator:\n  http:\n    port: 1\n    host: ::1\n    port: 2\n" + ONE + "coordinator: {}\n"
    assert problems(text) == [
        'f.yaml:5:5: coordinator.http.port: the key "port" stands here a second time, first in line 3; '
        "remove one of the two",
        'f.yaml:8:1: coordinator: the key "coordinator" stands here a second time, first in line 1; remove one of the two',
    ]


def test_aliases_of_aliases_do_not_fill_the_memory() -> None:
    levels = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    (problem,) = read_yaml("\n".join(levels), "f.yaml").problems
    assert "too large" in problem.message
    assert NODES_MAX < 10**9


def test_an_anchor_used_twice_is_fine() -> None:
    text = "deployments:\n  - {name: a, kind: moe, dp_size: 1, settings: &s {m: x}}\n  - {name: b, kind: moe, dp_size: 1, settings: *s}"
    config = parse_config(text, "f.yaml")
    assert config.deployments[0].settings == config.deployments[1].settings == {"m": "x"}


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.yaml", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(caught.value) == f"{path}: cannot be read: {reason}"


KEYS = st.sampled_from(
    [
        "coordinator",
        "deployments",
        "control",
        "feed",
        "http",
        "timing",
        "bind",
        "advertise",
        "host",
        "port",
        "name",
        "kind",
        "dp_size",
        "exchange",
        "settings",
        "log",
        "level",
        "heartbeat_ms",
        "x",
    ]
)
NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, NESTED, max_size=4))
@example({"coordinator": "\r"})
@example({"coordinator": {"a\n": 1, "log": {"level": "\x1b[2J\u2028"}}})
def test_no_data_does_anything_but_load_or_be_refused_in_words(data: dict[str, object]) -> None:
    text = yaml.safe_dump(data, allow_unicode=True)
    for problem in problems(text, environ={"WAVEKEEPER_HTTP__PORT": "0", "WAVEKEEPER_CONTROL__BIND": "tcp://[::1]:0"}):
        assert problem.startswith("f.yaml"), problem
        assert problem.isprintable()


@given(st.text())
def test_no_text_does_anything_but_load_or_be_refused_in_words(text: str) -> None:
    assert problems(text)


def test_the_error_carries_its_facts_through_pickling() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(FIVE_MISTAKES, "f.yaml")
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.problems == caught.value.problems
    assert again.problems[3][:4] == Problem("f.yaml", 12, 11, "deployments[1].kind", "")[:4]


# --- what overrides what ---------------------------------------------------------------------------------------------


def test_a_variable_overrides_the_file_and_a_flag_overrides_the_variable() -> None:
    text = "coordinator: {http: {port: 1}, log: {level: error}}\n" + ONE
    environ = {"WAVEKEEPER_HTTP__PORT": "2", "WAVEKEEPER_LOG__LEVEL": "debug", "WAVEKEEPER_CONTROL": "tcp://[::1]:0"}
    coordinator = parse_config(text, "f", environ=environ, sets=("coordinator.http.port=3",)).coordinator
    assert (coordinator.http.port, coordinator.log.level) == (3, LogLevel.DEBUG)
    assert coordinator.control == Address(bind="tcp://[::1]:0")
    assert parse_config(text, "f").coordinator.http.port == 1, "without an environment the file alone counts"


def test_a_variable_reaches_into_an_address_that_the_file_gives_as_text() -> None:
    text = 'coordinator: {control: "tcp://*:29560"}\n' + ONE
    config = parse_config(text, "f", environ={"WAVEKEEPER_CONTROL__ADVERTISE": "wk.example"})
    assert config.coordinator.control == Address(bind="tcp://*:29560", advertise="wk.example")
    both = {"WAVEKEEPER_CONTROL__ADVERTISE": "b.example", "WAVEKEEPER_CONTROL": "tcp://*:1"}
    assert parse_config(text, "f", environ=both).coordinator.control == Address(bind="tcp://*:1", advertise="b.example")


def test_a_variable_for_a_text_needs_no_quotes() -> None:
    for value in ("on", "0123", "", "{a", "~", "a: b"):
        assert parse_config(ONE, "f", environ={"WAVEKEEPER_STATE_FILE": value}).coordinator.state_file == value


VARIABLE_MISTAKES = {
    "WAVEKEEPER_HTTP__PORT=x": 'coordinator.http.port: expected a whole number from 0 to 65535, found "x"',
    "WAVEKEEPER_HTTP__PORT=0x": 'coordinator.http.port: expected a whole number from 0 to 65535, found "0x"',
    "WAVEKEEPER_CONTROL=tcp://::1:1": "coordinator.control: 'tcp://::1:1' is ambiguous: an IPv6 address before a port needs "
    "brackets; write tcp://[::1]:1",
    "WAVEKEEPER_TIMING__HEARTBEAT_MS=5000": "coordinator.timing.heartbeat_ms: stall_after_ms is 5000, but must be more than "
    "heartbeat_ms (5000)",
    "WAVEKEEPER_HTTP_PORT=1": "no such key; did you mean WAVEKEEPER_HTTP__PORT?",
    "WAVEKEEPER_HTTP=1": "no such key; it is a section with WAVEKEEPER_HTTP__HOST, WAVEKEEPER_HTTP__PORT, ",
    "WAVEKEEPER_STATEFILE=x": "no such key; did you mean WAVEKEEPER_STATE_FILE?",
    "WAVEKEEPER_QQQ__WWW=x": "no such key; known are WAVEKEEPER_CONTROL, ",
    "WAVEKEEPER_DEPLOYMENTS__0__DP_SIZE=3": "no variable can override a list; write the deployments into the file",
}


@pytest.mark.parametrize("variable", VARIABLE_MISTAKES)
def test_a_wrong_variable_is_named(variable: str) -> None:
    name, _, value = variable.partition("=")
    first = problems(ONE, environ={name: value})[0]
    assert first.startswith(f"environment variable {name}: {VARIABLE_MISTAKES[variable]}")


def test_variables_of_others_are_left_alone() -> None:
    environ = {
        "WAVEKEEPER_ENDPOINT": "tcp://127.0.0.1:1",
        "WAVEKEEPER_DEPLOYMENT": "m",
        "WAVEKEEPER_EXCHANGE": "shm",
        "WAVEKEEPER_URL": "http://127.0.0.1:1",
        "WAVEKEEPER_CONFIG": "x",
        "WAVEKEEPER_SEED": "8121",
        "WAVEKEEPER_TEST_SLOW": "1",
        "HTTP__PORT": "x",
        # what Kubernetes gives every pod beside the Services "wavekeeper" and "wavekeeper-http"
        "WAVEKEEPER_SERVICE_HOST": "10.0.0.7",
        "WAVEKEEPER_SERVICE_PORT": "29560",
        "WAVEKEEPER_SERVICE_PORT_HTTP": "9257",
        "WAVEKEEPER_PORT": "tcp://10.0.0.7:29560",
        "WAVEKEEPER_PORT_29560_TCP": "tcp://10.0.0.7:29560",
        "WAVEKEEPER_PORT_29560_TCP_PROTO": "tcp",
        "WAVEKEEPER_PORT_29560_TCP_PORT": "29560",
        "WAVEKEEPER_PORT_29560_TCP_ADDR": "10.0.0.7",
        "WAVEKEEPER_HTTP_SERVICE_HOST": "10.0.0.8",
        "WAVEKEEPER_HTTP_PORT": "tcp://10.0.0.8:9257",
        "WAVEKEEPER_HTTP_PORT_9257_TCP_ADDR": "10.0.0.8",
    }
    assert problems(ONE, environ=environ) == []


FLAG_MISTAKES = {
    "http.port=1": "no such key; did you mean coordinator.http.port?",
    "coordinator.log=1": "no such key; it is a section with coordinator.log.level, coordinator.log.format",
    "coordinator.http.port": "a value is missing; write --set coordinator.http.port=VALUE",
    "deployments[0].dp_size=3": "no flag can override a list; write the deployments into the file",
    "coordinator.http.port=70000": "coordinator.http.port: expected a whole number from 0 to 65535, found 70000; "
    "write port: 65535",
}


@pytest.mark.parametrize("flag", FLAG_MISTAKES)
def test_a_wrong_flag_is_named(flag: str) -> None:
    assert problems(ONE, sets=(flag,)) == [f"--set {flag}: {FLAG_MISTAKES[flag]}"]


def test_an_override_does_not_hide_what_is_wrong_with_the_file() -> None:
    environ = {"WAVEKEEPER_HTTP__PORT": "0"}
    assert problems("coordinator: {http: 3}\n" + ONE, environ=environ)[0].startswith(
        "f.yaml:1:21: coordinator.http: exp"
    )
    assert problems("coordinator: 3\n" + ONE, environ=environ)[0].startswith("f.yaml:1:14: coordinator: expected a")
    assert problems("[3]", environ=environ)[0].startswith("f.yaml:1:1: expected a section")


# --- the structs -----------------------------------------------------------------------------------------------------


def test_a_config_made_in_code_is_valid_or_refused() -> None:
    dense = DeploymentConfig(name="a", kind=Kind.DENSE, dp_size=1, exchange=Exchange.SHM)
    with pytest.raises(ConfigError, match=re.escape("deployments[0].exchange: a dense deployment exchanges nothing")):
        Config(deployments=(dense,))
    with pytest.raises(ConfigError, match="holds no deployment"):
        Config(deployments=())


def test_a_field_that_is_wrong_by_itself_is_not_judged_by_relations() -> None:
    values = dict(flatten(parse_config(ONE, "f")))
    assert list(relations(values)) == []
    for key in values:
        assert list(relations({k: v for k, v in values.items() if k != key})) == [], key


def test_what_takes_effect_can_be_written_down_and_read_again() -> None:
    text = 'coordinator: {control: {bind: "tcp://*:1", advertise: a.example}, http: {host: "::1"}}\n' + ONE
    config = parse_config(text, "f")
    again = parse_config(yaml.safe_dump(msgspec.to_builtins(config)), "f")
    assert again == config
    assert config_hash(again) == config_hash(config)


def test_the_hash_tells_configurations_apart_and_not_their_forms() -> None:
    one, same = parse_config(ONE, "f"), parse_config("coordinator: {}\n" + ONE, "other")
    assert config_hash(one) == config_hash(same)
    assert config_hash(one) != config_hash(parse_config(ONE.replace("4", "5"), "f"))
    assert re.fullmatch(r"[0-9a-f]{12}", config_hash(one))


def test_every_key_has_a_description_in_the_schema() -> None:
    schema = config_schema()
    sections = [definition.get("anyOf", [definition])[-1] for definition in schema["$defs"].values()]
    described = {
        (section["title"], name): bool(field.get("description"))
        for section in sections
        for name, field in section.get("properties", {}).items()
    }
    assert len(described) >= 25
    assert [key for key, found in described.items() if not found] == []


@pytest.mark.parametrize("text", [FIVE_MISTAKES, "deployments: []", "coordinator: {timing: {x: 1}}\n" + ONE])
def test_the_schema_refuses_what_the_loader_refuses(text: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(config_schema())
    assert list(validator.iter_errors(yaml.safe_load(text)))
    assert not list(validator.iter_errors(yaml.safe_load('coordinator: {control: "tcp://[::1]:1"}\n' + ONE)))
