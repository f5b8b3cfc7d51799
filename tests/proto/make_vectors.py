"""Writes the golden vectors. Run by hand, once for each new message: what stands in the files is the contract, and
must not change.
"""

from pathlib import Path
from typing import Any

import msgspec

from wavekeeper.proto import messages as m
from wavekeeper.proto.codec import encode
from wavekeeper.proto.rows import DUMMY, GraphMode, Operation, Position, Row, pack

VECTORS = Path(m.__file__).with_name("vectors")
ME: dict[str, Any] = {"deployment": "deepseek-v3", "rank": 3, "incarnation": "00c0ffee00c0ffee"}
AT = m.At(mode=m.Mode.IDLE, term=7, epoch=2, applied=5, wave=11, has_work=True)
RUNNING = m.At(mode=m.Mode.RUNNING, term=7, epoch=2, applied=6, wave=11, step=40)
MEMBER = m.Member(3, "00c0ffee00c0ffee", "node-1")
FE = "0123456789abcdef"
COUNTS = m.Counters(waves=11, empty_waves=1, steps=400, dummy_steps=90, steps_after_last_work=1, group_operations=400)

MESSAGES: dict[str, m.Message] = {
    "a rank registers": m.Register(
        **ME,
        number=1,
        at=m.At(mode=m.Mode.JOINING),
        kind=m.Kind.MOE,
        dp_size=16,
        settings={"plan.graph_buckets": "1,8,256", "row.layout": 1},
        host="node-1/4f2a/1b/0",
        rendezvous="tcp://10.0.0.4:41233",
        exchanges=["shm", "gloo"],
        serve="tcp://10.0.0.4:5555",
        attributes={"pid": "4711"},
    ),
    "a group is formed": m.Formed(**ME, number=2, at=AT, exchange="shm"),
    "a group could not be formed": m.FormFailed(**ME, number=3, at=AT, reason="rank 2 did not arrive"),
    "a start is acknowledged": m.Started(**ME, number=4, at=RUNNING),
    "a rank holds work and is not running": m.NeedWave(**ME, number=5, at=AT),
    "a wave has ended": m.WaveComplete(**ME, number=6, at=AT, steps=40, counters=COUNTS),
    "a rank is held": m.HeldAt(**ME, number=7, at=AT, operation=1, wave=11, step=40),
    "a rank has resumed": m.Resumed(**ME, number=8, at=AT),
    "a rank has left its exchange": m.Halted(**ME, number=9, at=AT, reason="rank 2 is gone", lost=2),
    "a rank lives": m.Heartbeat(**ME, number=10, at=RUNNING, activity=m.Activity.EXCHANGING, age_ms=120),
    "a queue": m.LoadReport(**ME, number=11, at=AT, load=m.Load(running=4, waiting=2, kv_cache_usage=0.5)),
    "a rank leaves": m.Leave(**ME, number=12, at=AT, reason="scaled down"),
    "welcome": m.Welcome(
        **ME,
        term=7,
        answers=40,
        seq=5,
        epoch=2,
        wave=11,
        phase=m.Phase.IDLE,
        timing=m.Timing(),
        boot=FE,
        feed="tcp://10.0.0.1:29561",
    ),
    "refused": m.Refused(
        **ME,
        term=7,
        reason=m.RefusalReason.SETTINGS_MISMATCH,
        detail="settings differ",
        mismatches=[m.Mismatch("plan.graph_buckets", "1,8,256", "1,8")],
    ),
    "who are you": m.RegisterAgain(**ME, term=7),
    "the coordinator lives": m.Pulse(**ME, term=7, seq=5),
    "form a group": m.Form(
        **ME,
        term=7,
        epoch=2,
        seq=5,
        group="0123-7-2",
        exchange="shm",
        wave=11,
        members=[MEMBER],
    ),
    "start a wave": m.Start(**ME, term=7, epoch=2, seq=6, wave=11),
    "hold": m.Hold(**ME, term=7, epoch=2, seq=7, order=m.HoldOrder(1, m.HoldMode.KEEP, "weights-42")),
    "resume": m.Resume(**ME, term=7, epoch=2, seq=8, operation=1),
    "a group is broken": m.Fault(**ME, term=7, epoch=2, seq=9, lost=2, reason="silent for 5000 ms"),
    "the coordinator stops": m.Goodbye(**ME, term=7, reason="SIGTERM"),
    "a front-end attaches": m.Attach(front_end=FE, deployment="deepseek-v3"),
    "a front-end asks for the whole state": m.GetSnapshot(front_end=FE, deployment="deepseek-v3"),
    "a first request": m.FirstRequest(front_end=FE, deployment="deepseek-v3", ask=1, wave=11, rank=3, term=7),
    "a first request to an unknown rank": m.FirstRequest(front_end=FE, deployment="deepseek-v3", ask=2, wave=11),
    "a front-end leaves": m.Detach(front_end=FE),
    "attached": m.Attached(deployment="deepseek-v3", term=7, feed="tcp://10.0.0.1:29561", kind=m.Kind.MOE),
    "the whole state": m.Snapshot(
        deployment="deepseek-v3",
        term=7,
        seq=100,
        state=m.DeploymentState(
            name="deepseek-v3",
            kind=m.Kind.MOE,
            dp_size=1,
            phase=m.Phase.RUNNING,
            epoch=2,
            wave=11,
            ranks=[m.RankState(rank=0, up=True, incarnation=FE, load=m.Load(running=4), load_number=9, load_age_ms=20)],
        ),
    ),
    "an update": m.Update(deployment="deepseek-v3", term=7, seq=101, phase=m.Phase.IDLE, epoch=2, wave=12, dp_size=1),
    "rejected": m.Rejected(reason=m.RejectReason.RANK_OUT_OF_RANGE, detail="rank must be in 0..15, got 16"),
}

