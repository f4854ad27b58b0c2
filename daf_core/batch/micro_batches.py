"""Runs a training step in parts whose gradients add up to that of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from daf_core.errors import MicroBatchError

Step = Callable[[Any, float, bool], Tensor]


class WholeStepError(Exception):
    """What runs a step cannot do it for a part of a batch, and says why."""


def run_parts(model: nn.Module, parts: Sequence[Any], weights: Sequence[float], step: Step) -> Tensor:
    """Runs forward and backward of each part, and returns the sum of their losses.

    Gradients add up in ``.grad``. All parts but the last run under the ``no_sync`` of the model as it is called, if it
    has one. Parts with weight 0 are left out. When a part raises, the gradients of those before it stay.

    `step` gets a part, as `split` makes it, its weight, as `loss_reduction.weights` says, and whether it is the last:
    it multiplies the part's loss by the weight, runs backward, and returns the product, detached.

    Raises:
        WholeStepError: By `step`.
        MicroBatchError: There are not as many weights as parts, or all of them are 0.
    """
    if len(weights) != len(parts) or not any(weights):
        raise MicroBatchError(
            f"{len(parts)} parts and the weights {list(weights)} were given; give one weight for each part, and one "
            "that is not 0, as daf_core.batch.loss_reduction.weights does"
        )
    counted = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight]
    losses: list[Tensor] = []
    for index, (part, weight) in enumerate(counted, 1):
        last = index == len(counted)
        with nullcontext() if last else getattr(model, "no_sync", nullcontext)():
            losses.append(step(part, weight, last))
    return torch.stack(losses).sum(0)
