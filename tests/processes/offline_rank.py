"""One rank of an offline run, as a process: prints its list of operations and its counters as one JSON line."""

import sys

import msgspec

from wavekeeper.proto.messages import Kind
from wavekeeper.proto.rows import DUMMY, Row
from wavekeeper.worker_agent import RankAgent, Role


def main(rank: int, dp_size: int, kind: Kind, exchange: str, rendezvous: str, work: int) -> None:
    agent = RankAgent.offline(
        deployment=f"offline-{rendezvous.rpartition(':')[2] or 'test'}",
        rank=rank,
        dp_size=dp_size,
        kind=kind,
        exchange=exchange,
        rendezvous=rendezvous,
        step_deadline_s=30,
        form_timeout_s=60,
    )
    operations = []
    while not (plan := agent.step(Row(num_tokens=3, has_work=True) if work else DUMMY)).over:
        operations.append([plan.epoch, plan.wave, plan.step, plan.outcome, list(plan.num_tokens_across_dp)])
        work -= plan.runs_forward and agent.role(plan) is Role.REAL
    operations.append([plan.epoch, plan.wave, plan.step, plan.outcome, []])
    counters = agent.counters
    agent.close()
    report = {
        "rank": rank,
        "operations": operations,
        "counters": msgspec.to_builtins(counters),
        "torch_imported": "torch" in sys.modules,
    }
    print(msgspec.json.encode(report).decode())


if __name__ == "__main__":
    _, rank, dp_size, kind, exchange, rendezvous, work = sys.argv
    main(int(rank), int(dp_size), Kind(kind), exchange, rendezvous, int(work))
