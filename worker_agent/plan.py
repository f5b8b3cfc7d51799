"""The plan: a pure function of all rows and of settings that were compared at registration.

The law of this file: whatever changes the shape or the number of group operations is decided here, from gathered
values alone. No rank-local value, clock or environment variable may come in, so every rank computes the same plan
(DESIGN.md section 4). Nothing after this file ever sees the sentinel of a dummy rank: it is masked here.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from ..proto.messages import Setting
from ..proto.rows import ROW_LAYOUT, Flag, GraphMode, Operation, Position, Rows, Word


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
    """What this step does. All tuples have length dp_size, index == rank, and are the same on every rank.

    What every engine needs in every step is a field; the rest is read from the rows when it is asked for.
    """

    outcome: Outcome
    epoch: int = 0
    wave: int = 0
    step: int = 0
    substep: int = 0
    reason: str = ""
    """Why, in words, where the outcome alone does not tell."""
    num_tokens_across_dp: tuple[int, ...] = ()
    """Tokens that each rank feeds to the model, padding and dummies included."""
    num_tokens_unpadded: tuple[int, ...] = ()
    """Real tokens of each rank; 0 for a dummy."""
    graph_mode: GraphMode = GraphMode.NONE
    microbatch: bool = False
    substeps: int = 0
    has_work: bool = False
    """Whether any rank held work; the work may still be unscheduled."""
    failed: tuple[int, ...] = ()
    """Ranks that put an error into their row. Not empty: nobody runs this step."""
    rows: Rows | None = None
    """What it was made of; none where nothing was exchanged."""

    @property
    def runs_forward(self) -> bool:
        """Whether the model runs in this step, on every rank."""
        return self.outcome is Outcome.FORWARD

    @property
    def over(self) -> bool:
        """Whether no wave runs after this step: go back to `wait()`, or, offline, leave the loop."""
        return self.outcome in _OVER

    def role(self, rank: int) -> Role:
        """What the rank in this place runs."""
        if self.outcome is not Outcome.FORWARD:
            return Role.NONE
        return Role.REAL if self.num_tokens_unpadded[rank] else Role.DUMMY

    @property
    def roles(self) -> tuple[Role, ...]:
        """What each rank runs."""
        return tuple(self.role(rank) for rank in range(len(self.num_tokens_unpadded)))

    @property
    def max_tokens(self) -> int:
        """Real tokens of the largest batch."""
        return self.rows.most_tokens if self.rows is not None else 0

    @property
    def sum_tokens(self) -> int:
        """Real tokens of all ranks."""
        return self.rows.sum_tokens if self.rows is not None else 0

    @property
    def num_reqs(self) -> tuple[int, ...]:
        """Requests of each rank, as it wrote them."""
        return self._column(Word.REQS)

    @property
    def num_tokens_for_logprob(self) -> tuple[int, ...]:
        """Tokens of each rank that need log-probabilities."""
        return self._column(Word.LOGPROB)

    @property
    def engine(self) -> tuple[tuple[int, int], ...]:
        """The two words of each rank's engine."""
        return tuple(zip(self._column(Word.ENGINE), self._column(Word.ENGINE + 1), strict=True))

    @property
    def has_prefill(self) -> bool:
        """Whether any batch has one."""
        return self.rows is not None and bool(self.rows.batch_flags & Flag.HAS_PREFILL)

    @property
    def can_run_graph(self) -> bool:
        """Whether all ranks can."""
        return self.rows is not None and bool(self.rows.all_flags & Flag.CAN_GRAPH)

    @property
    def uniform_token_count(self) -> int | None:
        """That of all batches, or None where they differ or have none."""
        return self.rows.uniform if self.rows is not None and self.rows.uniform >= 0 else None

    @property
    def max_query_len(self) -> int:
        """The longest query of all batches."""
        return self.rows.most_query if self.rows is not None else 0

    @property
    def forward_mode(self) -> int | None:
        """That of all batches, or None where they differ."""
        return self.rows.forward_mode if self.rows is not None and self.rows.forward_mode >= 0 else None

    def _column(self, word: int) -> tuple[int, ...]:
        return self.rows.column(word) if self.rows is not None else ()


