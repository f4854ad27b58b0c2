"""What a LightningModule counts while it trains, taken back when a step runs out of memory and is run again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchmetrics import Metric

from daf_core.snapshots.attributes import Attributes

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class Counts:
    """Attributes of a module that has a training_step, and the metrics inside of it, as they are now.

    Args:
        module: The module.
    """

    def __init__(self, module: LightningModule) -> None:
        parts = list(module.modules())
        metrics = [part for part in parts if isinstance(part, Metric)]
        # Torch's and Lightning's own attributes are private.
        self._kept = [Attributes(part) for part in parts if hasattr(part, "training_step")]
        self._kept += [Attributes(metric, private=True) for metric in metrics]
        self._states = [(state, state.detach().clone()) for metric in metrics for state in _states(metric)]

    def restore(self) -> None:
        """Takes them back, any number of times."""
        for kept in self._kept:
            kept.restore()
        with torch.no_grad():
            for state, before in self._states:
                state.copy_(before)


def _states(metric: Metric) -> list[Tensor]:
    """Returns the tensors that an update may add to in place; lists only grow."""
    return [state for state in metric.metric_state.values() if isinstance(state, Tensor)]
