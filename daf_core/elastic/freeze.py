"""Switches what is trained, where no graph is alive, and gives the user's own choice back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from daf_core.autograd.torch_private import take_forward_hooks
from daf_core.elastic.units import Units

INPUT_GRADIENT_HOOKS = ("make_inputs_require_grad", "make_inputs_require_grads")
"""Names of the forward hooks with which transformers and PEFT have embeddings return what requires a gradient, for
checkpoints of the reentrant kind. With them a graph begins at the input, whatever is trained (GPT-2 with 6 of 8 blocks
off held 89 MB instead of 25)."""

STALE = 10
"""Steps without training after which an optimizer's momentum begins anew: it would be the first step's direction."""

MOMENTA = ("exp_avg", "momentum_buffer", "exp_avg_diff")
"""What torch's optimizers call momentum. It becomes zero, so that Adam's first steps are short. With the gradient in
its place they were up to four times too long, as second moments, which are sizes and not directions, are kept; and
where a gradient scaler leaves it to a fused optimizer to unscale gradients, they were 65,536 times too long."""


class FrozenUnits:
    """Has some of the units trained, from `apply` to `unfreeze`."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self.off: list[nn.Parameter] = []  # parameters that are not trained, and that the user trains

    def apply(self, on: Collection[int]) -> None:
        """Has these units trained, by number, and the others not: they are given no gradient.

        What others had is dropped. An optimizer passes over what has none, and one of zero would move it by its
        momentum and its decay.
        """
        self.unfreeze()
        for number, unit in enumerate(self._units.units):
            if number not in on:
                self.off += [parameter for parameter in unit.parameters if parameter.requires_grad]
        for parameter in self.off:
            parameter.requires_grad_(False)
            parameter.grad = None

    def unfreeze(self) -> None:
        """Has everything trained that the user trains."""
        for parameter in self.off:
            parameter.requires_grad_(True)
        self.off = []


class InputGradientHooks:
    """Keeps embeddings from returning what requires a gradient, until `restore`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._restore: list[Callable[[], None]] = []
        self.take()

    def take(self) -> None:
        """Takes away those that there are now: trainers install them again when they switch checkpoints off and on."""
        taken = (take_forward_hooks(module, INPUT_GRADIENT_HOOKS) for module in self._model.modules())
        self._restore += [restore for restore in taken if restore is not None]

    def restore(self) -> None:
        """Puts them back."""
        for restore in self._restore:
            restore()
        self._restore = []


def forget_momentum(optimizers: Iterable[Any], parameters: Iterable[nn.Parameter]) -> None:
    """Has the momentum of parameters begin anew that have not been trained for long.

    Quantized momenta, which optimizers other than torch's keep, stay.
    """
    found = list(parameters)
    for optimizer in optimizers:
        for parameter in found:
            state: Any = optimizer.state.get(parameter, {})
            for name in MOMENTA:
                if type(state.get(name)) is torch.Tensor:
                    state[name].zero_()
