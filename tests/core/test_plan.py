"""The plan: tables of what the ranks agree on, and properties that hold for all rows."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavekeeper.proto.rows import DUMMY, INT32_MAX, GraphMode, Operation, Position, Row, pack, unpack
from wavekeeper.worker_agent.plan import IDLE_PLAN, Outcome, Plan, PlanSettings, Role, decide

from .stories import planned

HERE = Position(Operation.STEP, 2, 7, 40)
FULL, PIECEWISE, NONE = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE
BUCKETS = PlanSettings(graph_buckets=(1, 8, 256), microbatch_min_tokens=32)


def real(tokens: int, **fields: Any) -> Row:
    """A batch that could run a full graph."""
    return Row(**{"num_tokens": tokens, "has_work": True, "graph_mode": FULL, "can_run_graph": True, **fields})


def plan(*rows: Row, settings: PlanSettings = BUCKETS) -> Plan:
    return planned(rows, HERE, settings)


# --- what happens at all ---------------------------------------------------------------------------------------------

OUTCOMES = {
    "somebody has tokens": ([real(5), DUMMY], Outcome.FORWARD, ""),
    "nobody has work": ([DUMMY, DUMMY], Outcome.WAVE_ENDED, "no rank holds work"),
    "work that nobody has scheduled": ([real(0), DUMMY], Outcome.NO_FORWARD, "no rank has scheduled a token"),
    "a dummy that holds work": (
        [Row(dummy=True, has_work=True), DUMMY],
        Outcome.NO_FORWARD,
        "no rank has scheduled a token",
    ),
    "one wants to hold": ([real(5, hold_requested=True), real(5)], Outcome.FORWARD, ""),
    "all want to hold": ([real(5, hold_requested=True)] * 2, Outcome.HELD, "every rank was asked to hold"),
    "all want to hold, and nobody has work": (
        [Row(hold_requested=True)] * 2,
        Outcome.HELD,
        "every rank was asked to hold",
    ),
    "one sleeps": (
        [real(5), Row(dummy=True, can_forward=False)],
        Outcome.NO_FORWARD,
        "rank 1 may not run the model now",
    ),
    "one sleeps, and nobody has work": (
        [DUMMY, Row(dummy=True, can_forward=False)],
        Outcome.WAVE_ENDED,
        "no rank holds work",
    ),
    "one failed": ([real(5), Row(dummy=True, local_error=True)], Outcome.NO_FORWARD, "rank 1 failed before the pass"),
    "two failed, and nobody has work": (
        [Row(dummy=True, local_error=True)] * 2,
        Outcome.NO_FORWARD,
        "rank 0, 1 failed before the pass",
    ),
    "one failed while all want to hold": (
        [real(5, hold_requested=True), Row(local_error=True, hold_requested=True)],
        Outcome.NO_FORWARD,
        "rank 1 failed before the pass",
    ),
}


@pytest.mark.parametrize("rows, outcome, reason", OUTCOMES.values(), ids=OUTCOMES)
def test_outcome(rows: list[Row], outcome: Outcome, reason: str) -> None:
    """Cases B07, B17 (a local error is everybody's), B18 (asleep is not dummy)."""
    result = plan(*rows)
    assert (result.outcome, result.reason) == (outcome, reason)
    if outcome is not Outcome.FORWARD:
        assert set(result.roles) == {Role.NONE} and set(result.num_tokens_across_dp) == {0}
        assert (result.graph_mode, result.microbatch, result.substeps) == (NONE, False, 0)


def test_a_local_error_names_every_failing_rank_on_every_rank() -> None:
    """Case B17, TensorRT-LLM PR 14020."""
    failed = Row(dummy=True, local_error=True)
    assert plan(real(3), failed, DUMMY, failed).failed == (1, 3)


# --- B13, B12: sizes and graphs --------------------------------------------------------------------------------------

SHAPES = {
    "all zero": ((0, 0, 0, 0), BUCKETS, (0, 0, 0, 0), NONE, 0, 0),
    "one only": ((5, 0, 0, 0), BUCKETS, (8, 8, 8, 8), FULL, 5, 5),
    "all equal": ((5, 5, 5, 5), BUCKETS, (8, 8, 8, 8), FULL, 5, 20),
    "exactly a bucket": ((8, 1, 0, 0), BUCKETS, (8, 8, 8, 8), FULL, 8, 9),
    "one empty, one above the largest bucket": ((1, 4096, 0, 17), BUCKETS, (1, 4096, 1, 17), NONE, 4096, 4114),
    "the largest bucket": ((1, 256, 0, 17), BUCKETS, (256,) * 4, FULL, 256, 274),
    "one above it": ((1, 257, 0, 17), BUCKETS, (1, 257, 1, 17), NONE, 257, 275),
    "no graphs captured": ((5, 0, 3, 0), PlanSettings(), (5, 1, 3, 1), NONE, 5, 8),
    "the engine's smallest legal batch is two": ((5, 0, 3, 0), PlanSettings(dummy_tokens=2), (5, 2, 3, 2), NONE, 5, 8),
}


@pytest.mark.parametrize("tokens, settings, fed, mode, most, total", SHAPES.values(), ids=SHAPES)
def test_shape(
    tokens: tuple[int, ...], settings: PlanSettings, fed: tuple[int, ...], mode: GraphMode, most: int, total: int
) -> None:
    """Case B13, sglang PR 37933: maximum and sum exclude padding; an empty rank has the busy one's mode and bucket."""
    rows = [real(count) if count else DUMMY for count in tokens]
    result = plan(*rows, settings=settings)

    assert result.num_tokens_across_dp == fed and result.graph_mode is mode
    assert (result.max_tokens, result.sum_tokens, result.num_tokens_unpadded) == (most, total, tokens)
    if any(tokens):
        assert result.roles == tuple(Role.REAL if count else Role.DUMMY for count in tokens)


GRAPHS = {
    "all full": ((FULL, FULL, FULL), FULL),
    "one eager": ((FULL, FULL, NONE), NONE),
    "one piecewise": ((FULL, PIECEWISE, FULL), PIECEWISE),
    "eager beats piecewise": ((NONE, PIECEWISE, FULL), NONE),
}


@pytest.mark.parametrize("modes, agreed", GRAPHS.values(), ids=GRAPHS)
def test_the_group_runs_the_least_graph_mode_dummies_aside(modes: tuple[GraphMode, ...], agreed: GraphMode) -> None:
    """Case B12, vllm PR 30173."""
    result = plan(*(real(7, graph_mode=mode) for mode in modes), DUMMY)
    assert result.graph_mode is agreed
    assert result.num_tokens_across_dp == ((8,) * 4 if agreed is not NONE else (7, 7, 7, 1))


def test_eager_on_one_rank_and_a_batch_above_every_bucket_is_eager_for_all() -> None:
    """Case B12: (full, full, full, eager), tokens (7, 7, 7, 900)."""
    result = plan(real(7), real(7), real(7), real(900, graph_mode=NONE))
    assert (result.graph_mode, result.num_tokens_across_dp) == (NONE, (7, 7, 7, 900))


def test_a_rank_s_own_padding_counts_for_the_bucket_and_not_for_the_sum() -> None:
    result = plan(real(7, num_tokens_padded=9), real(3))
    assert (result.num_tokens_across_dp, result.max_tokens, result.sum_tokens) == ((256, 256), 7, 10)


# --- B14: micro-batches ----------------------------------------------------------------------------------------------

VOTES = {
    "a dummy follows": ((64, 64, None), (True, True, True), True),
    "one too small for both halves": ((64, 64, 1), (True, True, True), False),
    "all large": ((64, 64, 64), (True, True, True), True),
    "exactly the threshold": ((32, 32, 32), (True, True, True), True),
    "one below it": ((32, 31, 32), (True, True, True), False),
    "one says no": ((64, 64, 64), (True, False, True), False),
}


@pytest.mark.parametrize("tokens, votes, splits", VOTES.values(), ids=VOTES)
def test_micro_batches_need_every_vote_and_every_real_batch(
    tokens: tuple[int | None, ...], votes: tuple[bool, ...], splits: bool
) -> None:
    """Case B14, vllm PR 50945: threshold 32."""
    rows = [
        DUMMY if count is None else real(count, wants_microbatch=vote, graph_mode=NONE)
        for count, vote in zip(tokens, votes, strict=True)
    ]
    result = plan(*rows)
    assert result.microbatch is splits
    if splits:
        assert len(set(result.num_tokens_across_dp)) == 1, "both halves are equal on all ranks"


def test_without_a_threshold_nothing_is_split() -> None:
    assert not plan(real(64, wants_microbatch=True), settings=PlanSettings()).microbatch


def test_thresholds_and_buckets_are_among_what_registration_compares() -> None:
    """Cases B14 and B34."""
    base = BUCKETS.compared()
    for other in (
        PlanSettings(graph_buckets=(1, 8), microbatch_min_tokens=32),
        PlanSettings(graph_buckets=(1, 8, 256), microbatch_min_tokens=16),
        PlanSettings(graph_buckets=(1, 8, 256), microbatch_min_tokens=32, dummy_tokens=2),
    ):
        assert len([key for key in base if other.compared()[key] != base[key]]) == 1
    assert len(base) == len(PlanSettings.__struct_fields__) + 1, "every setting of the plan, and the row's layout"


# --- B11 and the rest ------------------------------------------------------------------------------------------------


def test_all_run_the_most_sub_steps_that_any_wishes_for() -> None:
    """Case B11, vllm issue 44185."""
    assert plan(real(4, substeps=3), real(1, substeps=0), DUMMY).substeps == 3


def test_values_of_batches_are_combined_without_the_dummies() -> None:
    rows = [
        real(512, has_prefill=True, forward_mode=1, max_query_len=512, num_reqs=1, uniform_token_count=4),
        DUMMY,
        real(
            4,
            forward_mode=1,
            max_query_len=1,
            num_reqs=4,
            uniform_token_count=4,
            num_tokens_for_logprob=2,
            engine=(3, -1),
        ),
    ]
    result = plan(*rows)
    assert (result.has_prefill, result.forward_mode, result.max_query_len, result.uniform_token_count) == (
        True,
        1,
        512,
        4,
    )
    assert (result.num_reqs, result.num_tokens_for_logprob, result.engine) == (
        (1, 0, 4),
        (0, 0, 2),
        ((0, 0), (0, 0), (3, -1)),
    )
    assert result.can_run_graph

    result = plan(*rows, real(1, forward_mode=2, uniform_token_count=None, can_run_graph=False))
    assert (result.forward_mode, result.uniform_token_count, result.can_run_graph) == (None, None, False)


def test_a_plan_says_when_the_loop_goes_back_to_waiting() -> None:
    assert [IDLE_PLAN.over, plan(DUMMY).over, plan(real(1)).over, plan(real(0)).over] == [True, True, False, False]
    assert [IDLE_PLAN.runs_forward, plan(real(1)).runs_forward] == [False, True]


# --- properties ------------------------------------------------------------------------------------------------------

COUNT = st.integers(0, 600)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Any row that an engine could write."""
    if draw(st.integers(0, 3)) == 0:
        return DUMMY
    tokens = draw(COUNT)
    return Row(
        num_tokens=tokens,
        num_tokens_padded=draw(st.sampled_from([0, tokens, tokens + 3])),
        num_reqs=draw(COUNT),
        uniform_token_count=draw(st.none() | COUNT),
        max_query_len=draw(COUNT),
        num_tokens_for_logprob=draw(COUNT),
        forward_mode=draw(st.integers(0, 3)),
        substeps=draw(st.integers(0, 3)),
        graph_mode=draw(st.sampled_from(GraphMode)),
        has_work=draw(st.booleans()) or tokens > 0,
        has_prefill=draw(st.booleans()),
        can_run_graph=draw(st.booleans()),
        wants_microbatch=draw(st.booleans()),
        hold_requested=draw(st.booleans()),
        local_error=draw(st.integers(0, 9)) == 0,
        can_forward=draw(st.integers(0, 9)) > 0,
        engine=(draw(st.integers(-INT32_MAX - 1, INT32_MAX)), 0),
    )


GROUPS = st.lists(rows(), min_size=1, max_size=6)
SETTINGS = st.builds(
    PlanSettings,
    graph_buckets=st.lists(st.integers(1, 700), unique=True, max_size=4).map(lambda sizes: tuple(sorted(sizes))),
    microbatch_min_tokens=st.integers(0, 300),
    dummy_tokens=st.integers(1, 2),
)
TOLD = [*Plan.__struct_fields__, *(name for name, kind in vars(Plan).items() if isinstance(kind, property))]
TOLD.remove("rows")
VECTORS = ("roles", "num_tokens_across_dp", "num_tokens_unpadded", "num_reqs", "num_tokens_for_logprob", "engine")


@given(GROUPS, SETTINGS)
def test_every_rank_makes_the_same_plan_of_what_it_has_gathered(group: Sequence[Row], settings: PlanSettings) -> None:
    """Case B12: whoever computes it. The rows travel as bytes, and each rank reads them for itself."""
    data = b"".join(pack(row, HERE, rank) for rank, row in enumerate(group))
    plans = [
        decide(unpack(data, len(group), pack(row, HERE, rank), rank), HERE, settings) for rank, row in enumerate(group)
    ]
    assert all(other == plans[0] for other in plans)
    assert plans[0] == planned(group, HERE, settings), "nothing is lost on the way"


@given(GROUPS, SETTINGS, st.randoms(use_true_random=False))
def test_ranks_in_another_order_give_the_same_plan_in_that_order(
    group: list[Row], settings: PlanSettings, random: Any
) -> None:
    order = list(range(len(group)))
    random.shuffle(order)
    before, after = planned(group, HERE, settings), planned([group[rank] for rank in order], HERE, settings)

    for name in TOLD:
        mine, theirs = getattr(before, name), getattr(after, name)
        if name in VECTORS:
            assert theirs == tuple(mine[rank] for rank in order), name
        elif name == "failed":
            assert {order[rank] for rank in theirs} == set(mine)
        elif name != "reason":
            assert theirs == mine, name


@given(GROUPS, SETTINGS)
def test_what_is_fed_is_always_a_legal_batch_and_the_sentinel_is_never_seen(
    group: list[Row], settings: PlanSettings
) -> None:
    result = planned(group, HERE, settings)
    assert len(result.num_tokens_across_dp) == len(group)
    if not result.runs_forward:
        assert set(result.num_tokens_across_dp) == {0}
        return
    for row, role, fed in zip(group, result.roles, result.num_tokens_across_dp, strict=True):
        assert fed >= max(1, 0 if row.dummy else row.num_tokens), "a rank feeds at least what it has scheduled"
        assert (role is Role.REAL) == (not row.dummy and row.num_tokens > 0)
    assert Role.REAL in result.roles, "nobody runs a step of dummies alone"
    if result.graph_mode is not NONE:
        assert set(result.num_tokens_across_dp) <= set(settings.graph_buckets)
    if result.graph_mode is not NONE or result.microbatch:
        assert len(set(result.num_tokens_across_dp)) == 1


@given(GROUPS, SETTINGS)
def test_a_wave_ends_exactly_when_nobody_has_work_and_nothing_went_wrong(
    group: list[Row], settings: PlanSettings
) -> None:
    result = planned(group, HERE, settings)
    work = any(row.has_work for row in group)
    held = all(row.hold_requested for row in group)
    failed = any(row.local_error for row in group)
    assert (result.outcome is Outcome.WAVE_ENDED) == (not work and not held and not failed)
    assert (result.outcome is Outcome.HELD) == (held and not failed)
    assert result.has_work == work


@given(GROUPS, SETTINGS)
def test_a_dummy_vetoes_nothing_and_counts_for_nothing(group: list[Row], settings: PlanSettings) -> None:
    """Case B18: one more idle rank changes neither the outcome nor what the others run."""
    before, after = planned(group, HERE, settings), planned([*group, DUMMY], HERE, settings)
    if before.outcome is Outcome.HELD:
        return  # a rank that was not asked to hold keeps the others from being held
    assert after.outcome is before.outcome
    for name in TOLD:
        if name in VECTORS:
            assert getattr(after, name)[: len(group)] == getattr(before, name), name
        else:
            assert getattr(after, name) == getattr(before, name), name


@given(GROUPS, SETTINGS)
def test_the_engine_s_words_arrive_as_they_were_written(group: list[Row], settings: PlanSettings) -> None:
    assert planned(group, HERE, settings).engine == tuple(row.engine for row in group)
