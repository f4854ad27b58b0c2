"""Whether an optimizer has changed parameters since."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class Updates:
    """Counts the steps of optimizers that hold one of some parameters.

    An optimizer that writes to ``parameter.data``, or by a kernel of its own, leaves no trace in a tensor's version.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.count = 0
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        step = weakref.WeakMethod(self._add)

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            add = step()
            if add is not None:
                add(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def watch(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Says whether the parameters are these, and not what sharding or a functional call has put in their place."""
        given = list(parameters)
        known = [reference() for reference in self._parameters]
        return len(given) == len(known) and all(one is other for one, other in zip(given, known, strict=True))

    def _add(self, optimizer: Optimizer) -> None:
        watched = [parameter for parameter in (reference() for reference in self._parameters) if parameter is not None]
        groups = optimizer.param_groups
        self.count += any(one is other for one in watched for group in groups for other in group["params"])
