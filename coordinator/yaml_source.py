"""YAML text -> plain data, with the place of everything in it.

The law of this file: nothing in the text is lost silently. A doubled key, of which YAML keeps the last, is a mistake
here; so is a key that is no text; and what YAML 1.1 makes of a word (`on`, `0123`, `12:30`) stays beside what was
written, so that whoever expected text can say what has happened.

A path names a value as people write it: `deployments[1].kind`.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from .config import Problem, join

TEXT_BYTES_MAX = 1 << 20
"""A fleet of 4,000 deployments needs about a third of it."""

NODES_MAX = 100_000
"""More come only from aliases of aliases, which would fill the memory."""

_MERGE_TAG = "tag:yaml.org,2002:merge"
_YAML_11_NUMBER = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")


class Mark(NamedTuple):
    """Where a value stands. `text` is how a plain (unquoted) scalar is written there, else None."""

    origin: str
    line: int
    column: int
    text: str | None = None


class Source:
    """The data of one file, the place of each key and value, and what is wrong with it as YAML."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.data: Any = None
        self.values: dict[str, Mark] = {}
        self.keys: dict[str, Mark] = {}
        self.overridden: set[str] = set()
        self.problems: list[Problem] = []

    def mark(self, path: str) -> Mark:
        """Return the place of the value at that path or, if it is not in the file, of the nearest section around it."""
        while path and path not in self.values:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self.values.get(path, Mark(self.origin, 0, 0))

    def problem(self, path: str, message: str, mark: Mark | None = None) -> None:
        """Note a mistake at that path."""
        origin, line, column, _ = mark or self.mark(path)
        self.problems.append(Problem(origin, line, column, path, message))

    def override(self, path: str, text: str, origin: str, shorthands: dict[str, str]) -> None:
        """Put a value from elsewhere (an environment variable, a flag) into the data.

        Args:
            path: A path without list indices.
            text: Read as a YAML scalar.
            origin: Named in place of a line when the value turns out to be wrong.
            shorthands: For a section that may stand as a plain string: the key that the string means.
        """
        self.data = {} if self.data is None else self.data
        here, at = self.data, ""
        *sections, last = path.split(".")
        for name in sections:
            if not isinstance(here, dict):
                break
            at = join(at, name)
            inner = here.get(name)
            if isinstance(inner, str) and at in shorthands:
                inner = {shorthands[at]: inner}
                self.values[join(at, shorthands[at])] = self.values[at]
            here[name] = here = {} if inner is None else inner
        if not isinstance(here, dict):
            return  # a mistake of the file, and told as one; there is no place to put this
        here[last] = read_scalar(text)
        self.values[path] = self.keys[path] = Mark(origin, 0, 0, text)
        self.overridden.add(path)


def read_yaml(text: str | bytes, origin: str) -> Source:
    """Read one YAML document. Never raises because of the text: what is wrong with it is in `problems`.

    Args:
        text: The file's content. Bytes must be UTF-8.
        origin: The file's name, for the problems.
    """
    source = Source(origin)
    if len(text) > TEXT_BYTES_MAX:
        source.problem("", f"the file has {len(text)} bytes, at most {TEXT_BYTES_MAX}")
        return source
    try:
        if isinstance(text, bytes):
            text = text.decode()
        # Composed to the end first: an error further down must not hide behind half of the data.
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            source.data = _Reader(source).value(root, "")
    except UnicodeDecodeError as error:
        source.problem("", f"byte {error.start} is not UTF-8; save the file as UTF-8")
    except yaml.MarkedYAMLError as error:
        source.data = None
        source.problem("", _what(error), _place(origin, error.problem_mark or error.context_mark))
    except yaml.reader.ReaderError as error:
        source.problem("", f"character {error.position} is U+{_code(error.character):04X}, which YAML does not allow")
    except RecursionError:
        source.data = None
        source.problem("", "the sections are nested too deeply")
    return source


def read_scalar(text: str) -> Any:
    """Return what YAML makes of one plain or quoted scalar; anything else stays the text that it is."""
    with contextlib.suppress(yaml.YAMLError, ValueError):
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if isinstance(node, yaml.ScalarNode):
            return _construct(node)
    return text


def is_yaml_11_number(text: str) -> bool:
    """Tell whether YAML 1.1 reads these digits as another number than people do: `0123` is 83, `1:30` is 90."""
    return _YAML_11_NUMBER.fullmatch(text) is not None


class _Reader:
    """Walks the composed nodes of one document."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._open: set[int] = set()
        self._nodes = 0

    def value(self, node: yaml.Node, path: str) -> Any:
        """Return the data of a node and note its place."""
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise yaml.MarkedYAMLError(problem="aliases make this too large", problem_mark=node.start_mark)
        if id(node) in self._open:
            raise yaml.MarkedYAMLError(
                problem="this alias stands inside of its own anchor", problem_mark=node.start_mark
            )
        mark = _place(self._source.origin, node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            self._source.values[path] = mark._replace(text=node.value if node.style is None else None)
            return _construct(node)
        self._source.values[path] = mark
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, f"{path}[{index}]") for index, item in enumerate(node.value)]
            return dict(self._pairs(node, path))
        finally:
            self._open.discard(id(node))

    def _pairs(self, node: Any, path: str) -> Iterator[tuple[str, Any]]:
        first: dict[str, Mark] = {}
        for key_node, value_node in node.value:
            mark = _place(self._source.origin, key_node.start_mark)
            name = self._name(key_node, path, mark)
            if name is None:
                continue
            key = join(path, name)
            if (earlier := first.setdefault(name, mark)) is not mark:
                message = (
                    f'the key "{name}" stands here a second time, first in line {earlier.line}; remove one of the two'
                )
                self._source.problem(key, message, mark)
                continue
            self._source.keys[key] = mark
            yield name, self.value(value_node, key)

    def _name(self, node: yaml.Node, path: str, mark: Mark) -> str | None:
        if node.tag == _MERGE_TAG:
            self._source.problem(path, "merge keys (<<) are not supported; write the keys out", mark)
            return None
        name = _construct(node) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(name, str):
            return name
        if isinstance(node, yaml.ScalarNode):
            message = f'YAML reads the key {node.value} as {name!r} and not as text; quote it: "{node.value}"'
        else:
            message = "a key must be text"
        self._source.problem(path, message, mark)
        return None


def _construct(node: yaml.ScalarNode) -> Any:
    constructor = yaml.constructor.SafeConstructor()
    try:
        return constructor.construct_object(node)
    except ValueError:  # a date such as 2024-13-45
        return node.value


def _place(origin: str, mark: Any) -> Mark:
    return Mark(origin, mark.line + 1, mark.column + 1) if mark is not None else Mark(origin, 0, 0)


def _what(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "this is not YAML"
    if r"'\t'" in problem:
        return "a tab stands where YAML wants spaces; indent with spaces"
    if "mapping values are not allowed" in problem:
        return "a second colon in one line, or a wrong indentation; put text with a colon and a space into quotes"
    if problem.startswith("expected the node content"):
        return f"this is not valid YAML: {problem}; put text with special characters into quotes"
    return f"this is not valid YAML: {problem}" + (f" ({error.context})" if error.context else "")


def _code(character: Any) -> int:
    return character if isinstance(character, int) else ord(character)
