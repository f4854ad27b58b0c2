"""What training each unit gains: how much a step's update of it lowers the loss, to first order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from daf_core.elastic.units import Unit

NEWEST = 0.5  # weight of what was measured last against all before it


def gains_of_update(units: Sequence[Unit]) -> Callable[[], list[float]]:
    """Returns what tells -<g, w_after - w_before> of each unit, to be called before an optimizer's step.

    What it returns is called after that step, of whatever optimizer, and before gradients are dropped. ElasticTrainer
    (MobiSys 2023) takes the gradient of a second pass for g; ranks of layers correlate by .83.
    """
    before = [[parameter.detach().clone() for parameter in unit.parameters] for unit in units]

    def gain(parameter: Tensor, earlier: Tensor) -> float:
        if parameter.grad is None:
            return 0.0
        return -float(torch.sum(parameter.grad.float() * (parameter.detach().float() - earlier.float())))

    return lambda: [sum(map(gain, unit.parameters, earlier)) for unit, earlier in zip(units, before, strict=True)]


def merged(known: Sequence[float] | None, measured: Sequence[float]) -> list[float] | None:
    """Returns the shares of all gains that units have, after a measurement of all units.

    A unit that makes the loss larger gains nothing. A measurement that is not finite, or zero everywhere as in a
    warm-up that begins with a learning rate of zero, says nothing.
    """
    if not all(map(math.isfinite, measured)) or not any(gain > 0 for gain in measured):
        return None if known is None else list(known)
    total = sum(max(gain, 0.0) for gain in measured)
    shares = [max(gain, 0.0) / total for gain in measured]
    if known is None:
        return shares
    return [(1 - NEWEST) * old + NEWEST * new for old, new in zip(known, shares, strict=True)]
