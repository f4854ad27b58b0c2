"""Which steps train what, over hundreds of steps whose times and bytes are made up."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from itertools import groupby, pairwise

import numpy as np
import pytest

from daf_core.elastic.cost_model import StepCosts
from daf_core.elastic.importance import merged
from daf_core.elastic.schedule import MEASURED
from daf_core.elastic.selection import Selection
from daf_core.elastic.units import Units
from daf_core.errors import ElasticError
from tests.core.elastic.runs import assumed_units, deep_gpt2, make, units_in_order
from tests.core.elastic.world import Simulation, World

STEPS = 500


@cache
def adapters(layers: int = 8) -> Units:
    return assumed_units(deep_gpt2(layers))


@cache
def layers() -> Units:
    return units_in_order(*make("gpt2", adapters=False))


def falling(count: int) -> list[float]:
    """Returns gains of units of which those next to the output are worth most."""
    return [1 / (number + 1) for number in range(count)]


@pytest.mark.parametrize("time", [0.5, 0.6, 0.75, 0.9])
@pytest.mark.parametrize("kind", [adapters, layers])
def test_the_mean_share_is_kept(kind: object, time: float) -> None:
    world = World(adapters() if kind is adapters else layers())
    run = Simulation(world, falling(len(world.units.units)), time=time).steps(STEPS)
    spent, paid_back = 0.0, None
    for number, choice in enumerate(run.done, 1):
        spent += world.share(choice.on)
        mean = spent / number
        paid_back = number if paid_back is None and mean <= time and number > 2 + MEASURED else paid_back
        if paid_back is not None:
            assert mean <= time + 1e-9
    assert paid_back is not None
    assert paid_back < 60
    assert spent / STEPS > time - 0.02  # and what is allowed is used
    kinds = {choice.on for choice in run.done}
    assert frozenset(range(len(world.units.units))) in kinds
    assert len(kinds) >= 2


def test_the_beginning() -> None:
    """The least, everything, both measured, then the two sets that gain most, the lesser one first."""
    run = Simulation(World(adapters()), time=0.6)
    first = run.step()
    assert (first.on, first.measured, first.probe) == ({0}, True, False)
    warm = run.step()
    assert (len(warm.on), warm.measured, warm.probe) == (8, False, False)
    for _ in range(MEASURED):
        assert not run.course.is_planned
        step = run.step()
        assert (len(step.on), step.measured, step.probe) == (8, True, True)
    assert run.course.is_planned
    parts = [run.step() for _ in range(1 + MEASURED)]
    assert all(each.on < run.course.most for each in parts)
    assert [each.measured for each in parts] == [False, True, True]
    assert run.plans == 2


@pytest.mark.parametrize("refresh", [10, 40])
def test_plans_are_thought_over(refresh: int) -> None:
    run = Simulation(World(adapters()), falling(8), time=0.6, refresh=refresh).steps(STEPS)
    probes = [number for number, choice in enumerate(run.done) if choice.probe]
    gaps = [after - before for before, after in pairwise(probes[2:])]
    assert min(gaps) > refresh
    assert max(gaps) < 2 * refresh + 5
    assert run.plans == len(probes) - MEASURED + 2
    assert all(len(run.done[number].on) == 8 and run.done[number].measured for number in probes)


@pytest.mark.parametrize("time", [0.58, 0.67])
def test_what_gains_nothing_is_looked_at_again(time: float) -> None:
    """Where a part takes all the time there is, steps that train everything would never come."""
    run = Simulation(World(adapters()), [1.0] * 4 + [0.0] * 4, time=time, refresh=20).steps(STEPS)
    probes = [number for number, choice in enumerate(run.done) if choice.probe]
    gaps = [after - before for before, after in pairwise(probes[2:])]
    assert len(gaps) > 5
    assert max(gaps) < 3 * 20


def test_gains_that_change_change_what_is_trained() -> None:
    world = World(layers())
    count = len(world.units.units)
    run = Simulation(world, time=0.8, refresh=20)

    def part(favoured: int) -> frozenset[int]:
        for _ in range(150):
            run.step([10.0 if number == favoured else 0.1 for number in range(count)])
        return run.course.pair[0]

    inside = [number for number, unit in enumerate(world.units.units) if unit.share and unit.stage == 1]
    assert inside[0] in part(inside[0])
    both = part(inside[1])
    assert inside[1] in both


NOTHING_NEW: dict[str, list[float]] = {
    "not a number": [math.nan] + [1.0] * 7,
    "infinite": [math.inf] + [1.0] * 7,
    "zero": [0.0] * 8,
    "negative": [-1.0] * 8,
}


@pytest.mark.parametrize("kind", NOTHING_NEW)
def test_measurements_that_say_nothing(kind: str) -> None:
    assert merged(None, NOTHING_NEW[kind]) is None
    assert merged([0.25, 0.75], NOTHING_NEW[kind][:2]) == [0.25, 0.75]
    run = Simulation(World(adapters()), NOTHING_NEW[kind], time=0.6).steps(100)
    assert run.plans >= 2
    assert run.mean_share(run.done) <= 0.6 + 1e-9


def test_merged_gains() -> None:
    assert merged(None, [3.0, -1.0, 1.0]) == [0.75, 0.0, 0.25]
    assert merged([1.0, 0.0], [1.0, 3.0]) == [0.625, 0.375]


@pytest.mark.parametrize("kind", [adapters, layers])
@pytest.mark.parametrize("steps", [1, 3, 4, 6, 33, 71])
def test_state_goes_on_with_the_same_choices(kind: object, steps: int) -> None:
    units = adapters() if kind is adapters else layers()
    gains = falling(len(units.units))
    run = Simulation(World(units), gains, time=0.6, refresh=15).steps(steps)
    other = Simulation(World(units), gains, time=0.6, refresh=15)
    other.course.load(json.loads(json.dumps(run.course.state(), sort_keys=True)))
    run.done.clear()
    assert other.steps(120).done == run.steps(120).done
    assert other.course.state() == run.course.state()


def test_state_of_another_model() -> None:
    run = Simulation(World(adapters()), time=0.6).steps(20)
    with pytest.raises(ValueError, match="the model has 4 blocks"):
        Simulation(World(adapters(4)), time=0.6).course.load(run.course.state())
    course = Simulation(World(adapters()), time=0.6).course
    for name, wrong in (("gains", [1.0]), ("selection", run.course.state()["selection"] | {"most": [8]})):
        with pytest.raises(ValueError, match="there are 8 units"):
            course.load(run.course.state() | {name: wrong})


@pytest.mark.parametrize("memory", [0.25, 0.5, 0.8])
@pytest.mark.parametrize("time", [None, 0.45])
def test_no_step_holds_more_than_its_share(memory: float, time: float | None) -> None:
    world = World(adapters())
    shares = {"memory": memory} | ({} if time is None else {"time": time})
    run = Simulation(world, falling(8), **shares)
    if time is not None:
        world.backward *= 3
    for number in range(150):
        run.step(forgotten=number in (0, 3), scale=(1.0, 0.3, 2.0)[number % 3])
    held = [world.held_share(choice.on) for choice in run.done]
    assert max(held) <= memory
    deepest = max(depth for depth in range(8) if world.held_share({depth}) <= memory)
    assert max(max(choice.on) for choice in run.done) == deepest


def test_bytes_are_not_known_after_a_step_that_was_not_measured() -> None:
    run = Simulation(World(adapters(), uneven=0), memory=0.6)
    for _ in range(3):
        assert run.step(forgotten=True).on == {0}
    assert run.step().on == {0}
    assert len(run.step().on) == 4


def test_the_last_block_alone_where_the_share_is_just_that() -> None:
    world = World(adapters())
    run = Simulation(world, memory=world.held_share({0}) + 1e-6).steps(60)
    assert {choice.on for choice in run.done} == {frozenset({0})}


def test_too_little_memory() -> None:
    world = World(adapters(), uneven=0)
    run = Simulation(world, memory=0.1)
    needed = world.held_share({0})
    with pytest.raises(
        ElasticError, match=rf"^elastic\.memory=0\.1 .* holds {needed:.3f} of the activations"
    ) as raised:
        run.steps(10)
    assert str(raised.value).endswith("Allow more, or leave out elastic.memory")
    assert {choice.on for choice in run.done[:1]} == {frozenset({0})}


@pytest.mark.parametrize("memory", [None, 0.3, 0.6])
def test_too_little_time(memory: float | None, caplog: pytest.LogCaptureFixture) -> None:
    """Most steps train the least there is; those that measure the most still come, and one warning says the mean."""
    world = World(adapters(), uneven=0)
    world.with_graph = world.plain  # the last block is never seen without a graph
    shares = {"time": 0.1, "refresh": 20} | ({} if memory is None else {"memory": memory})
    with caplog.at_level("WARNING", "daf"):
        run = Simulation(world, **shares).steps(300)
    [record] = caplog.records
    figure = re.escape(f"{world.share({0}):.2f}")
    assert re.match(rf"elastic\.time=0\.1 .* a step takes {figure} of the time", record.message)
    kinds = [choice.on for choice in run.done[10:]]
    assert kinds.count(frozenset({0})) >= 0.75 * len(kinds)
    assert run.course.most in kinds
    assert all(choice.probe for choice in run.done[10:] if choice.on == run.course.most)
    assert run.mean_share(run.done[10:]) == pytest.approx(run.course.target, abs=0.01)
    assert f"Steps take {run.course.target:.2f} on average" in record.message


def test_a_share_that_can_be_kept_later_is_kept_then(caplog: pytest.LogCaptureFixture) -> None:
    """As where other work blurred the clocks at the beginning."""
    world = World(adapters(), uneven=0)
    calm, world.outside = world.outside, 30.0
    run = Simulation(world, falling(8), time=0.6, refresh=10).steps(20)
    assert "elastic.time=0.6 cannot be kept" in caplog.text
    world.outside = calm
    run.steps(400)
    assert run.course.target == 0.6
    assert run.mean_share(run.done[-200:]) == pytest.approx(0.6, abs=0.01)
    assert len(caplog.records) == 1


def test_a_share_that_cannot_be_kept_goes_on_after_a_resume(caplog: pytest.LogCaptureFixture) -> None:
    world = World(adapters(), uneven=0)
    run = Simulation(world, time=0.1, refresh=10).steps(30)
    resumed = Simulation(world, time=0.1, refresh=10)
    resumed.course.load(json.loads(json.dumps(run.course.state())))
    run.done.clear()
    assert resumed.steps(60).done == run.steps(60).done
    assert len(caplog.records) == 1


def test_the_head_alone_takes_least(caplog: pytest.LogCaptureFixture) -> None:
    world = World(layers())
    assert world.units.always
    run = Simulation(world, time=world.share(()) + 0.005).steps(200)
    assert run.done[4].on == frozenset()
    assert run.mean_share(run.done[10:]) <= run.config.time + 1e-9
    with caplog.at_level("WARNING", "daf"):
        Simulation(world, time=world.share(()) - 0.005).steps(30)
    assert f"a step takes {world.share(()):.2f} of" in caplog.text


def test_two_depths_come_in_turn_where_what_lies_deeper_gains_less() -> None:
    world = World(adapters(), uneven=0)
    between = (world.share(range(3)) + world.share(range(4))) / 2
    run = Simulation(world, falling(8), time=between, refresh=10_000).steps(400)
    on = [len(choice.on) for choice in run.done[-100:]]
    assert set(on) == {3, 4}
    assert 45 <= on.count(3) <= 55
    assert max(len([*group]) for _, group in groupby(on)) <= 2


def test_the_most_and_the_least_come_in_turn_where_what_lies_deeper_gains_more() -> None:
    world = World(adapters(), uneven=0)
    run = Simulation(world, falling(8)[::-1], time=0.7).steps(400)
    on = [len(choice.on) for choice in run.done[-100:]]
    assert set(on) == {1, 8}
    assert on.count(8) > 25


@pytest.mark.parametrize("kind", [adapters, layers])
@pytest.mark.parametrize("seed", range(5))
def test_no_steps_in_turn_gain_more(kind: object, seed: int) -> None:
    """Compared with all pairs of sets, of few units."""
    units = adapters(6) if kind is adapters else layers()
    world, random = World(units, seed), np.random.default_rng(seed)
    count = len(units.units)
    gains = [*map(float, random.random(count) ** 3)]
    costs = StepCosts(units, [1] * len(units.blocks))
    for on in (frozenset({0}), units.everything):
        costs.add(world.times(on), on)
    selection = Selection(units, costs.unit_costs(), gains, units.everything)
    chosen = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
    first = {number for number, unit in enumerate(units.units) if unit.outside and unit.stage == 0}
    subsets = [frozenset(map(int, np.flatnonzero(bits))) for bits in chosen]
    # What comes before the first block is trained with everything alone.
    subsets = [on for on in subsets if (on or units.always) and (not on & first or on == units.everything)]
    points = np.array(sorted((selection.share(on), sum(gains[unit] for unit in on)) for on in subsets))
    points = points[points[:, 1] >= np.maximum.accumulate(points[:, 1])]  # those that no cheaper set is worth more than
    for room in np.linspace(selection.least.share, 1, 23)[:-1]:
        low, high = selection.neighbours(room)
        often = 0.0 if high.share == low.share else (room - low.share) / (high.share - low.share)
        found = low.gain + often * (high.gain - low.gain)
        below, above = points[points[:, 0] <= room + 1e-12], points[points[:, 0] > room + 1e-12]
        rise = (room - below[:, None, 0]) / (above[None, :, 0] - below[:, None, 0])
        mixed = below[:, None, 1] + rise * (above[None, :, 1] - below[:, None, 1])
        assert found >= max(mixed.max(), below[:, 1].max()) - 1e-9


def test_hull() -> None:
    world = World(layers(), uneven=0)
    costs = StepCosts(world.units, [1] * len(world.units.blocks))
    for on in (frozenset[int](), world.units.everything):
        costs.add(world.times(on), on)
    gains = falling(len(world.units.units))
    selection = Selection(world.units, costs.unit_costs(), gains, world.units.everything)
    for point in selection.hull:
        assert point.share == pytest.approx(costs.share(point.on))
        assert point.gain == pytest.approx(sum(gains[unit] for unit in point.on))
    assert (selection.least.on, selection.hull[-1].on) == (frozenset(), world.units.everything)
    assert selection.share(world.units.everything) == 1
    assert selection.neighbours(0.0) == selection.neighbours(selection.least.share - 1e-6) == (selection.least,) * 2
    assert selection.neighbours(1.5) == (selection.hull[-1],) * 2
    again = Selection.from_state(world.units, json.loads(json.dumps(selection.state())))
    assert again.hull == selection.hull


def test_time_is_used_though_what_lies_deeper_gains_nothing() -> None:
    world = World(adapters(12), uneven=0)
    run = Simulation(world, [1.0] + [0.0] * 11, time=0.78).steps(400)
    assert run.mean_share(run.done[100:]) == pytest.approx(0.78, abs=0.01)


def test_a_resume_with_a_share_that_cannot_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    world = World(adapters(), uneven=0)
    run = Simulation(world, time=0.6).steps(30)
    less = Simulation(world, time=0.2)
    less.course.load(json.loads(json.dumps(run.course.state())))
    less.steps(10)
    assert "elastic.time=0.2 cannot be kept" in caplog.text


def test_steps_that_cannot_be_timed_leave_little_to_remember() -> None:
    run = Simulation(World(adapters()), time=0.7)
    for _ in range(200):
        run.step(forgotten=True)
    assert len(run.course.state()["early"]) == 2
    run.steps(300)
    assert run.mean_share(run.done[-150:]) == pytest.approx(0.7, abs=0.01)


@pytest.mark.parametrize("refresh", [1, 2, 3])
def test_a_share_that_is_lost_is_said_though_all_steps_train_most(
    refresh: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(adapters(), uneven=0)
    run = Simulation(world, memory=0.5, time=0.9, refresh=refresh).steps(30)
    world.outside *= 1000
    with caplog.at_level("WARNING", "daf"):
        run.steps(60)
    assert "more than elastic.time=0.9" in caplog.text


def test_a_share_that_a_single_unit_cannot_keep(caplog: pytest.LogCaptureFixture) -> None:
    """Memory suffices for no more than one, so that the least is all that any step may train."""
    world = World(adapters(12), uneven=0)
    run = Simulation(world, memory=world.held_share({0}) + 1e-6, time=0.2)
    run.steps(200)
    assert "elastic.time=0.2 cannot be kept" in caplog.text
    assert {choice.on for choice in run.done} == {frozenset({0})}


@pytest.mark.parametrize("refresh", [1, 10, 50])
def test_parts_are_trained_though_the_share_is_near_the_least(refresh: int) -> None:
    world = World(adapters(12), uneven=0)
    least, more = world.share({0}), world.share({0, 1})
    run = Simulation(world, falling(12), time=least + (more - least) / 2, refresh=refresh).steps(600)
    late = run.done[100:]
    assert sum(len(choice.on) > 1 for choice in late) > 0.15 * len(late)
    assert any(choice.probe for choice in late)


def test_other_shares_after_a_resume_make_another_plan_at_once() -> None:
    world = World(adapters(), uneven=0)
    run = Simulation(world, time=0.9).steps(30)
    state = json.loads(json.dumps(run.course.state()))
    less = Simulation(world, memory=0.3)
    less.course.load(state)
    held = [world.held_share(choice.on) for choice in less.steps(20).done]
    assert max(held) <= 0.3
    same = Simulation(world, time=0.9)
    same.course.load(state)
    assert same.course.state() == run.course.state()


@pytest.mark.parametrize(("kind", "target"), [(adapters, 0.7), (layers, 0.45)])
def test_shares_where_none_is_given(kind: object, target: float) -> None:
    units = adapters() if kind is adapters else layers()
    assert Simulation(World(units)).course.target == target
    assert Simulation(World(units), memory=0.5).course.target == 1.0


def test_a_share_that_is_lost_later_leaves_what_is_trained(caplog: pytest.LogCaptureFixture) -> None:
    world = World(adapters(), uneven=0)
    run = Simulation(world, time=0.6, refresh=10).steps(40)
    before = run.course.pair
    with caplog.at_level("WARNING", "daf"):
        world.outside *= 100  # batches that leave blocks little to do
        run.steps(200)
    assert "more than elastic.time=0.6" in caplog.text
    assert run.course.pair == before
    world.outside /= 100
    run.steps(200)
    assert run.course.share(run.course.pair[0]) < 0.6
