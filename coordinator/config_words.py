"""What to say about a value that does not fit its field: what was expected, what was found, and what would work.

Everything is told from the field's type and description in config.py, so that no range or word stands in two places.
"""

import difflib
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import inspect as shapes

from .config import Exchange
from .yaml_source import Mark, is_yaml_11_number, read_scalar

_REFUSED: dict[tuple[type, str], str] = {
    (Exchange, "hybrid"): "the hybrid exchange is not in this version; write auto, shm, gloo, nccl or hccl",
}


def unwrap(kind: Any) -> tuple[shapes.Type, dict[str, Any]]:
    """Return the shape of a type, and what its description holds beside it: `examples`, `words`."""
    shape = shapes.type_info(kind)
    if isinstance(shape, shapes.Metadata):
        return shape.type, {**(shape.extra_json_schema or {}), **(shape.extra or {})}
    return shape, {}


def mismatch(name: str, kind: Any, value: Any, mark: Mark) -> str:
    """Say why `value`, which stands at `mark`, is no value for the field `name` of type `kind`."""
    shape, notes = unwrap(kind)
    shape = _entry(shape)
    text = mark.text or ""
    if not isinstance(value, str) and is_yaml_11_number(text) and not isinstance(shape, shapes.StrType):
        takes_text = any(isinstance(choice, shapes.StrType) for choice in _choices(shape))
        quoted = f', or "{text}" in quotes if it is text' if takes_text else ""
        return f"YAML reads {text} as the number {value}; write {value} if that is meant{quoted}"
    for enum in (shape.cls for shape in _choices(shape) if isinstance(shape, shapes.EnumType)):
        if (enum, value) in _REFUSED:
            return _REFUSED[enum, value]
    said = f"expected {_expected(shape, notes)}, found {found(value, mark)}"
    if isinstance(shape, shapes.StrType) and text and not isinstance(value, str):
        return f'{said}; quote it: "{text}"'
    if isinstance(value, str) and not text and _fits(kind, read_scalar(value)):
        return f"{said}; remove the quotes"
    remedy = _remedy(shape, notes, value)
    return f"{said}; write {name}: {remedy}" if remedy else said


def missing(name: str, kind: Any) -> str:
    """Say that the key `name` of a section is missing, and how to write it."""
    shape, notes = unwrap(kind)
    if isinstance(shape, shapes.VarTupleType):
        return f"the key {name} is missing; write {name}: with one entry for each"
    return f"the key {name} is missing; write {name}: {_remedy(shape, notes, '') or _expected(shape, notes)}"


def found(value: Any, mark: Mark) -> str:
    """Say what a value is, and what was written where YAML has made something else of it."""
    match value:
        case None:
            return f"{mark.text}, which YAML reads as nothing" if mark.text else "nothing"
        case list():
            return "a list"
        case dict():
            return "a section"
        case str():
            return f'"{value if len(value) <= 80 else value[:77] + "..."}"'
        case bool():
            word = "true" if value else "false"
            return word if mark.text in (None, word) else f"{mark.text}, which YAML reads as {word}"
        case _:
            return str(value) if mark.text in (None, str(value)) else f"{mark.text}, which YAML reads as {value}"


def did_you_mean(name: str, known: Sequence[str], prefix: str = "") -> str:
    """Return a remedy for an unknown name. `prefix` is what all names begin with; it would make any two look alike."""
    if inside := [word for word in known if word.startswith((f"{name}.", f"{name}__"))]:
        return f"it is a section with {', '.join(prefix + word for word in inside)}"
    close = difflib.get_close_matches(name.lower().replace("-", "_"), [word.lower() for word in known], 1, cutoff=0.6)
    if close:
        return f"did you mean {prefix}{next(word for word in known if word.lower() == close[0])}?"
    return f"known are {', '.join(prefix + word for word in known)}"


def _entry(shape: shapes.Type) -> shapes.Type:
    """Return the shape of the entries, for a section of keys and values."""
    return shape.value_type if isinstance(shape, shapes.DictType) else shape


def _choices(shape: shapes.Type) -> tuple[shapes.Type, ...]:
    types = shape.types if isinstance(shape, shapes.UnionType) else (shape,)
    return tuple(kind for kind in types if not isinstance(kind, shapes.NoneType)) or types


def _expected(shape: shapes.Type, notes: dict[str, Any]) -> str:
    if "words" in notes:
        return str(notes["words"])
    return " or ".join(_one_expected(choice) for choice in _choices(shape))


def _one_expected(shape: shapes.Type) -> str:
    match shape:
        case shapes.EnumType(cls=cls):
            return " or ".join(f'"{member.value}"' for member in cls)
        case shapes.IntType(ge=least, le=most):
            return (
                f"a whole number from {least} to {most}" if least is not None and most is not None else "a whole number"
            )
        case shapes.FloatType():
            return "a number"
        case shapes.BoolType():
            return "true or false"
        case _:
            return "text"


def _remedy(shape: shapes.Type, notes: dict[str, Any], value: Any) -> str:
    """Return a value that would work: the nearest one, where there is such a thing."""
    for choice in _choices(shape):
        match choice:
            case shapes.EnumType(cls=cls):
                words = [str(member.value) for member in cls]
                if close := difflib.get_close_matches(str(value).lower(), words, 1):
                    return close[0]
            case shapes.IntType(ge=int(least), le=int(most)) if isinstance(value, int) and not isinstance(value, bool):
                return str(min(max(value, least), most))
            case _:
                continue
    return str(notes["examples"][0]) if notes.get("examples") else ""


def _fits(kind: Any, value: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return not isinstance(value, str)
