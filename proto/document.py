"""Prints the message tables of PROTOCOL.md from the structs, so that no fact stands twice.

`python -m wavekeeper.proto.document` rewrites the generated part of PROTOCOL.md beside this file; a test compares the
two.
"""

import inspect
import types
import typing
from pathlib import Path

import msgspec

from . import messages as m

BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
PAGE = Path(__file__).with_name("PROTOCOL.md")

GROUPS: dict[str, tuple[type[m.Message], tuple[type[m.Message], ...]]] = {
    "From a rank": (m.FromRank, typing.get_args(m.FromRankMessage)),
    "To a rank": (m.ToRank, typing.get_args(m.ToRankMessage)),
    "From a front-end": (m.FromFrontEnd, typing.get_args(m.FromFrontEndMessage)),
    "To a front-end": (m.Message, typing.get_args(m.ToFrontEndMessage)),
}
PARTS: tuple[type[msgspec.Struct], ...] = (
    m.At,
    m.Load,
    m.Counters,
    m.Member,
    m.Costs,
    m.HoldOrder,
    m.Mismatch,
    m.Timing,
    m.RankState,
    m.DeploymentState,
)
WORDS = (m.Kind, m.Phase, m.Mode, m.Activity, m.HoldMode, m.RefusalReason, m.RejectReason)


def tables() -> str:
    """The generated part."""
    out = []
    for title, (base, members) in GROUPS.items():
        common = ", ".join(f"`{name}`" for name in base.__struct_fields__)
        out.append(f"### {title}\n")
        if common:
            out.append(f"{_doc(base)} Every one carries {common}.\n")
        out += ["| `t` | fields (`?` = may be absent) | meaning |", "|---|---|---|"]
        for message in members:
            own = [name for name in message.__struct_fields__ if name not in base.__struct_fields__]
            out.append(f"| `{message.__struct_config__.tag}` | {_fields(message, own)} | {_doc(message)} |")
        out.append("")
    out += ["### Parts\n", "| part | fields | meaning |", "|---|---|---|"]
    out += [f"| `{part.__name__}` | {_fields(part, list(part.__struct_fields__))} | {_doc(part)} |" for part in PARTS]
    out += ["", "### Words\n", "| type | values |", "|---|---|"]
    out += [f"| `{word.__name__}` | {', '.join(f'`{value.value}`' for value in word)} |" for word in WORDS]
    return "\n".join(out) + "\n"


def page_with(generated: str, page: str) -> str:
    """The page with its generated part replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{generated}\n{END}{after}"


def _fields(struct: type[msgspec.Struct], names: list[str]) -> str:
    info = {field.name: field for field in msgspec.structs.fields(struct)}
    marks = {name: name if info[name].required else f"{name}?" for name in names}
    return ", ".join(f"`{marks[name]}`: {_type(info[name].type)}" for name in names) or "none"


def _type(annotation: typing.Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin in (list, tuple):
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"map of text to {_type(arguments[1])}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments)
    plain: dict[object, str] = {str: "text", type(None): "nil"}
    return plain.get(annotation, str(annotation.__name__))


def _doc(thing: type) -> str:
    return " ".join(inspect.cleandoc(thing.__doc__ or "").split())


if __name__ == "__main__":
    PAGE.write_text(page_with(tables(), PAGE.read_text()))