STEP = Position(Operation.STEP, 2, 11, 40)
ROWS: dict[str, tuple[Row, Position, int]] = {
    "a decode batch": (Row(num_tokens=7, num_reqs=7, uniform_token_count=1, max_query_len=1, has_work=True), STEP, 0),
    "a prefill with a graph and a vote": (
        Row(
            num_tokens=512,
            num_tokens_padded=512,
            num_reqs=1,
            max_query_len=512,
            graph_mode=GraphMode.PIECEWISE,
            has_work=True,
            has_prefill=True,
            can_run_graph=True,
            wants_microbatch=True,
            forward_mode=2,
            substeps=1,
            engine=(-5, 2147483647),
        ),
        STEP,
        3,
    ),
    "a dummy": (DUMMY, STEP, 1),
    "a local error": (Row(dummy=True, local_error=True), STEP, 2),
    "a sub-step": (Row(num_tokens=1, has_work=True), Position(Operation.SUBSTEP, 2, 11, 40, 2), 0),
    "the pre-flight exchange": (DUMMY, Position(Operation.PREFLIGHT, 2, 11, 0), 4095),
}


def main() -> None:
    messages = [
        {
            "meaning": meaning,
            "type": type(message).__name__,
            "message": msgspec.to_builtins(message),
            "header": encode(message)[0].hex(),
            "body": encode(message)[1].hex(),
        }
        for meaning, message in MESSAGES.items()
    ]
    rows = [
        {
            "meaning": meaning,
            "row": msgspec.to_builtins(row),
            "position": dict(zip(position._fields, position, strict=True)),
            "rank": rank,
            "bytes": pack(row, position, rank).hex(),
        }
        for meaning, (row, position, rank) in ROWS.items()
    ]
    for name, vectors in {"messages": messages, "rows": rows}.items():
        text = msgspec.json.format(msgspec.json.encode(vectors), indent=1)
        (VECTORS / f"{name}.json").write_bytes(text + b"\n")


if __name__ == "__main__":
    main()
