"""Who keeps the others waiting, and who makes them pay: from rows that all have, so all say the same."""

from wavekeeper.proto.messages import Costs
from wavekeeper.proto.rows import DUMMY, GraphMode, Operation, Position, Row, pack, unpack
from wavekeeper.worker_agent.attribution import Attribution
from wavekeeper.worker_agent.plan import Plan, PlanSettings, decide

HERE = Position(Operation.STEP, 1, 1, 2)
GRAPHS = PlanSettings(graph_buckets=(8, 64))


def plan(rows: list[Row], waited_us: list[int], settings: PlanSettings | None = None) -> Plan:
    """What these ranks plan, who waited so long in the exchange before."""
    packed = [pack(row, HERE, place, waited_us[place]) for place, row in enumerate(rows)]
    return decide(unpack(b"".join(packed), len(rows), packed[0], 0), HERE, settings or PlanSettings())


def costs(made: Plan, place: int) -> Costs:
    attribution = Attribution()
    attribution.count(made, place, exchange_us=30.0, waited_us=20.0)
    return attribution.costs()


def test_the_rank_that_waited_least_is_the_one_that_the_others_waited_for() -> None:
    made = plan([Row(num_tokens=1)] * 3, [900, 3, 700])
    assert [costs(made, place).last_arrivals for place in range(3)] == [0, 1, 0]
    assert (costs(made, 0).exchange_us, costs(made, 0).waited_us) == (30, 20)


def test_in_the_first_exchange_of_a_group_nobody_was_late() -> None:
    made = plan([Row(num_tokens=1)] * 2, [0, 0])
    assert [costs(made, place).last_arrivals for place in range(2)] == [0, 0]


def test_what_this_rank_waited_is_said_in_its_next_row() -> None:
    attribution = Attribution()
    attribution.count(plan([DUMMY, DUMMY], [0, 0]), 0, exchange_us=30.0, waited_us=20.4)
    assert attribution.waited_us == 20


def test_whoever_cannot_run_a_graph_that_another_could_forces_all_to_run_without() -> None:
    able, unable = Row(num_tokens=5, graph_mode=GraphMode.FULL), Row(num_tokens=5)
    made = plan([able, unable, unable], [0] * 3, GRAPHS)
    assert made.graph_mode is GraphMode.NONE
    assert [costs(made, place).forced_eager for place in range(3)] == [0, 1, 1]
    assert [costs(plan([unable] * 2, [0] * 2, GRAPHS), place).forced_eager for place in range(2)] == [0, 0]


def test_the_largest_batch_is_the_reason_for_the_others_padding_and_each_counts_its_own() -> None:
    small, large = (Row(num_tokens=count, graph_mode=GraphMode.FULL) for count in (3, 40))
    made = plan([small, large, DUMMY], [0] * 3, GRAPHS)
    assert made.num_tokens_across_dp == (64, 64, 64)
    assert [costs(made, place).forced_padding for place in range(3)] == [0, 1, 0]
    assert [costs(made, place).padding_tokens for place in range(3)] == [61, 24, 64]


def test_without_graphs_only_dummies_feed_what_is_not_theirs_and_it_is_nobody_s_fault() -> None:
    made = plan([Row(num_tokens=7), DUMMY], [0] * 2)
    assert [costs(made, place).padding_tokens for place in range(2)] == [0, 1]
    assert [costs(made, place).forced_padding for place in range(2)] == [0, 0]
