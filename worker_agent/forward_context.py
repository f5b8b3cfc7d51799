"""The plan, where model code can see it: no layer needs a second collective to learn the other ranks' token counts.

    with agent.forward(plan):
        model(batch)          # anywhere inside: current().num_tokens_across_dp

vLLM keeps the same numbers in `DPMetadata.num_tokens_across_dp_cpu`, filled by an all_reduce of its own.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

from .errors import AgentError
from .plan import Plan


class ForwardContext:
    """One forward pass of one rank."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank

    @property
    def num_tokens_across_dp(self) -> tuple[int, ...]:
        """Tokens that each rank feeds to the model, shape `[dp_size]`; dummies and padding are already in it."""
        return self.plan.num_tokens_across_dp

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank feeds to the model."""
        return self.plan.num_tokens_across_dp[self.rank]

    @cached_property
    def num_tokens_across_dp_cpu(self) -> Any:
        """The same as a CPU tensor, int32, shape `[dp_size]`.

        Raises:
            AgentError: This process has not imported torch; the plain integers need none.
        """
        torch = sys.modules.get("torch")
        if torch is None:
            raise AgentError("num_tokens_across_dp_cpu needs torch, which this process has not imported")
        return torch.tensor(self.num_tokens_across_dp, dtype=torch.int32)


_current: ContextVar[ForwardContext | None] = ContextVar("wavekeeper_forward_context", default=None)


def current() -> ForwardContext:
    """The forward pass that is under way.

    Raises:
        AgentError: No pass is under way: the caller is not inside `with agent.forward(plan)`.
    """
    context = _current.get()
    if context is None:
        raise AgentError("no forward pass is under way: run the model inside `with agent.forward(plan):`")
    return context


@contextmanager
def forward_context(plan: Plan, rank: int) -> Iterator[ForwardContext]:
    """Make `plan` the current one for the code inside."""
    context = ForwardContext(plan, rank)
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
