"""Plans for budgets: on made-up costs, so that the search alone is tested."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from daf_core import DAFConfig
from daf_core.plan.cost.profile import Costs, PolicyCosts, planned_bits, simulate
from daf_core.plan.policies import KEEP, OFF, POLICIES
from daf_core.plan.search.planner import MARGIN, SEARCHED, SPLITTING, BatchSize, Plan, find_plan, least_budget

MB = 1 << 20


@dataclass
class MadeUp:
    """Costs in proportion to rows, of blocks with several calls each."""

    seed: int
    blocks: int = 6
    repeats: int = 1
    off: frozenset[int] = frozenset()
    names: list[str] = field(init=False)
    calls: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.names = [str(number) for number in range(self.blocks)]
        self.calls = [number for _ in range(self.repeats) for number in self.names_as_numbers()]
        random = np.random.default_rng(self.seed)
        self.raw = random.uniform(5, 20, 1 + len(self.calls)) * MB
        self.input = random.uniform(0.5, 2, 1 + len(self.calls)) * MB
        self.forward = random.uniform(1, 3, 1 + len(self.calls))
        self.packing = random.uniform(0.1, 1.5, 1 + len(self.calls))
        self.head = random.uniform(0, 30) * MB

    def names_as_numbers(self) -> list[int]:
        return list(range(self.blocks))

    def at(self, rows: float, bits: int | None) -> Costs:
        packed = self.raw * (0.8 if bits is None else bits / 24)
        forward, nothing = self.forward, np.zeros(len(self.raw))
        seconds = [3 * forward, 3 * forward + self.packing, 4 * forward, 4.004 * forward, forward.copy()]
        held = [self.raw.copy(), packed, self.input.copy(), self.input * 0.3, nothing]
        inside = [self.raw * 0.2] * 2 + [self.raw * 1.2] * 2 + [nothing.copy()]
        for array in (*seconds[2:], *held[2:], *inside[2:]):
            array[0] = np.inf
        between = np.full(1 + len(self.calls), MB / 4)
        between[-1] = self.head
        columns = zip(POLICIES, seconds, held, inside, strict=True)
        costs = {name: PolicyCosts(rows * s + 0.1, rows * h, rows * i, rows * i) for name, s, h, i in columns}
        return Costs(costs, rows * between)


def plan_for(profile: MadeUp, budget: int, config: DAFConfig, rows: int = 8, splits: bool = True) -> Plan | None:
    return find_plan(cast("Any", profile), BatchSize(rows), budget, config, splits)


CONFIGS: dict[str, dict[str, Any]] = {
    "auto": {},
    "exact": {"precision": "exact"},
    "least": {"min_precision": 4},
    "fixed": {"precision": 2},
}


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("seed", "repeats"), [(0, 2), (1, 1), (2, 1)])
def test_plans_keep_budgets_and_smaller_ones_take_longer(options: dict[str, Any], repeats: int, seed: int) -> None:
    profile, config = MadeUp(seed, 4, repeats), DAFConfig(**options)
    splits, rows = seed != 1, 4
    least = least_budget(cast("Any", profile), BatchSize(rows), config, splits)
    seconds: dict[int | None, float] = {}
    bits: list[int] = []
    for share in (40, 10, 4, 2, 1.5, 1.25, 1.1, 1.05, 1.0):
        plan = plan_for(profile, int(least * share), config, rows, splits)
        assert plan is not None
        assert plan.forecast.peak_bytes <= least * share * (1 - MARGIN)
        assert plan.bits in planned_bits(config) or plan.exact
        bits += [] if plan.exact else [plan.bits or 0]
        weighted = plan.forecast.seconds * plan.parts**SPLITTING
        assert weighted >= seconds.get(plan.bits, 0) * (1 - 1e-9)
        seconds[plan.bits] = weighted
        costs = profile.at(BatchSize(rows).of_part(plan.parts), plan.bits)
        again = simulate(costs, [plan.outside, *(plan.blocks[block] for block in profile.calls)])
        assert again.peak_bytes <= plan.forecast.peak_bytes, "what is left goes to more bits"
        assert plan.activation_budget >= plan.forecast.held_bytes
        left = int(least * share) - plan.forecast.peak_bytes
        assert plan.activation_budget <= plan.forecast.held_bytes + left
    assert bits == sorted(bits, reverse=True)
    assert plan_for(profile, int(least / SEARCHED), config, rows, splits) is None


def test_everything_is_kept_where_there_is_room_and_nothing_is_split() -> None:
    plan = plan_for(MadeUp(0), 10_000 * MB, DAFConfig())
    assert plan is not None
    assert (plan.parts, set(plan.blocks), plan.outside) == (1, {KEEP}, KEEP)


@pytest.mark.parametrize("rows", [1, 7])
def test_parts_of_batches_that_do_not_divide(rows: int) -> None:
    profile, config = MadeUp(0), DAFConfig()
    least = least_budget(cast("Any", profile), BatchSize(rows), config, True)
    plan = plan_for(profile, least, config, rows)
    assert plan is not None
    assert 1 <= plan.parts <= rows
    whole = least_budget(cast("Any", profile), BatchSize(rows), config, False)
    assert whole >= least
    unsplit = plan_for(profile, whole, config, rows, splits=False)
    assert unsplit is not None
    assert unsplit.parts == 1


def test_model_without_blocks() -> None:
    profile = MadeUp(0, blocks=0)
    plan = plan_for(profile, least_budget(cast("Any", profile), BatchSize(4), DAFConfig(), True), DAFConfig())
    assert plan is None or plan.blocks == ()


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, [4, 2, 1]), ({"min_precision": 8}, [8]), ({"precision": 8}, [8, 4, 2, 1]), ({"precision": 1}, [1])],
)
def test_precisions_that_are_planned_with(options: dict[str, Any], expected: list[int]) -> None:
    assert planned_bits(DAFConfig(**options)) == expected


def test_blocks_without_a_graph_hold_nothing_and_take_their_forward_pass() -> None:
    profile, batch = MadeUp(0), BatchSize(8)
    less = MadeUp(0, off=frozenset({0, 1, 2}))
    budget = least_budget(profile, batch, DAFConfig(precision=4), splits=False)
    assert least_budget(less, batch, DAFConfig(precision=4), splits=False) < budget
    whole = find_plan(profile, batch, 3 * budget, DAFConfig(precision=4), splits=False)
    part = find_plan(less, batch, 3 * budget, DAFConfig(precision=4), splits=False)
    assert whole is not None
    assert part is not None
    assert [policy is OFF for policy in part.blocks] == [True] * 3 + [False] * 3
    assert OFF not in whole.blocks
    assert part.forecast.seconds < whole.forecast.seconds
    assert not part.recomputed
    everything = find_plan(less, batch, 10**12, DAFConfig(precision=4), splits=False)
    assert everything is not None
    assert everything.blocks == (OFF,) * 3 + (KEEP,) * 3
