"""The production cores in one process, without sockets: random arrivals, and no invariant broken."""

from collections import Counter

import pytest

from .world import Weather, World, arrivals, specs, summary


def serve(world: World, requests: int, mean_gap_ms: float) -> None:
    numbers = arrivals(world, requests, mean_gap_ms)
    served = world.run(lambda: len(world.done) + len(world.failed) == requests and world.quiet(), 10_000_000)
    assert served, summary(world)
    assert sorted(world.done + world.failed) == numbers


def test_ten_thousand_requests_are_all_served_and_no_invariant_is_broken() -> None:
    world = World(seed=1, specs=specs())

    serve(world, 10_000, mean_gap_ms=12)

    ranks = world.ranks["moe"].values()
    counters = [rank.core.stepper.counters() for rank in ranks]
    assert not world.failed
    assert counters[0].waves >= 50
    assert all(c.group_operations == c.steps for c in counters), "exactly one exchange a step"
    assert max(c.steps_after_last_work for c in counters) <= 1
    group = next(iter(world.groups.values()))
    assert all(operations == group.operations[0] for operations in group.operations.values())
    for rank in world.ranks["dense"].values():
        dense = rank.core.stepper.counters()
        assert (dense.group_operations, dense.process_groups, dense.wave_messages, dense.dummy_steps) == (0, 0, 0, 0)
        assert dense.steps > 0
    assert world.fleet is not None and world.fleet.deployments["dense"].wave_messages == 0


@pytest.mark.parametrize("seed", range(40))
def test_a_network_that_loses_doubles_and_reorders_loses_no_work(seed: int) -> None:
    weather = Weather(loss=0.1, doubling=0.1, delay_ms=(0, 20), straggler=0.05)
    world = World(seed, specs(moe=3, dense=1), weather)

    serve(world, 120, mean_gap_ms=20)

    # a start that is lost for a second counts as a fault, so some seeds form more than one epoch; none may lose work
    assert not world.failed
    assert world.seen["lost"] > 0


@pytest.mark.parametrize("seed", range(40))
def test_a_coordinator_that_dies_and_comes_back_loses_no_work_and_rewinds_no_wave(seed: int) -> None:
    world = World(seed, specs(moe=3, dense=1), Weather(loss=0.02, doubling=0.05))

    def bounce() -> None:
        if world.fleet is not None:
            world.crash_coordinator()
            world.plan(world.random.choice((1, 50, 300, 3_000)), world.start_coordinator)

    for _ in range(4):
        world.plan(world.random.randint(100, 4_000), bounce)
    serve(world, 120, mean_gap_ms=30)

    assert not world.failed


@pytest.mark.parametrize("seed", range(40))
def test_a_rank_that_dies_and_is_replaced_costs_only_its_own_requests(seed: int) -> None:
    world = World(seed, specs(moe=3, dense=2), Weather(delay_ms=(0, 10)))

    def replace() -> None:
        spec = world.random.choice(world.specs)
        rank = world.random.randrange(spec.dp_size)
        world.ranks[spec.name][rank].crash()
        world.plan(world.random.choice((10, 2_000)), lambda: world.start_rank(spec, rank))

    world.plan(1_500, replace)
    world.plan(9_000, replace)
    serve(world, 120, mean_gap_ms=80)

    assert not [number for number, times in Counter(world.done + world.failed).items() if times > 1]
    moe = world.ranks["moe"].values()
    assert len({(rank.core.stepper.epoch, rank.core.stepper.wave) for rank in moe}) == 1


@pytest.mark.parametrize("seed", range(40))
def test_a_rank_that_is_cut_off_for_a_while_is_faulted_and_comes_back(seed: int) -> None:
    world = World(seed, specs(moe=3, dense=2), Weather(delay_ms=(0, 10)))

    def cut() -> None:
        spec = world.random.choice(world.specs)
        world.ranks[spec.name][world.random.randrange(spec.dp_size)].cut(world.random.choice((300, 1_600, 4_000)))

    for at_ms in (700, 3_000, 8_000, 12_000):
        world.plan(at_ms, cut)
    serve(world, 120, mean_gap_ms=80)

    assert not world.failed, "a rank that comes back has kept its queue"
