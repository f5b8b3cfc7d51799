"""The command line: exit codes, what goes to which stream, what is loaded when; and the log lines."""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from wavekeeper.coordinator import logs
from wavekeeper.coordinator.commands import cli
from wavekeeper.coordinator.config import LogFormat, LogLevel
from wavekeeper.coordinator.config_load import load_config, parse_config

CONFIGS = Path(__file__).parent.parent / "deploy" / "config"
HEAVY = {"torch", "numpy", "pydantic", "grpc", "uvicorn", "starlette", "zmq", "yaml", "rich"}
RUN_S_MAX = 60  # a hanging command must fail its test, on a busy machine too

FIVE_MISTAKES = """\
coordinator:
  control: tcp://::1:29560
  http: {port: 70000}
deployments:
  - {name: a, kind: MOE, dp_size: 4}
  - {name: b, kind: dense, dp_size: 0}
  - {name: c, kind: dense, dp_size: 1, exchange: shm}
"""


def run(*arguments: str, **environ: str) -> Result:
    """Call a command in this process."""
    return CliRunner().invoke(cli, arguments, env=environ)


def python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run another interpreter, isolated from the checkout as the tests are."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WAVEKEEPER_")}
    command = [sys.executable, "-I", *arguments]
    return subprocess.run(command, env=kept | environ, capture_output=True, text=True, timeout=RUN_S_MAX, check=False)


def wavekeeper(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "wavekeeper.coordinator", *arguments, **environ)


Configure = Callable[..., io.StringIO]


@pytest.fixture
def configure() -> Iterator[Configure]:
    """Configure the logs and return what goes to stderr from then on."""
    loggers = [logging.getLogger(name) for name in logs.LOGGERS]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]

    def to_stream(form: LogFormat, level: LogLevel = LogLevel.INFO, stream: io.StringIO | None = None) -> io.StringIO:
        stream = io.StringIO() if stream is None else stream
        with contextlib.redirect_stderr(stream):
            logs.configure(level, form)
        return stream

    yield to_stream
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate, logger.handlers[:] = propagate, handlers


@pytest.fixture
def bad_config(tmp_path: Path) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_text(FIVE_MISTAKES)
    return path


# --- config ----------------------------------------------------------------------------------------------------------


def test_check_tells_all_five_mistakes_with_their_lines_and_exits_with_78(bad_config: Path) -> None:
    done = wavekeeper("config", "check", str(bad_config))
    assert done.returncode == 78
    assert [line.split(": ")[0] for line in done.stdout.splitlines()] == [
        f"{bad_config}:{place}" for place in ("2:12", "3:16", "5:21", "6:37", "7:50")
    ]
    assert done.stderr == ""


def test_check_goes_on_after_a_bad_file(bad_config: Path) -> None:
    done = run("config", "check", str(bad_config), str(CONFIGS / "mixed.yaml"), str(CONFIGS / "demo.yaml"))
    assert done.exit_code == 78
    assert done.stdout.splitlines()[-2:] == [
        f"{CONFIGS / 'mixed.yaml'}: ok (2 deployments: deepseek-v3 (moe, 16 ranks), qwen3-4b (dense, 2 ranks))",
        f"{CONFIGS / 'demo.yaml'}: ok (2 deployments: demo-moe (moe, 4 ranks), demo-dense (dense, 2 ranks))",
    ]


def test_check_of_good_files_exits_with_0() -> None:
    assert run("config", "check", str(CONFIGS / "mixed.yaml")).exit_code == 0


def test_check_counts_the_environment_as_serve_would() -> None:
    done = run("config", "check", str(CONFIGS / "mixed.yaml"), WAVEKEEPER_HTTP__PORT="x")
    assert done.exit_code == 78
    assert done.stdout.startswith("environment variable WAVEKEEPER_HTTP__PORT: coordinator.http.port: expected")


def test_show_prints_yaml_with_defaults_and_overrides_that_loads_again() -> None:
    path = CONFIGS / "demo.yaml"
    done = run("config", "show", str(path), "--set", "coordinator.log.level=debug", WAVEKEEPER_HTTP__PORT="1234")
    assert done.exit_code == 0
    assert done.stdout.startswith("# config_hash: ")
    shown = yaml.safe_load(done.stdout)["coordinator"]
    assert (shown["http"]["port"], shown["log"]["level"], shown["timing"]["heartbeat_ms"]) == (1234, "debug", 500)
    again = parse_config(done.stdout, "shown")
    assert (again.coordinator.http.port, again.coordinator.log.level) == (1234, LogLevel.DEBUG)


