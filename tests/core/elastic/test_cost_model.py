"""What steps take: predictions from those that were seen, against what is then measured."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

from daf_core import ActivationEngine, DAFConfig
from daf_core.elastic.block_timer import BlockTimer, StepTimes
from daf_core.elastic.cost_model import MEMORY, StepCosts
from daf_core.elastic.freeze import FrozenUnits
from daf_core.elastic.units import Units
from tests.core.elastic.runs import assumed_units, checkpoint, deep_gpt2, make, units_in_order
from tests.core.elastic.world import World
from tests.core.plan import nets


@pytest.fixture(scope="module")
def adapters() -> Units:
    return assumed_units(deep_gpt2(8))


@pytest.fixture(scope="module")
def layers() -> Units:
    """Those of a model that is trained as a whole: several in a block, some before it, and a head."""
    return units_in_order(*make("gpt2", adapters=False))


def costs_of(units: Units) -> StepCosts:
    return StepCosts(units, [1] * len(units.blocks))


def least(units: Units) -> set[int]:
    return set() if units.always else {0}


def seen(world: World, *chosen: set[int]) -> StepCosts:
    costs = costs_of(world.units)
    for on in chosen:
        costs.add(world.times(on), on)
    return costs


@pytest.mark.parametrize("kind", ["adapters", "layers"])
def test_two_steps_tell_what_all_others_take(kind: str, request: pytest.FixtureRequest) -> None:
    units: Units = request.getfixturevalue(kind)
    world, count = World(units), len(units.units)
    costs = seen(world, least(units), set(range(count)))
    random = np.random.default_rng(0)
    for size in (1, 2, count // 2, count - 1, count):
        on = {*map(int, random.choice(count, size, replace=False))}
        assert costs.share(on) == pytest.approx(world.share(on), rel=1e-9)
        assert costs.held(world.depth(on)) / costs.held(0) == pytest.approx(world.held_share(on))


@pytest.mark.parametrize("kind", ["adapters", "layers"])
def test_unit_costs_add_up_to_shares(kind: str, request: pytest.FixtureRequest) -> None:
    units: Units = request.getfixturevalue(kind)
    count, random = len(units.units), np.random.default_rng(1)
    whole = set(range(count))
    for costs in (seen(World(units, 3), whole), seen(World(units, 4), least(units), whole)):
        own, depth, fixed = costs.unit_costs()
        assert np.all(np.diff(depth) >= 0)
        for _ in range(50):
            on = {*map(int, random.choice(count, int(random.integers(1, count + 1)), replace=False))}
            total = fixed + sum(own[unit] for unit in on) + depth[max(on)]
            assert costs.share(on) == pytest.approx(total, rel=1e-9)
        assert fixed == pytest.approx(costs.share(()))


def test_without_a_step_nothing_is_known(adapters: Units) -> None:
    costs = costs_of(adapters)
    assert costs.share({0}) == 1.0


def test_the_shortest_of_the_last_times_counts(adapters: Units) -> None:
    world, whole = World(adapters), set(range(8))
    costs = seen(world, {0}, whole)
    expected = costs.seconds(whole)
    for _ in range(MEMORY - 1):
        world.backward *= 1.5
        costs.add(world.times(whole), whole)
    assert costs.seconds(whole) == pytest.approx(expected)
    costs.add(world.times(whole), whole)
    assert costs.seconds(whole) > 1.2 * expected


def test_times_count_for_as_many_elements(adapters: Units) -> None:
    world, whole = World(adapters), set(range(8))
    costs = seen(world, {0}, whole)
    expected = costs.seconds(whole)
    costs.add(world.times(whole, scale=4), whole)
    assert costs.seconds(whole) == pytest.approx(expected)


def test_bytes_count_for_as_many_elements(adapters: Units) -> None:
    """Batches of texts are of different length: a step on shorter ones says nothing else of the shares."""
    world, whole = World(adapters), set(range(8))
    costs = seen(world, {0}, whole)
    on = {0, 1, 2}
    costs.add(world.times(on, scale=0.5), on)
    assert costs.held(world.depth(on)) / costs.held(0) == pytest.approx(world.held_share(on), rel=0.01)


def test_the_lowest_block_says_little_of_what_it_takes_among_others(adapters: Units) -> None:
    """It passes no gradient on, which takes less."""
    world, whole = World(adapters), set(range(8))
    times = world.times({0})
    times.backward[-1] /= 2
    costs = costs_of(adapters)
    costs.add(times, {0})
    costs.add(world.times(whole), whole)
    costs.add(times, {0})
    assert costs.seconds(whole) == pytest.approx(seen(world, {0}, whole).seconds(whole))


def test_blocks_that_were_not_seen_are_like_those_that_were(adapters: Units) -> None:
    world = World(adapters)
    world.plain[:], world.backward[:] = 1.5, 3.0
    world.with_graph, world.held = world.plain, [1000] * 8
    costs = seen(world, {0, 1})
    for on in ({0}, {0, 1, 2}, set(range(8))):
        assert costs.share(on) == pytest.approx(world.share(on))
    assert costs.held(0) == pytest.approx(500 + 8000)
    uneven = StepCosts(adapters, [1] * 4 + [2] * 4)
    uneven.add(world.times({0, 1}), {0, 1})
    assert uneven.held(0) == pytest.approx(500 + 4 * 1000 + 4 * 500)


@pytest.mark.parametrize("kind", ["adapters", "layers"])
def test_state(kind: str, request: pytest.FixtureRequest) -> None:
    units: Units = request.getfixturevalue(kind)
    costs = seen(World(units), least(units), set(range(len(units.units))))
    other = costs_of(units)
    other.load(json.loads(json.dumps(costs.state())))
    assert other.unit_costs() == costs.unit_costs()
    assert [other.held(depth) for depth in range(3)] == [costs.held(depth) for depth in range(3)]


def test_state_of_another_model(adapters: Units, layers: Units) -> None:
    with pytest.raises(ValueError, match="the model has 2 blocks"):
        costs_of(layers).load(costs_of(adapters).state())


class Watched:
    """A deep model whose steps are watched."""

    def __init__(self, precision: Any, checkpoints: bool = False) -> None:
        self.model = deep_gpt2(8, width=64, modules_to_save=["ln_f"])
        if checkpoints:
            checkpoint(self.model, use_reentrant=False)
            self.model.disable_input_require_grads()
        self.units = assumed_units(self.model)
        self.engine = ActivationEngine(self.model, DAFConfig(precision=precision, audit_every=None))
        self.mask = FrozenUnits(self.units)

    def step(self, depth: int, passes: int = 1) -> tuple[StepTimes, set[int], int]:
        """Trains from a block on; returns times, units and bytes held before backward."""
        on = {number for number, unit in enumerate(self.units.units) if unit.stage >= depth}
        self.mask.apply(on)
        clock, held = BlockTimer(self.model, self.units.blocks, lambda: self.engine.held_bytes), 0
        for _ in range(passes):
            with self.engine.compress():
                loss = nets._tokens(self.model, nets.tokens(4))
            held = self.engine.held_bytes
            loss.backward()
        self.mask.unfreeze()
        self.engine.finish_step()
        return clock.stop(), on, held


@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("precision", ["exact", 4])
def test_bytes_of_cuts_are_foreseen(precision: Any, checkpoints: bool) -> None:
    watched = Watched(precision, checkpoints)
    costs = costs_of(watched.units)
    for depth in (8, 0):
        times, on, held = watched.step(depth)
        assert times.held_outside + sum(times.held) == pytest.approx(held, rel=0.02)
        costs.add(times, on)
    for depth in (2, 4, 6):
        times, on, held = watched.step(depth)
        assert times.held[:depth] == [0] * depth
        assert min(times.held[depth:]) > 0
        assert costs.held(depth) / costs.held(0) * watched.step(0)[2] == pytest.approx(held, rel=0.05)
    assert watched.engine.held_bytes == 0


@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("passes", [1, 3])
def test_phases_of_a_step(passes: int, checkpoints: bool) -> None:
    """Each phase takes a tick of the clock: blocks have one for each pass, and nothing is counted twice."""
    watched = Watched("exact", checkpoints)
    for depth in (0, 5, 8):
        times, _, _ = watched.step(depth, passes)
        assert times.elements == passes * 4 * 32 * 64
        assert times.forward == [passes] * 8
        assert times.with_graph == [number >= depth for number in range(8)]
        assert times.backward == [0] * depth + [passes] * (8 - depth)
        assert times.rest == passes + 1
        assert times.outside == passes * 9  # between blocks, after forward, and where backward begins
    watched.engine.close()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in watched.model.modules())


def test_more_passes_hold_no_more(adapters: Units) -> None:
    watched = Watched(4)
    one, _, _ = watched.step(3)
    three, _, _ = watched.step(3, passes=3)
    assert three.held == one.held
    assert three.held_outside == pytest.approx(one.held_outside)


def test_predicted_times_are_those_that_are_counted() -> None:
    watched = Watched("exact")
    costs = costs_of(watched.units)
    for depth in (8, 0):
        costs.add(*watched.step(depth)[:2])

    def counted(depth: int) -> float:
        times = watched.step(depth)[0]
        return sum(itertools.chain(times.forward, times.backward), times.outside)

    costs._rest.clear()
    for depth in (0, 2, 4, 6, 8):
        on = {number for number, unit in enumerate(watched.units.units) if unit.stage >= depth}
        assert costs.share(on) == pytest.approx(counted(depth) / counted(0), rel=0.01)
