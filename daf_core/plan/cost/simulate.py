"""Plays a training pass through on paper: how much memory it will take at most, and how long it will run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daf_core.plan.cost.costs import Costs, Treatment


@dataclass(frozen=True)
class Forecast:
    """What is expected of a pass.

    Attributes:
        seconds: Its time.
        peak_bytes: The most memory at once, beside parameters, their gradients and the optimizer.
        held_bytes: What saved activations hold of it at the end of forward.
        kept_bytes: The part of that which stays as it is.
    """

    seconds: float
    peak_bytes: int
    held_bytes: int
    kept_bytes: int


def simulate(costs: Costs, treatments: Sequence[Treatment]) -> Forecast:
    """Returns what is expected of a forward and backward pass.

    What is packed counts from beginning to end: the pool keeps its pages from step to step. What is kept as it is grows
    in forward and goes in backward, so that blocks near the input have the most room when they are recomputed.

    Args:
        costs: What treatments cost at the pass's rows.
        treatments: That of what is outside of blocks, then of each call of a block.
    """
    held = [float(costs.held[number, treatment]) for number, treatment in enumerate(treatments)]
    packed = sum(size for size, treatment in zip(held, treatments, strict=True) if treatment.packs)
    raw = [0.0 if treatment.packs else size for size, treatment in zip(held, treatments, strict=True)]
    live = raw[0]
    peak = live
    calls = range(1, len(treatments))
    for number in calls:
        peak = max(peak, live + costs.between[number - 1], live + costs.forward_peak[number, treatments[number]])
        live += raw[number]
    peak = max(peak, live + costs.between[-1], live + costs.backward_peak[0, treatments[0]])
    for number in reversed(calls):
        peak = max(peak, live + costs.backward_peak[number, treatments[number]])
        live -= raw[number]
    seconds = sum(float(costs.seconds[number, treatment]) for number, treatment in enumerate(treatments))
    return Forecast(seconds, int(packed + peak), int(sum(held)), int(sum(raw)))