def test_show_of_a_bad_file_keeps_stdout_clean(bad_config: Path) -> None:
    done = run("config", "show", str(bad_config))
    assert (done.exit_code, done.stdout) == (78, "")
    assert len(done.stderr.splitlines()) == 5


def test_schema_prints_json() -> None:
    schema = json.loads(run("config", "schema").stdout)
    assert schema["$defs"]["Config"]["required"] == ["deployments"]


# --- serve -----------------------------------------------------------------------------------------------------------


def test_serve_with_a_bad_configuration_exits_with_78_before_anything_is_bound(
    bad_config: Path, tmp_path: Path
) -> None:
    ready = tmp_path / "ready.json"
    done = run("serve", "--config", str(bad_config), "--ready-file", str(ready))
    assert (done.exit_code, done.stdout) == (78, "")
    assert done.stderr.count(f"{bad_config}:") == 5
    assert not ready.exists()


def test_serve_takes_its_configuration_from_the_environment_too(bad_config: Path) -> None:
    assert run("serve", WAVEKEEPER_CONFIG=str(bad_config)).exit_code == 78


@pytest.mark.parametrize(
    "arguments",
    [["serve"], ["serv"], ["serve", "--config", "x", "--log-format", "xml"], ["config", "check"], ["config", "show"]],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Usage: " in done.stderr


def test_a_wrong_key_of_set_is_named() -> None:
    done = run("serve", "--config", str(CONFIGS / "demo.yaml"), "--set", "http.port=0")
    assert done.exit_code == 78
    assert done.stderr == "--set http.port=0: no such key; did you mean coordinator.http.port?\n"


class OtherModule(types.ModuleType):
    """Stands for a module behind a command: notes the calls of its functions, and answers with one exit code."""

    def __init__(self, code: int) -> None:
        super().__init__("other")
        self.calls: list[tuple[Any, ...]] = []
        self._code = code

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*positional: Any, **keyword: Any) -> int:
            self.calls.append((name, *positional, *keyword.values()))
            return self._code

        return call


def test_serve_gives_the_effective_configuration_to_the_service_and_its_exit_code_back(
    monkeypatch: pytest.MonkeyPatch, configure: Configure
) -> None:
    service = OtherModule(code=3)
    monkeypatch.setitem(sys.modules, "wavekeeper.coordinator.service", service)
    path = CONFIGS / "demo.yaml"
    arguments = ["--set", "coordinator.log.format=json", "--log-format", "text", "--ready-file", "ready.json"]
    assert run("serve", "--config", str(path), *arguments, WAVEKEEPER_LOG__LEVEL="error").exit_code == 3
    expected = load_config(path, sets=("coordinator.log.format=text", "coordinator.log.level=error"))
    assert service.calls == [("serve", expected, Path("ready.json"))]
    ours = logging.getLogger("wavekeeper")
    assert (ours.level, type(ours.handlers[0].formatter)) == (logging.ERROR, logs.TextFormatter)


def test_status_and_healthcheck_ask_where_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    client = OtherModule(code=1)
    monkeypatch.setitem(sys.modules, "wavekeeper.coordinator.status.client", client)
    assert run("status", "--json").exit_code == 1
    assert run("status", "--why", "--url", "http://127.0.0.1:1").exit_code == 1
    assert run("healthcheck", WAVEKEEPER_URL="http://127.0.0.1:2").exit_code == 1
    assert client.calls == [
        ("print_status", "http://127.0.0.1:9257", True, False),
        ("print_status", "http://127.0.0.1:1", False, True),
        ("healthcheck", "http://127.0.0.1:2"),
    ]


