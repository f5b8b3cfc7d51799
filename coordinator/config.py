"""The coordinator's configuration: what an operator can say.

The law of this file: a `Config` that exists is valid. The structs below are the one schema: loading, `config check`,
`config show` and the JSON schema are all made from their fields, types and descriptions. What one field allows stands
in its type; what must hold between fields stands in config_relations.py.

No YAML here (see config_load.py), so that tests and the demo can build a Config without a file.
"""

import hashlib
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from ..proto.endpoints import Endpoint, advertised, bracketed, parse_endpoint, parse_host
from ..proto.messages import DP_SIZE_MAX, Kind, Name, Setting, Timing
from .config_relations import relations

EXIT_CONFIG = 78
"""EX_CONFIG of sysexits: a supervisor must not restart a process whose configuration is wrong."""


class Problem(NamedTuple):
    """One mistake. `line` and `column` count from 1; 0 where there is no such place (an environment variable)."""

    file: str
    line: int
    column: int
    key: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return one_line(f"{place}: {self.key}: {self.message}" if self.key else f"{place}: {self.message}")


def one_line(text: str) -> str:
    """Escape what would begin a new line or move a terminal's cursor: a message may repeat what a stranger wrote."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class ConfigError(Exception):
    """The configuration cannot be used; `problems` are all of its mistakes. Nothing has been started."""

    exit_code: ClassVar[int] = EXIT_CONFIG

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        self.problems = problems
        super().__init__(problems)  # keeps the error picklable

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


class Exchange(StrEnum):
    """How the ranks of a lockstep deployment swap their rows. `auto` picks by what all ranks offer when they form."""

    AUTO = "auto"
    SHM = "shm"
    NCCL = "nccl"
    HCCL = "hccl"
    GLOO = "gloo"


class LogLevel(StrEnum):
    """The least important line that is still logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How log lines look. `auto` is text on a terminal and JSON elsewhere."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every part of the configuration. `shorthand` is the field that a plain string stands for, if one does."""

    shorthand: ClassVar[str] = ""


class Address(Section, frozen=True, kw_only=True):
    """Where a socket is bound, and what peers are told. A plain string is its `bind`."""

    shorthand: ClassVar[str] = "bind"

    bind: Annotated[
        str,
        Meta(
            description="address of this machine to bind to: tcp://127.0.0.1:29560, tcp://[::1]:29560, tcp://*:29560, "
            "ipc:///run/wavekeeper/control.sock; port 0 takes any free port",
            examples=["tcp://127.0.0.1:29560"],
        ),
    ]
    advertise: Annotated[
        str,
        Meta(
            description="address by which peers reach it, where that differs from `bind`; required where `bind` is a "
            "wildcard; without a port it takes that of `bind`",
            examples=["tcp://coordinator.example:29560"],
        ),
    ] = ""

    @property
    def bind_endpoint(self) -> Endpoint:
        """Where to bind."""
        return parse_endpoint(self.bind).for_bind()

    def advertised_endpoint(self, real_port: int) -> Endpoint:
        """Return what peers are told, once the socket has got its real port (0 for ipc)."""
        return advertised(self.bind_endpoint, real_port, self.advertise)


class HttpConfig(Section, frozen=True, kw_only=True):
    """The status endpoint: health, readiness, status, metrics, events and operator commands."""

    host: Annotated[str, Meta(description="address to bind the HTTP server to", examples=["127.0.0.1"])] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535, description="port of the HTTP server; 0 takes any free one")] = 9257
    insecure: Annotated[
        bool,
        Meta(description="allow a host that other machines can reach, although everybody there may give commands"),
    ] = False

    def url(self, real_port: int) -> str:
        """Return where the server answers, once it has got its real port."""
        return f"http://{bracketed(parse_host(self.host))}:{real_port}"


class PublishConfig(Section, frozen=True, kw_only=True):
    """How often front-ends hear of a deployment on the feed."""

    interval_ms: Annotated[
        int, Meta(ge=1, le=60_000, description="least time between two updates of a deployment, in milliseconds")
    ] = 100
    keepalive_ms: Annotated[
        int, Meta(ge=1, le=600_000, description="longest silence of the feed while nothing changes, in milliseconds")
    ] = 1_000


