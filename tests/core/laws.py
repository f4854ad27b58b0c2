"""The laws that a loss follows."""

from __future__ import annotations

from typing import Any

from torch import nn

from daf_core.batch.loss_reduction import Law, LossReduction, safest
from daf_core.batch.trial import LossFunction, Trial, evaluating


def matching_laws(model: nn.Module, batch: Any, loss_function: LossFunction) -> frozenset[Law]:
    """Returns the laws of `LossReduction` that a loss follows on a few rows of a batch."""
    with evaluating(model) as modes:
        return Trial(model, batch, loss_function, modes).matching(frozenset[Law](LossReduction))


def infer_reduction(model: nn.Module, batch: Any, loss_function: LossFunction) -> Law:
    """Returns the law to go by."""
    return safest(matching_laws(model, batch, loss_function), batch)
