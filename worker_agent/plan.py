"""The plan: a pure function of all rows and of settings that were compared at registration.

The law of this file: whatever changes the shape or the number of group operations is decided here, from gathered
values alone. No rank-local value, clock or environment variable may come in, so every rank computes the same plan
(DESIGN.md section 4). Nothing after this file ever sees the sentinel of a dummy rank: it is masked here.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from ..proto.messages import Setting
from ..proto.rows import ROW_LAYOUT, GraphMode, Operation, Position, Row


class Outcome(StrEnum):
    """What the group does after an exchange; the same on every rank."""

    FORWARD = "forward"  # every rank runs the model, with a real batch or a dummy
    NO_FORWARD = "no_forward"  # nobody runs the model; the wave goes on
    WAVE_ENDED = "wave_ended"  # nobody holds work; nobody runs the model
    HELD = "held"  # every rank asked to be held; the wave is over
    IDLE = "idle"  # no wave runs, so nothing was exchanged


class Role(StrEnum):
    """What one rank runs in a step."""

    REAL = "real"
    DUMMY = "dummy"
    NONE = "none"


class PlanSettings(msgspec.Struct, frozen=True):
    """What the plan depends on beside the rows. Equal on all ranks of a group, or registration is refused."""

    graph_buckets: tuple[int, ...] = ()
    """Token counts for which graphs were captured, ascending. A batch above the largest one runs eager."""
    microbatch_min_tokens: int = 0
    """Least tokens of each real batch for splitting into two micro-batches; 0 = never split."""
    dummy_tokens: int = 1
    """Tokens of a dummy batch in eager mode: the smallest legal batch."""

    def __post_init__(self) -> None:
        buckets = self.graph_buckets
        if any(size < 1 for size in buckets) or sorted(set(buckets)) != list(buckets):
            raise ValueError(f"graph_buckets must be ascending counts of at least 1, got {buckets}")
        if self.microbatch_min_tokens < 0 or self.dummy_tokens < 1:
            raise ValueError(
                f"microbatch_min_tokens must be at least 0 and dummy_tokens at least 1, "
                f"got {self.microbatch_min_tokens} and {self.dummy_tokens}"
            )

    def compared(self) -> dict[str, Setting]:
        """As the settings that registration compares."""
        return {
            "plan.graph_buckets": ",".join(map(str, self.graph_buckets)),
            "plan.microbatch_min_tokens": self.microbatch_min_tokens,
            "plan.dummy_tokens": self.dummy_tokens,
            "row.layout": ROW_LAYOUT,
        }


class Plan(msgspec.Struct, frozen=True):
    """What this step does. All tuples have length dp_size, index == rank, and are the same on every rank."""

    outcome: Outcome
    epoch: int = 0
    wave: int = 0
    step: int = 0
    substep: int = 0
    reason: str = ""
    """Why, in words, where the outcome alone does not tell."""
    roles: tuple[Role, ...] = ()
    num_tokens_across_dp: tuple[int, ...] = ()
    """Tokens that each rank feeds to the model, padding and dummies included."""
    num_tokens_unpadded: tuple[int, ...] = ()
    """Real tokens of each rank; 0 for a dummy."""
    max_tokens: int = 0
    sum_tokens: int = 0
    num_reqs: tuple[int, ...] = ()
    graph_mode: GraphMode = GraphMode.NONE
    microbatch: bool = False
    has_prefill: bool = False
    can_run_graph: bool = False
    uniform_token_count: int | None = None
    max_query_len: int = 0
    num_tokens_for_logprob: tuple[int, ...] = ()
    forward_mode: int | None = None
    """The forward mode of all real batches, or None where they differ."""
    substeps: int = 0
    has_work: bool = False
    """Whether any rank held work; the work may still be unscheduled."""
    failed: tuple[int, ...] = ()
    """Ranks that put an error into their row. Not empty: nobody runs this step."""
    engine: tuple[tuple[int, int], ...] = ()

    @property
    def runs_forward(self) -> bool:
        """Whether the model runs in this step, on every rank."""
        return self.outcome is Outcome.FORWARD

    @property
    def over(self) -> bool:
        """Whether no wave runs after this step: go back to `wait()`, or, offline, leave the loop."""
        return self.outcome in (Outcome.WAVE_ENDED, Outcome.HELD, Outcome.IDLE)


IDLE_PLAN = Plan(outcome=Outcome.IDLE, reason="no wave runs")


def decide(rows: Sequence[Row], position: Position, settings: PlanSettings) -> Plan:
    """Return the plan of one exchange; equal on every rank that has the same rows.

    Rules, first match wins: an error anywhere -> nobody runs (`failed` names who); all rows ask for a hold -> held;
    nobody holds work -> the wave has ended; somebody may not run the model, or nobody has a token -> no forward; else
    a forward, in which a rank without tokens runs a dummy.
    """
    outcome, reason = _outcome(rows, position.operation)
    runs = outcome is Outcome.FORWARD
    real = tuple(not row.dummy and row.num_tokens > 0 for row in rows)
    batches = [row for row, is_real in zip(rows, real, strict=True) if is_real]
    unpadded = tuple(row.num_tokens if is_real else 0 for row, is_real in zip(rows, real, strict=True))
    graph_mode, padded = _shape(rows, batches, settings) if runs else (GraphMode.NONE, 0)
    microbatch = runs and _splits(rows, batches, settings)
    if microbatch and not padded:
        padded = max(unpadded)  # both halves must be equal on all ranks
    if not runs:
        fed: tuple[int, ...] = (0,) * len(rows)
    elif padded:
        fed = (padded,) * len(rows)
    else:
        fed = tuple(tokens or settings.dummy_tokens for tokens in unpadded)
    modes = {row.forward_mode for row in batches}
    uniform = {row.uniform_token_count for row in batches}
    return Plan(
        outcome=outcome,
        epoch=position.epoch,
        wave=position.wave,
        step=position.step,
        substep=position.substep,
        reason=reason,
        roles=tuple((Role.REAL if is_real else Role.DUMMY) if runs else Role.NONE for is_real in real),
        num_tokens_across_dp=fed,
        num_tokens_unpadded=unpadded,
        max_tokens=max(unpadded),
        sum_tokens=sum(unpadded),
        num_reqs=tuple(row.num_reqs for row in rows),
        graph_mode=graph_mode,
        microbatch=microbatch,
        has_prefill=any(row.has_prefill for row in batches),
        can_run_graph=all(row.can_run_graph for row in rows),
        uniform_token_count=uniform.pop() if len(uniform) == 1 else None,
        max_query_len=max((row.max_query_len for row in batches), default=0),
        num_tokens_for_logprob=tuple(row.num_tokens_for_logprob for row in rows),
        forward_mode=modes.pop() if len(modes) == 1 else None,
        substeps=max(row.substeps for row in rows) if runs else 0,
        has_work=any(row.holds_work for row in rows),
        failed=tuple(rank for rank, row in enumerate(rows) if row.local_error),
        engine=tuple(row.engine for row in rows),
    )


def _outcome(rows: Sequence[Row], operation: Operation) -> tuple[Outcome, str]:
    failed = [rank for rank, row in enumerate(rows) if row.local_error]
    if failed:
        return Outcome.NO_FORWARD, f"rank {_names(failed)} failed before the pass"
    if operation is Operation.STEP:  # a wave is held or over between steps, never in the middle of one
        if all(row.hold_requested for row in rows):
            return Outcome.HELD, "every rank was asked to hold"
        if not any(row.holds_work for row in rows):
            return Outcome.WAVE_ENDED, "no rank holds work"
    asleep = [rank for rank, row in enumerate(rows) if not row.can_forward]
    if asleep:
        return Outcome.NO_FORWARD, f"rank {_names(asleep)} may not run the model now"
    if not any(row.num_tokens for row in rows if not row.dummy):
        return Outcome.NO_FORWARD, "no rank has scheduled a token"
    return Outcome.FORWARD, ""


def _shape(rows: Sequence[Row], batches: Sequence[Row], settings: PlanSettings) -> tuple[GraphMode, int]:
    """The agreed graph mode and the agreed padded size (0 = none): first agree on the mode, then on the bucket."""
    mode = min(row.graph_mode for row in rows)
    if mode is GraphMode.NONE:
        return GraphMode.NONE, 0
    most = max(max(row.num_tokens, row.num_tokens_padded) for row in batches)
    bucket = next((size for size in settings.graph_buckets if size >= most), 0)
    return (mode, bucket) if bucket else (GraphMode.NONE, 0)


def _splits(rows: Sequence[Row], batches: Sequence[Row], settings: PlanSettings) -> bool:
    """Whether the step is split into two micro-batches: unanimous, and no real batch too small; dummies follow."""
    least = settings.microbatch_min_tokens
    return least > 0 and all(row.wants_microbatch for row in rows) and all(row.num_tokens >= least for row in batches)


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