_OVER = (Outcome.WAVE_ENDED, Outcome.HELD, Outcome.IDLE)
IDLE_PLAN = Plan(outcome=Outcome.IDLE, reason="no wave runs")


def decide(rows: Rows, position: Position, settings: PlanSettings) -> Plan:
    """Return the plan of one exchange; equal on every rank that has the same rows.

    Rules, first match wins: an error anywhere -> nobody runs (`failed` names who); all rows ask for a hold -> held;
    nobody holds work -> the wave has ended; somebody may not run the model, or nobody has a token -> no forward; else
    a forward, in which a rank without tokens runs a dummy.
    """
    outcome, reason = _outcome(rows, position.operation)
    runs = outcome is Outcome.FORWARD
    unpadded = rows.tokens
    mode, padded, microbatch = GraphMode.NONE, 0, False
    if runs:
        mode, padded = _shape(rows, settings)
        microbatch = _splits(rows, settings)
        if microbatch and not padded:
            padded = rows.most_tokens  # both halves must be equal on all ranks
    if not runs:
        fed: tuple[int, ...] = (0,) * len(rows)
    elif padded:
        fed = (padded,) * len(rows)
    elif rows.batches == len(rows):
        fed = unpadded
    else:
        fed = tuple([tokens or settings.dummy_tokens for tokens in unpadded])
    return Plan(
        outcome=outcome,
        epoch=position.epoch,
        wave=position.wave,
        step=position.step,
        substep=position.substep,
        reason=reason,
        num_tokens_across_dp=fed,
        num_tokens_unpadded=unpadded,
        graph_mode=mode,
        microbatch=microbatch,
        substeps=rows.substeps if runs else 0,
        has_work=bool(rows.holds_work),
        failed=rows.ranks_with(Flag.ERROR) if rows.any_flags & Flag.ERROR else (),
        rows=rows,
    )


def _outcome(rows: Rows, operation: Operation) -> tuple[Outcome, str]:
    if rows.any_flags & Flag.ERROR:
        return Outcome.NO_FORWARD, f"rank {_names(rows.ranks_with(Flag.ERROR))} failed before the pass"
    if operation is Operation.STEP:  # a wave is held or over between steps, never in the middle of one
        if rows.all_flags & Flag.HOLD:
            return Outcome.HELD, "every rank was asked to hold"
        if not rows.holds_work:
            return Outcome.WAVE_ENDED, "no rank holds work"
    if not rows.all_flags & Flag.CAN_FORWARD:
        return Outcome.NO_FORWARD, f"rank {_names(rows.ranks_without(Flag.CAN_FORWARD))} may not run the model now"
    if not rows.batches:
        return Outcome.NO_FORWARD, "no rank has scheduled a token"
    return Outcome.FORWARD, ""


def _shape(rows: Rows, settings: PlanSettings) -> tuple[GraphMode, int]:
    """The agreed graph mode and the agreed padded size (0 = none): first agree on the mode, then on the bucket."""
    if rows.graph_mode == GraphMode.NONE:
        return GraphMode.NONE, 0
    bucket = next((size for size in settings.graph_buckets if size >= rows.most_padded), 0)
    return (_GRAPH_MODES[rows.graph_mode], bucket) if bucket else (GraphMode.NONE, 0)


_GRAPH_MODES = tuple(GraphMode)


def _splits(rows: Rows, settings: PlanSettings) -> bool:
    """Whether the step is split into two micro-batches: unanimous, and no real batch too small; dummies follow."""
    least = settings.microbatch_min_tokens
    return least > 0 and bool(rows.all_flags & Flag.WANTS_MICROBATCH) and rows.least_tokens >= least


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