class LogConfig(Section, frozen=True, kw_only=True):
    """What is logged on stderr, and how."""

    level: Annotated[LogLevel, Meta(description="the least important line that is still logged")] = LogLevel.INFO
    format: Annotated[LogFormat, Meta(description="auto is text on a terminal and JSON lines elsewhere")] = (
        LogFormat.AUTO
    )


class CoordinatorConfig(Section, frozen=True, kw_only=True):
    """The coordinator's own process."""

    control: Annotated[Address, Meta(description="control plane: agents and front-ends connect here")] = Address(
        bind="tcp://127.0.0.1:29560"
    )
    feed: Annotated[Address, Meta(description="feed of deployment states; front-ends subscribe here")] = Address(
        bind="tcp://127.0.0.1:29561"
    )
    http: Annotated[HttpConfig, Meta(description="status endpoint")] = HttpConfig()
    timing: Annotated[Timing, Meta(description="the one budget of time, shared with every rank")] = Timing()
    publish: Annotated[PublishConfig, Meta(description="pace of the feed")] = PublishConfig()
    log: Annotated[LogConfig, Meta(description="log lines on stderr")] = LogConfig()
    state_file: Annotated[
        str,
        Meta(
            description="file in which the term is kept over restarts; empty: the term is taken from the clock",
            examples=["/var/lib/wavekeeper/state.json"],
        ),
    ] = ""


class DeploymentConfig(Section, frozen=True, kw_only=True):
    """One served model. In a valid one `exchange` is set for moe (`auto` if nothing was said) and None for dense."""

    name: Annotated[
        Name,
        Meta(
            description="name of the deployment, unique here",
            examples=["deepseek-v3"],
            extra={"words": "1 to 63 letters, digits, '.', '_' or '-', the first and the last a letter or a digit"},
        ),
    ]
    kind: Annotated[Kind, Meta(description="moe: its ranks run in lockstep; dense: they are independent")]
    dp_size: Annotated[int, Meta(ge=1, le=DP_SIZE_MAX, description="number of data-parallel ranks")]
    exchange: Annotated[
        Exchange | None, Meta(description="how the ranks of a moe deployment swap their rows; not for dense")
    ] = None
    settings: Annotated[
        dict[str, Setting],
        Meta(
            description="settings that every rank must have; a rank that differs is refused at registration",
            extra={"words": "text, a number, true or false"},
        ),
    ] = {}

    def __post_init__(self) -> None:
        if self.exchange is None and self.kind is Kind.MOE:
            msgspec.structs.force_setattr(self, "exchange", Exchange.AUTO)


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration of one coordinator.

    Raises:
        ConfigError: When it is made with parts that do not fit together.
    """

    coordinator: Annotated[CoordinatorConfig, Meta(description="the coordinator's own process")] = CoordinatorConfig()
    deployments: Annotated[
        tuple[DeploymentConfig, ...], Meta(min_length=1, description="the deployments that it coordinates")
    ]

    def __post_init__(self) -> None:
        broken = [Problem("configuration", 0, 0, b.keys[0], b.message) for b in relations(dict(flatten(self)))]
        if broken:
            raise ConfigError(tuple(broken))


def flatten(section: msgspec.Struct, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every field that is not a section; a list of sections also yields its length."""
    for name in section.__struct_fields__:
        key, value = join(path, name), getattr(section, name)
        if isinstance(value, msgspec.Struct):
            yield from flatten(value, key)
        elif isinstance(value, tuple):
            yield key, len(value)
            for index, item in enumerate(value):
                yield from flatten(item, f"{key}[{index}]")
        else:
            yield key, value


def join(path: str, name: str) -> str:
    """Return the path of a field of the section at `path`."""
    return f"{path}.{name}" if path else name


def config_hash(config: Config) -> str:
    """Return a short text that is equal for equal effective configurations, in whatever form they were written."""
    return hashlib.sha256(msgspec.json.encode(config, order="sorted")).hexdigest()[:12]


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of the file, for editors and for checks without wavekeeper."""
    schema = msgspec.json.schema(Config)
    definitions = schema["$defs"]
    definitions["Timing"]["additionalProperties"] = False
    # The plain string of `control: tcp://...` is our own rule, so msgspec does not know of it.
    definitions["Address"] = {"title": "Address", "anyOf": [{"type": "string"}, definitions["Address"]]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "wavekeeper", **schema}
