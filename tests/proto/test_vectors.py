"""The golden vectors: what stands in the files is the contract. A change of them is a change of the protocol."""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from wavekeeper.proto import messages as m
from wavekeeper.proto.codec import decode, encode
from wavekeeper.proto.document import GROUPS, PAGE, PARTS, page_with, tables
from wavekeeper.proto.rows import Operation, Position, Row, pack, unpack

VECTORS = Path(m.__file__).with_name("vectors")
MESSAGES: list[dict[str, Any]] = json.loads((VECTORS / "messages.json").read_text())
ROWS: list[dict[str, Any]] = json.loads((VECTORS / "rows.json").read_text())
TYPES: dict[str, type[m.Message]] = {message_type.__name__: message_type for message_type in get_args(m.WireMessage)}


@pytest.mark.parametrize("vector", MESSAGES, ids=lambda vector: vector["meaning"])
def test_the_bytes_of_a_message_and_its_meaning_are_the_same_thing(vector: dict[str, Any]) -> None:
    frames = [bytes.fromhex(vector["header"]), bytes.fromhex(vector["body"])]
    message = msgspec.convert(vector["message"], TYPES[vector["type"]])

    assert decode(frames) == message
    assert encode(message) == frames


@pytest.mark.parametrize("vector", ROWS, ids=lambda vector: vector["meaning"])
def test_the_bytes_of_a_row_and_its_meaning_are_the_same_thing(vector: dict[str, Any]) -> None:
    row = msgspec.convert(vector["row"], Row)
    place = vector["position"]
    position = Position(Operation(place["operation"]), place["epoch"], place["wave"], place["step"], place["substep"])
    rank, data = vector["rank"], bytes.fromhex(vector["bytes"])

    assert pack(row, position, rank) == data
    before = [pack(Row(), position, other) for other in range(rank)]
    assert unpack(b"".join([*before, data]), rank + 1, data, rank)[rank] == row


def test_every_message_has_a_vector() -> None:
    assert {vector["type"] for vector in MESSAGES} == set(TYPES)


def test_every_flag_and_operation_of_a_row_has_a_vector() -> None:
    assert {vector["position"]["operation"] for vector in ROWS} == {operation.value for operation in Operation}
    used = {name for vector in ROWS for name, value in vector["row"].items() if value not in (False, 0, None, [0, 0])}
    missing = set(Row.__struct_fields__) - used
    assert missing <= {"num_tokens_for_logprob", "hold_requested"}, f"no vector shows {missing}"


def test_the_message_tables_of_the_protocol_page_are_current() -> None:
    """`python -m wavekeeper.proto.document` rewrites them."""
    page = PAGE.read_text()
    assert page_with(tables(), page) == page


def test_the_protocol_page_leaves_no_message_and_no_part_out() -> None:
    page = PAGE.read_text()
    documented = [message for _, members in GROUPS.values() for message in members]
    assert set(documented) == set(TYPES.values())
    for message_type in TYPES.values():
        assert f"| `{message_type.__struct_config__.tag}` |" in page
    for part in PARTS:
        assert f"| `{part.__name__}` |" in page
