"""Simulates a training pass: the memory that it takes at most, and its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from daf_core.plan.policies import BlockPolicy

if TYPE_CHECKING:
    from daf_core.plan.cost.profile import Costs


@dataclass(frozen=True)
class Forecast:
    """What is expected of a pass."""

    seconds: float
    peak_bytes: int  # the most at once, in addition to parameters, their gradients and the optimizer
    held_bytes: int  # of saved activations at the end of forward
    kept_bytes: int  # of those that stay as they are


def simulate(costs: Costs, policies: Sequence[BlockPolicy]) -> Forecast:
    """Returns the forecast of a pass, given the policy outside of blocks and then the policy of each call of a block.

    Packed bytes count from beginning to end: the pool keeps its pages from step to step. Bytes that stay as they are
    grow in forward and go in backward, so that blocks near the input have the most room when they are recomputed.
    """
    held = [float(costs[policy].held[number]) for number, policy in enumerate(policies)]
    packed = sum(size for size, policy in zip(held, policies, strict=True) if policy.packs)
    raw = [0.0 if policy.packs else size for size, policy in zip(held, policies, strict=True)]
    live = peak = raw[0]
    calls = list(enumerate(policies))[1:]
    for number, policy in calls:
        peak = max(peak, live + costs.between[number - 1], live + costs[policy].forward_peak[number])
        live += raw[number]
    peak = max(peak, live + costs.between[-1], live + costs[policies[0]].backward_peak[0])
    for number, policy in reversed(calls):
        peak = max(peak, live + costs[policy].backward_peak[number])
        live -= raw[number]
    seconds = sum(float(costs[policy].seconds[number]) for number, policy in enumerate(policies))
    return Forecast(seconds, int(packed + peak), int(sum(held)), int(sum(raw)))
