"""Updates that stand for the steps in which a unit was not trained, too."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from daf_core.elastic.units import Unit

MOST_STEPS = 4
"""Steps that an update stands for at most: after more of them its gradient says too little of theirs."""


class CatchUp:
    """Has the next update of units take the way of the steps that they have missed.

    A unit that is trained in every second step would otherwise go half as far as one that is trained in each, whatever
    the optimizer: what costs most would learn least. All that the optimizer's step changes counts, decay included.

    Args:
        units: What is about to be updated, each with the steps since its last update.
    """

    def __init__(self, units: Iterable[tuple[Unit, int]]) -> None:
        self._before = [
            (parameter, parameter.detach().clone(), min(missed, MOST_STEPS - 1))
            for unit, missed in units
            if missed
            for parameter in unit.parameters
        ]

    @torch.no_grad()
    def apply(self) -> None:
        """Lengthens the update, after the optimizer's step."""
        for parameter, before, missed in self._before:
            parameter.add_(parameter.detach() - before, alpha=missed)
