"""Finds the fastest way to train within a memory budget: policies of blocks, and the number of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from daf_core.config import DAFConfig
from daf_core.model.treatments import Treatments
from daf_core.plan import policies
from daf_core.plan.cost.profile import Costs, Forecast, Profile, most_bits, planned_bits, simulate
from daf_core.plan.policies import COMPRESS, KEEP, OFF, BlockPolicy
from daf_core.plan.search.solver import Choice, choose, least

MARGIN = 0.08  # share of a budget that a plan leaves free: most forecasts are off by up to 6%

RELAXATION = 1.06
RELAXATION_STEPS = 16
"""The solver adds all held bytes to the largest transient, which never meet. So it gets budgets up to `RELAXATION` **
`RELAXATION_STEPS` (2.5) times as large, and `simulate` tells which of its answers fit. The budgets are powers of
`RELAXATION` whatever the limit is, so that a larger limit has all fast plans of a smaller one."""

SPLITTING = 0.03
"""Twice as many micro-batches have to save 2% (2 ** 0.03) of the time: clocks are no better, and dropout draws other
masks."""

SPILLING = 2
"""Blocks whose activations have room at once where others are spilled: one that is read, and one that is read ahead."""

SEARCHED = 1.02  # the smallest budget that a plan exists for is searched to this ratio


@dataclass(frozen=True)
class BatchSize:
    """How large a batch is: its rows, and their length relative to the rows that the profile was measured with."""

    rows: int
    length: float = 1.0

    def of_part(self, parts: int) -> float:
        """Returns the largest of N micro-batches, in rows of the profile."""
        return -(-self.rows // parts) * self.length


@dataclass(frozen=True)
class Plan:
    """How a training step is run."""

    parts: int  # micro-batches that the batch is split into
    bits: int | None  # the precision that has room; None where nothing loses precision
    outside: BlockPolicy  # the policy outside of blocks
    blocks: tuple[BlockPolicy, ...]  # the policy of each block
    forecast: Forecast  # of the whole step; what room is left in the budget is filled with more bits
    activation_budget: int  # bytes that saved activations may hold

    @property
    def recomputed(self) -> list[int]:
        """Numbers of the blocks that are recomputed."""
        return [number for number, policy in enumerate(self.blocks) if policy.recomputes]

    @property
    def counts(self) -> str:
        """How many blocks follow each policy, in words."""
        chosen = [policy for policy in policies.POLICIES if policy in self.blocks]
        return ", ".join(f"{self.blocks.count(each)} {each.words}" for each in chosen) or "none"

    @property
    def exact(self) -> bool:
        """Whether nothing is compressed."""
        return not any(policy.packs for policy in (self.outside, *self.blocks))

    def treatments(self, names: Sequence[str]) -> Treatments:
        """Returns what the engine is told, for blocks of these names."""
        kept = {name: not policy.packs for name, policy in zip(names, self.blocks, strict=True)}
        return Treatments({"": not self.outside.packs, **kept}, frozenset(names[number] for number in self.recomputed))


def find_plan(profile: Profile, batch: BatchSize, budget: int, config: DAFConfig, splits: bool) -> Plan | None:
    """Returns the fastest plan that keeps a budget with the most bits that have room; None if there is none.

    The budget is the bytes that the step may take at once, besides parameters, their gradients and the optimizer;
    `splits` says whether the batch may be split into micro-batches. If no other plan fits and there is a `spill_dir`,
    activations may move there; their transfers are not forecast.
    """
    limit = int(budget * (1 - MARGIN))
    untouched = _untouched(profile, batch, budget)
    if untouched is not None:
        return untouched
    for bits in planned_bits(config):
        plans = [plan for parts in _parts(batch.rows, splits) for plan in _plans(profile, batch, parts, bits, budget)]
        if plans:
            best = min(
                plans, key=lambda each: (each.forecast.seconds * each.parts**SPLITTING, each.forecast.peak_bytes)
            )
            return _filled(profile, batch, best, config, limit)
    return _spilling(profile, batch, config, limit, splits) if config.spill_dir is not None else None


def least_budget(profile: Profile, batch: BatchSize, config: DAFConfig, splits: bool) -> int:
    """Returns the smallest budget, to a ratio of `SEARCHED`, that `find_plan` has a plan for."""
    bits = planned_bits(config)[-1]
    costs = (profile.at(batch.of_part(parts), bits) for parts in _parts(batch.rows, splits))
    smallest = min(least([[*block] for block in _choices(profile, each)]) for each in costs)
    low, high = 0, int(smallest / (1 - MARGIN)) + 2  # rounded twice
    while high > SEARCHED * low:
        middle = (low + high) // 2
        if find_plan(profile, batch, middle, config, splits) is None:
            low = middle + 1
        else:
            high = middle
    return high


def held_by_part(profile: Profile, batch: BatchSize, plan: Plan) -> list[int]:
    """Returns the bytes that a micro-batch's activations hold in a plan: outside of blocks, then in each block."""
    costs = profile.at(batch.of_part(plan.parts), plan.bits)
    taken = [costs[plan.outside].held[0], *(0.0 for _ in plan.blocks)]
    for call, block in enumerate(profile.calls):
        taken[1 + block] += costs[plan.blocks[block]].held[1 + call]
    return [int(size) for size in taken]