# --- what is loaded --------------------------------------------------------------------------------------------------


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that the statement loads, as the interpreter reports them."""
    done = python("-X", "importtime", "-c", statement)
    assert done.returncode == 0, done.stderr
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}


def test_importing_the_door_loads_nothing_heavy() -> None:
    assert loaded_by("import wavekeeper.coordinator.cli") & (HEAVY | {"click", "msgspec"}) == set()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["serve", "--help"], ["config", "--help"], ["version"]], ids=" ".join
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    statement = f"import sys; sys.argv[1:] = {arguments}; from wavekeeper.coordinator.cli import main; main()"
    assert loaded_by(statement) & HEAVY == set()


def test_help_names_every_command() -> None:
    text = run("--help").stdout
    for name in ("config", "demo", "healthcheck", "serve", "status", "version"):
        assert f"\n  {name} " in text


@pytest.mark.parametrize(
    ("missing", "arguments", "sentence"),
    [
        ("click", ["--help"], "wavekeeper's commands need the server extra: pip install 'wavekeeper[server]'\n"),
        (
            "yaml",
            ["config", "check", "x"],
            "wavekeeper's commands need the server extra: pip install 'wavekeeper[server]'\n",
        ),
    ],
)
def test_a_missing_extra_is_a_sentence_and_exits_with_1(missing: str, arguments: list[str], sentence: str) -> None:
    statement = (
        "import sys, importlib.abc\n"
        "class Absent(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {missing!r}: raise ModuleNotFoundError('no ' + name, name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"sys.argv[1:] = {arguments}\n"
        "from wavekeeper.coordinator.cli import main\n"
        "main()\n"
    )
    done = python("-c", statement)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", sentence)


def test_version_is_that_of_the_package() -> None:
    done = wavekeeper("version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("wavekeeper 0.")


# --- logs ------------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def log(message: str, **kwargs: Any) -> None:
    logging.getLogger("wavekeeper.test").warning(message, **kwargs)


def test_a_json_line_holds_time_level_logger_message_and_fields(configure: Configure) -> None:
    stderr = configure(LogFormat.JSON)
    log("formed", extra={"fields": {"epoch": 3, "kind": LogLevel.INFO, "msg": "mine", "path": Path("/x")}})
    line = json.loads(stderr.getvalue())
    assert datetime.fromisoformat(line.pop("ts")).utcoffset() is not None
    assert line == {
        "level": "warning",
        "logger": "wavekeeper.test",
        "msg": "formed",
        "epoch": 3,
        "kind": "info",
        "msg_": "mine",
        "path": repr(Path("/x")),
    }


def test_a_text_line_holds_the_same_with_keys_and_values(configure: Configure) -> None:
    stderr = configure(LogFormat.TEXT)
    log("formed", extra={"fields": {"epoch": 3, "why": "rank 2\nis new", "empty": ""}})
    time, _, rest = stderr.getvalue().partition(" WARNING ")
    datetime.strptime(time, "%Y-%m-%d %H:%M:%S.%f")
    assert rest == 'wavekeeper.test: formed epoch=3 why="rank 2\\nis new" empty=""\n'


@pytest.mark.parametrize("form", [LogFormat.TEXT, LogFormat.JSON])
def test_what_a_stranger_sends_stays_one_line(configure: Configure, form: LogFormat) -> None:
    stderr = configure(form)
    log("junk \r\n\x1b[2J \ud800", extra={"fields": {"name": "a\n\ud800"}})
    assert stderr.getvalue().count("\n") == 1
    assert "\x1b" not in stderr.getvalue()


@pytest.mark.parametrize("form", [LogFormat.TEXT, LogFormat.JSON])
def test_an_exception_comes_with_its_traceback(configure: Configure, form: LogFormat) -> None:
    stderr = configure(form)
    try:
        raise ValueError("broken")
    except ValueError:
        log("failed", exc_info=True)
    assert "Traceback" in stderr.getvalue()
    if form is LogFormat.JSON:
        assert json.loads(stderr.getvalue())["exc"].endswith("ValueError: broken")


def test_auto_is_text_on_a_terminal_and_json_elsewhere(configure: Configure) -> None:
    stderr = configure(LogFormat.AUTO)
    log("one")
    assert stderr.getvalue().startswith("{")
    terminal = configure(LogFormat.AUTO, stream=Terminal())
    log("two")
    assert terminal.getvalue().endswith("wavekeeper.test: two\n")


def test_only_our_loggers_are_touched_and_each_line_comes_once(configure: Configure) -> None:
    root = logging.getLogger()
    of_somebody_else = io.StringIO()
    root.addHandler(handler := logging.StreamHandler(of_somebody_else))
    before = (root.level, list(root.handlers), logging.getLogger("vllm").level)
    configure(LogFormat.TEXT, LogLevel.WARNING)
    stderr = configure(LogFormat.TEXT, LogLevel.WARNING)
    logging.getLogger("uvicorn.error").warning("from uvicorn")
    logging.getLogger("wavekeeper.test").info("below the level")
    log("once")
    root.removeHandler(handler)
    assert (root.level, [*root.handlers, handler], logging.getLogger("vllm").level) == before
    assert of_somebody_else.getvalue() == ""
    assert [line.rpartition(": ")[2] for line in stderr.getvalue().splitlines()] == ["from uvicorn", "once"]
