"""Who keeps the others waiting, and who makes them pay: counted by each rank of itself, from rows that all have. Pure.

Every row carries how long its owner waited in its exchange before. Whoever waited least was the last to arrive, so the
others waited for it; no clock is compared with another one.
"""

from ..proto.messages import Costs
from ..proto.rows import GraphMode
from .plan import Plan


class Attribution:
    """What one rank costs its group."""

    def __init__(self) -> None:
        self.waited_us = 0
        """In the exchange before: what the next row says."""
        self.exchange_us = 0.0
        self.waited_total_us = 0.0
        self.last_arrivals = 0
        self.forced_eager = 0
        self.forced_padding = 0
        self.padding_tokens = 0

    def count(self, plan: Plan, place: int, exchange_us: float, waited_us: float) -> None:
        """Take in an exchange of the rank in this place: how long all of it took, and the waiting in it."""
        self.waited_us = round(waited_us)
        self.exchange_us += exchange_us
        self.waited_total_us += waited_us
        rows = plan.rows
        if rows is None or len(rows) < 2:
            return
        self.last_arrivals += rows.last == place and rows.most_waited > 0
        if not plan.runs_forward:
            return
        fed, mine = plan.num_tokens_across_dp[place], plan.num_tokens_unpadded[place]
        self.padding_tokens += fed - mine
        if 0 < mine == rows.most_tokens and _is_padded(plan):
            self.forced_padding += sum(plan.num_tokens_across_dp) - rows.sum_tokens > fed - mine
        if rows.graph_mode == GraphMode.NONE < rows.best_graph_mode:
            self.forced_eager += rows[place].graph_mode is GraphMode.NONE

    def costs(self) -> Costs:
        """Everything counted since this life began."""
        return Costs(
            exchange_us=round(self.exchange_us),
            waited_us=round(self.waited_total_us),
            last_arrivals=self.last_arrivals,
            forced_eager=self.forced_eager,
            forced_padding=self.forced_padding,
            padding_tokens=self.padding_tokens,
        )


def _is_padded(plan: Plan) -> bool:
    """Whether the ranks feed one size for graphs or micro-batches; a dummy's least batch is nobody's fault."""
    return plan.microbatch or plan.graph_mode is not GraphMode.NONE