def tried(config: DAFConfig, profile: Profile, whole: str | None) -> str:
    """Returns what a plan may do to keep a budget, in words; `whole` says why batches cannot be split."""
    ways = ["fewer bits"] if config.precision != "exact" else []
    ways += [f"recomputation of {len(profile.blocks)} blocks"] if profile.blocks else []
    if profile.unlike:
        others, first = len(profile.unlike), profile.unlike[0]
        ways.append(f"no recomputation of {others} blocks ({first} computes something else when it runs again)")
    return ", ".join([*ways, "micro-batches" if whole is None else f"no micro-batches ({whole})"])


def _untouched(profile: Profile, batch: BatchSize, budget: int) -> Plan | None:
    """Returns the plan that keeps everything, if it fits: it changes no number, so no other plan is better."""
    blocks = _alike(profile, KEEP)
    forecast = _forecast(profile, profile.at(batch.of_part(1), None), KEEP, blocks)
    room = forecast.held_bytes + budget - forecast.peak_bytes
    return Plan(1, None, KEEP, blocks, forecast, room) if forecast.peak_bytes <= int(budget * (1 - MARGIN)) else None


def _spilling(profile: Profile, batch: BatchSize, config: DAFConfig, limit: int, splits: bool) -> Plan | None:
    """Returns the plan with the fewest micro-batches in which activations have room to be spilled and read."""
    bits, blocks = planned_bits(config)[0], _alike(profile, COMPRESS)
    for parts in _parts(batch.rows, splits):
        costs = profile.at(batch.of_part(parts), bits)
        forecast = _forecast(profile, costs, COMPRESS, blocks)
        room = limit - (forecast.peak_bytes - forecast.held_bytes)
        if room >= SPILLING * costs[COMPRESS].held.max():
            spilled = replace(forecast, seconds=forecast.seconds * parts, peak_bytes=limit, held_bytes=room)
            return Plan(parts, bits, COMPRESS, blocks, spilled, room)
    return None


def _alike(profile: Profile, policy: BlockPolicy) -> tuple[BlockPolicy, ...]:
    return tuple(OFF if block in profile.off else policy for block in range(len(profile.names)))


def _filled(profile: Profile, batch: BatchSize, plan: Plan, config: DAFConfig, limit: int) -> Plan:
    """Returns a plan with the memory that it takes when what is left of the limit goes to more bits."""
    costs = profile.at(batch.of_part(plan.parts), most_bits(config))
    forecast = _forecast(profile, costs, plan.outside, plan.blocks)
    peak, held = min(forecast.peak_bytes, limit), min(forecast.held_bytes, plan.activation_budget)
    return replace(plan, forecast=replace(plan.forecast, peak_bytes=peak, held_bytes=held))


def _forecast(profile: Profile, costs: Costs, outside: BlockPolicy, blocks: Sequence[BlockPolicy]) -> Forecast:
    return simulate(costs, [outside, *(blocks[block] for block in profile.calls)])


def _parts(rows: int, splits: bool) -> list[int]:
    return sorted({*(1 << power for power in range(rows.bit_length())), rows}) if splits else [1]


def _plans(profile: Profile, batch: BatchSize, parts: int, bits: int | None, budget: int) -> Iterator[Plan]:
    limit = int(budget * (1 - MARGIN))
    costs = profile.at(batch.of_part(parts), bits)
    choices = _choices(profile, costs)
    tried: set[tuple[int, ...]] = set()
    first = math.floor(math.log(max(limit, 1), RELAXATION)) + 1
    for allowed in (limit, *(int(RELAXATION**power) for power in range(first, first + RELAXATION_STEPS))):
        picked = choose([[*block] for block in choices], allowed)
        if picked is None or tuple(picked) in tried:
            continue
        tried.add(tuple(picked))
        outside, *blocks = [[*block.values()][index] for block, index in zip(choices, picked, strict=True)]
        forecast = _forecast(profile, costs, outside, blocks)
        if forecast.peak_bytes <= limit:
            whole = replace(forecast, seconds=forecast.seconds * parts)
            # Where nothing is packed nothing can be given up, and the margin has to make up for errors of the forecast.
            packs = outside.packs or any(policy.packs for policy in blocks)
            room = forecast.held_bytes + (limit if packs else budget) - forecast.peak_bytes
            yield Plan(parts, bits, outside, tuple(blocks), whole, room)


def _choices(profile: Profile, costs: Costs) -> list[dict[Choice, BlockPolicy]]:
    """Returns the policies outside of blocks, and of each block, by what they cost; of equal ones the first."""
    on, rows = [policy for policy in policies.POLICIES if policy.selectable], [[0], *([] for _ in profile.names)]
    for call, block in enumerate(profile.calls):
        rows[1 + block].append(1 + call)
    choices: list[dict[Choice, BlockPolicy]] = []
    for block, calls in enumerate(rows, -1):
        found: dict[Choice, BlockPolicy] = {}
        between = float(costs.between.max()) if calls == [0] else 0.0
        for policy in [OFF] if block in profile.off else on:
            cost = costs[policy]
            if np.all(np.isfinite(cost.held[calls])):
                peaks = np.maximum(cost.forward_peak, cost.backward_peak)[calls]
                transient = math.ceil(max(float(peaks.max(initial=0.0)), between))
                held = math.ceil(float(cost.held[calls].sum()))
                found.setdefault(Choice(float(cost.seconds[calls].sum()), held, transient), policy)
        choices.append(found)
    return choices
