"""A file, the environment and `--set` -> a `Config`, or all mistakes at once.

The law of this file: it knows no key by name. It walks the fields of the structs in config.py, so a new field there is
loaded, checked and overridable here. msgspec alone would stop at the first mistake; here every field is converted by
itself, what is wrong is noted with its place, and the relations are judged over all that is right.

Precedence: defaults < file < environment (`WAVEKEEPER_HTTP__PORT=0`: a key of the section `coordinator`, `__` for each
dot) < `--set coordinator.http.port=0`.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect as shapes

from .config import Config, ConfigError, CoordinatorConfig, Problem, Section, flatten, join
from .config_relations import relations
from .config_words import did_you_mean, found, mismatch, missing, unwrap
from .yaml_source import Mark, Source, is_yaml_11_number, read_yaml

ENV_PREFIX = "WAVEKEEPER_"
ENV_OTHERS = frozenset(f"{ENV_PREFIX}{name}" for name in ("ENDPOINT", "DEPLOYMENT", "EXCHANGE", "URL", "CONFIG"))
"""Read by agents and by the command line, never as configuration."""

_SECTION = "coordinator"  # the only part that can be overridden: lists (deployments) have no names to address them by

# Kubernetes puts these into every pod beside a Service of our name (WAVEKEEPER_SERVICE_HOST, WAVEKEEPER_PORT_80_TCP,
# WAVEKEEPER_PORT=tcp://10.0.0.7:80): to take them for configuration would keep the pod from starting.
_KUBERNETES_NAME = re.compile(r"(.+_)?(SERVICE_(HOST|PORT)(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_KUBERNETES_PORT = re.compile(r"(tcp|udp|sctp)://[0-9a-fA-F.:\[\]]+:\d+")

_BAD: Final[Any] = object()
"""Stands for a value that is wrong and has been noted; None can be a right one."""


def load_config(file: Path, *, environ: Mapping[str, str] | None = None, sets: Sequence[str] = ()) -> Config:
    """Read a configuration file.

    Args:
        file: YAML, UTF-8.
        environ: Environment variables, which may override the section `coordinator`; None: no variable does.
        sets: `KEY.PATH=VALUE` texts that override the section `coordinator`, the later ones winning.

    Raises:
        ConfigError: With every mistake of the file and of the overrides.
    """
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ConfigError((Problem(str(file), 0, 0, "", f"cannot be read: {error.strerror or error}"),)) from None
    return parse_config(text, str(file), environ=environ, sets=sets)


def parse_config(
    text: str | bytes, origin: str, *, environ: Mapping[str, str] | None = None, sets: Sequence[str] = ()
) -> Config:
    """Do what `load_config` does, for the content of a file; `origin` is its name in the problems."""
    source = read_yaml(text, origin)
    if source.problems and source.data is None:
        raise ConfigError(tuple(source.problems))  # not YAML at all: there is nothing to walk
    _override_from_environment(source, environ or {})
    _override_from_flags(source, sets)
    walk = _Walk(source)
    built = walk.fields(Config, source.data, "")
    for broken in relations(walk.values):
        # Blame what somebody wrote, not a default that nobody sees.
        key = next((key for key in broken.keys if key in source.values), broken.keys[0])
        source.problem(walk.shown(key), broken.message, source.mark(key))
    if built is None or source.problems:
        raise ConfigError(tuple(sorted(source.problems, key=lambda p: (p.line == 0, p.line, p.column))))
    return Config(**built)


class _Walk:
    """Converts field by field. `values` holds, by path, each value that is right by itself, as `flatten` would."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._shown: dict[str, str] = {}
        self.values: dict[str, Any] = {}

    def shown(self, path: str) -> str:
        """Return the path as the file says it: where a plain string stands for a section, that of the string."""
        return self._shown.get(path, path)

    def fields(self, kind: type[msgspec.Struct], data: Any, path: str) -> dict[str, Any] | None:
        """Return the right values for every field of a section, or None after noting what is wrong with it."""
        if isinstance(data, str) and _shorthand(kind):
            data = self._long_form(kind, data, path)
        if data is None:
            data = {}  # `http:` with everything below it commented out
        names = kind.__struct_fields__
        if not isinstance(data, dict):
            what = f"expected a section with the keys {', '.join(names)}, found {found(data, self._source.mark(path))}"
            self._source.problem(path, what)
            return None
        for name in data:
            if name not in names:
                key = join(path, name)
                self._source.problem(key, f"unknown key; {did_you_mean(name, names)}", self._source.keys.get(key))
        built = {field.name: self._field(field, data, path) for field in msgspec.structs.fields(kind)}
        return None if any(value is _BAD for value in built.values()) else built

    def _long_form(self, kind: type[msgspec.Struct], text: str, path: str) -> dict[str, str]:
        name = _shorthand(kind)
        key = join(path, name)
        self._shown[key] = path
        self._source.values[key] = self._source.mark(path)
        return {name: text}

    def _field(self, field: msgspec.structs.FieldInfo, data: dict[str, Any], path: str) -> Any:
        key = join(path, field.name)
        if field.name in data:
            return self._value(field.type, data[field.name], key)
        if field.required:
            self._source.problem(path, missing(field.name, field.type))
            return _BAD
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        self.values.update(flatten(default, key) if isinstance(default, msgspec.Struct) else [(key, default)])
        return default

    def _value(self, kind: Any, data: Any, path: str) -> Any:
        """Return the converted value of a field, or `_BAD` after noting what is wrong with it."""
        shape, _ = unwrap(kind)
        match shape:
            case shapes.StructType(cls=cls):
                built = self.fields(cls, data, path)
                return _BAD if built is None else cls(**built)
            case shapes.VarTupleType(item_type=shapes.StructType(cls=cls)):
                return self._list(cls, data, path)
            case shapes.DictType():
                return self._dict(kind, data, path)
            case _:
                return self._leaf(kind, data, path)

    def _list(self, cls: type[msgspec.Struct], data: Any, path: str) -> Any:
        if not isinstance(data, list):
            what = f"expected a list, found {found(data, self._source.mark(path))}; begin each entry with a dash"
            self._source.problem(path, what)
            return _BAD
        self.values[path] = len(data)
        items = [self.fields(cls, item, f"{path}[{index}]") for index, item in enumerate(data)]
        return tuple(_BAD if item is None else cls(**item) for item in items) if None not in items else _BAD

    def _dict(self, kind: Any, data: Any, path: str) -> Any:
        if data is None:
            data = {}
        if not isinstance(data, dict):
            self._source.problem(
                path, f"expected a section of keys and values, found {found(data, self._source.mark(path))}"
            )
            return _BAD
        entries = [self._converted(kind, {name: value}, value, join(path, name)) for name, value in data.items()]
        self.values[path] = {name: value for entry in entries if entry is not _BAD for name, value in entry.items()}
        return _BAD if any(entry is _BAD for entry in entries) else self.values[path]

    def _leaf(self, kind: Any, data: Any, path: str) -> Any:
        shape, _ = unwrap(kind)
        mark = self._source.mark(path)
        if path in self._source.overridden and isinstance(shape, shapes.StrType) and mark.text is not None:
            data = mark.text  # a variable is text anyway: nobody has to quote what YAML would read as a number
        value = self._converted(kind, data, data, path)
        if value is not _BAD:
            self.values[path] = value
        return value

    def _converted(self, kind: Any, data: Any, shown: Any, path: str) -> Any:
        """Convert `data`; `shown` is the part of it that stands at `path` in the file."""
        mark = self._source.mark(path)
        try:
            if isinstance(shown, str) or not is_yaml_11_number(mark.text or ""):
                return msgspec.convert(data, kind)
        except msgspec.ValidationError:
            pass  # its text lacks the line and the remedy
        self._source.problem(self.shown(path), mismatch(path.rpartition(".")[2], kind, shown, mark), mark)
        return _BAD


