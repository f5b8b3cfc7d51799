"""Batch inference without a coordinator: one process a rank, started by any launcher.

    for r in 0 1 2; do RANK=$r WORLD_SIZE=3 python examples/offline_batch.py & done; wait

MoE ranks stay in lockstep until every rank is done and leave at the same step; a rank that finishes early serves
dummies until then. With `KIND=dense` the same program creates nothing: no group, no shared memory, no exchange.
"""

import os

from wavekeeper.proto.messages import Kind
from wavekeeper.proto.rows import DUMMY, Row
from wavekeeper.worker_agent import RankAgent, Role

rank, dp_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
kind = Kind(os.environ.get("KIND", "moe"))
batches_left = 5 * (rank + 1)  # your scheduler; here rank r has 5 * (r + 1) batches of 16 tokens

agent = RankAgent.offline(deployment="batch-example", rank=rank, dp_size=dp_size, kind=kind)
while True:
    plan = agent.step(Row(num_tokens=16, num_reqs=16, has_work=True) if batches_left else DUMMY)
    if plan.over:
        break
    if plan.runs_forward:
        with agent.forward(plan) as context:
            # your model: a real batch or, if this rank has none, a dummy of context.num_tokens tokens
            assert sum(context.num_tokens_across_dp) >= context.num_tokens
        batches_left -= agent.role(plan) is Role.REAL
counters = agent.counters
agent.close()
print(f"rank {rank}: {counters.steps} steps ({counters.dummy_steps} dummies), {counters.group_operations} exchanges")
