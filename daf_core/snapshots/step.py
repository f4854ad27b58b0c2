"""What a training step changes before it is finished."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from daf_core.snapshots.rng_and_buffers import Buffers, RandomNumbers, devices_of


class Snapshot:
    """What forward and backward passes of a model change, as it is now, before a step.

    That is: random generators, gradients (those there are take as much memory once more), buffers such as running
    statistics, training flags, and DAF's own counts, which the function that `snapshot` returns takes back. Weights and
    the optimizer change only after it. What a model or a loss counts in attributes of its own is not taken back.

    Attributes:
        devices: Those of the model's parameters.
    """

    def __init__(self, model: nn.Module, snapshot: Callable[[], Callable[[], None]] | None = None) -> None:
        self.devices = devices_of(model)
        found = [(each, each.grad) for each in model.parameters()]
        self._gradients = [(each, grad, None if grad is None else grad.detach().clone()) for each, grad in found]
        self._numbers = RandomNumbers(self.devices)
        self._buffers = Buffers(model)
        self._modes = [(module, module.training) for module in model.modules()]
        self._restore_engine = None if snapshot is None else snapshot()

    def restore(self) -> None:
        """Takes everything back, any number of times; what the step has saved for backward must be gone by then."""
        for parameter, gradient, before in self._gradients:
            parameter.grad = gradient
            if gradient is not None and before is not None:
                gradient.detach().copy_(before)  # in the same tensor: others may have views of it, or it of them
        self._buffers.restore()
        for module, training in self._modes:
            module.training = training
        torch.clear_autocast_cache()
        if self._restore_engine is not None:
            self._restore_engine()
        self._numbers.restore()