def _override_from_environment(source: Source, environ: Mapping[str, str]) -> None:
    variables = {path.upper().replace(".", "__"): path for path in _PATHS}
    # Sorted, so that WAVEKEEPER_CONTROL comes before WAVEKEEPER_CONTROL__ADVERTISE and does not undo it.
    for name in sorted(environ):
        word, value = name.removeprefix(ENV_PREFIX), environ[name]
        if word == name or name in ENV_OTHERS or _from_kubernetes(word, value):
            continue
        origin = f"environment variable {name}"
        if word in variables:
            source.override(join(_SECTION, variables[word]), value, origin, _SHORTHANDS)
        elif word.startswith("DEPLOYMENTS"):
            message = "no variable can override a list; write the deployments into the file"
            source.problem("", message, Mark(origin, 0, 0))
        elif close := _meant(word, tuple(variables)):
            source.problem("", f"no such key; {close}", Mark(origin, 0, 0))


def _from_kubernetes(word: str, value: str) -> bool:
    if _KUBERNETES_NAME.fullmatch(word):
        return True
    return (word == "PORT" or word.endswith("_PORT")) and _KUBERNETES_PORT.fullmatch(value) is not None


def _meant(word: str, variables: Sequence[str]) -> str:
    """Return a remedy if the variable looks like a key of the configuration; others may have variables beside ours."""
    sections = {path.split(".")[0].upper() for path in _PATHS}
    if "__" in word or word.split("_")[0] in sections or difflib.get_close_matches(word, variables, 1, cutoff=0.85):
        return did_you_mean(word, variables, ENV_PREFIX)
    return ""


def _override_from_flags(source: Source, sets: Sequence[str]) -> None:
    known = [join(_SECTION, path) for path in _PATHS]
    for text in sets:
        origin = f"--set {text}"
        path, equals, value = text.partition("=")
        if path in known and equals:
            source.override(path, value, origin, _SHORTHANDS)
        elif path.partition("[")[0] == "deployments":
            source.problem("", "no flag can override a list; write the deployments into the file", Mark(origin, 0, 0))
        elif path in known:
            source.problem("", f"a value is missing; write --set {path}=VALUE", Mark(origin, 0, 0))
        else:
            source.problem("", f"no such key; {did_you_mean(path, known)}", Mark(origin, 0, 0))


def _paths(kind: type[msgspec.Struct], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each value that can be overridden and, for a section that may stand as a string, its key."""
    for field in msgspec.structs.fields(kind):
        key = join(path, field.name)
        shape, _ = unwrap(field.type)
        if not isinstance(shape, shapes.StructType):
            yield key, ""
            continue
        if shorthand := _shorthand(shape.cls):
            yield key, shorthand
        yield from _paths(shape.cls, key)


def _shorthand(kind: type[msgspec.Struct]) -> str:
    return kind.shorthand if issubclass(kind, Section) else ""


_PATHS = dict(_paths(CoordinatorConfig))
_SHORTHANDS = {join(_SECTION, path): key for path, key in _PATHS.items() if key}
