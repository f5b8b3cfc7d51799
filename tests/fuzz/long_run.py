"""The longer run, by hand: coverage-guided frames into the codec and the coordinator's core, and rows into the reader.

    pip install atheris
    python tests/fuzz/long_run.py -max_total_time=600

What must hold: a frame is refused as `RemoteProtocolError` or decoded; whatever was decoded changes no invariant of the
core; 64-byte rows are refused by a typed error or read. Anything else is a finding, and libFuzzer keeps the input.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

import atheris  # type: ignore[import-untyped]  # installed by whoever runs this

sys.path[:0] = [str(Path(__file__).parents[2] / ".src")]
with atheris.instrument_imports(include=["wavekeeper"]):
    from wavekeeper.coordinator.core import DeploymentSpec, Fleet, FleetSpec, Received, Tick
    from wavekeeper.proto.codec import decode, encode
    from wavekeeper.proto.errors import HeaderMismatchError, RemoteProtocolError, RowInvalidError
    from wavekeeper.proto.messages import At, Detach, Heartbeat, Kind, Mode, Register
    from wavekeeper.proto.rows import DUMMY, Operation, Position, pack, unpack

MINE = pack(DUMMY, Position(Operation.STEP, 1, 1, 1), 0)
NAME, RANKS = "deepseek-v3", 4
"""Those of the golden vectors, which make a good corpus to begin with."""
SPECS = (DeploymentSpec(NAME, Kind.MOE, RANKS), DeploymentSpec("dense", Kind.DENSE, 2))
HEADER = encode(Detach(front_end="f" * 16))[0]


def formed() -> Fleet:
    """All ranks are registered, and have said where they stand."""
    fleet = Fleet(FleetSpec(boot="b" * 16, term=7, deployments=SPECS), 0)
    for rank in range(RANKS):
        who: dict[str, Any] = {"deployment": NAME, "rank": rank}
        who["incarnation"] = "00c0ffee00c0ffee" if rank == 3 else f"{rank:016x}"
        more: dict[str, Any] = {"kind": Kind.MOE, "dp_size": RANKS, "host": "one", "exchanges": ["shm"]}
        fleet.handle(Received(b"p", Register(**who, number=0, at=At(Mode.JOINING), **more)), 0)
        fleet.handle(Received(b"p", Heartbeat(**who, number=1, at=At(Mode.JOINING, term=7))), 0)
    return fleet


def one(data: bytes) -> None:
    """One input: several frames, each with its length before it."""
    fleet, now_ms = formed(), 0
    while len(data) > 2:
        size = int.from_bytes(data[:2], "little") % 2048
        body, data = data[2 : 2 + size], data[2 + size :]
        try:
            message = decode([HEADER, body])
        except RemoteProtocolError:
            continue
        now_ms += 10
        fleet.handle(Received(b"p", message), now_ms)
        fleet.handle(Tick(), now_ms)
        fleet.check()
    with contextlib.suppress(RowInvalidError, HeaderMismatchError):
        unpack(MINE + data[:64].ljust(64, b"\0"), 2, MINE, 0)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
