"""What a training step changes before it is finished."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

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
        self._gradients = [(parameter, _Gradient(parameter.grad)) for parameter in model.parameters()]
        self._numbers = RandomNumbers(self.devices)
        self._buffers = Buffers(model)
        self._modes = [(module, module.training) for module in model.modules()]
        self._restore_engine = None if snapshot is None else snapshot()

    def restore(self) -> None:
        """Takes everything back, any number of times; what the step has saved for backward must be gone by then."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient.restored()
        self._buffers.restore()
        for module, training in self._modes:
            module.training = training
        torch.clear_autocast_cache()
        if self._restore_engine is not None:
            self._restore_engine()
        self._numbers.restore()


class _Gradient:
    """A gradient as it is now. It comes back in the same tensor: others may have views of it, or it of them."""

    def __init__(self, gradient: Tensor | None) -> None:
        self._gradient = gradient
        self._before = None if gradient is None else gradient.detach().clone()

    def restored(self) -> Tensor | None:
        if self._gradient is None or self._before is None:
            return None
        with torch.no_grad():
            return self._gradient.copy_(self._before)
