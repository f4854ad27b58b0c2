"""What elastic training knows of one set of parameters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from daf_core.elastic.freeze import FrozenUnits
from daf_core.elastic.schedule import StepSchedule
from daf_core.elastic.units import Units


@dataclass
class Learned:
    """What is known of one set of parameters that the user trains.

    Attributes:
        trained: The parameters.
        unused: Indices of those that no gradient reaches.
        units: The units that they form.
        schedule: Decides what the next step trains.
        frozen: Freezes the other units.
        idle: Steps since each unit was last trained, by its name.
    """

    trained: list[nn.Parameter]
    unused: set[int]
    units: Units
    schedule: StepSchedule
    frozen: FrozenUnits
    idle: dict[str, int]

    @property
    def summary(self) -> str:
        """What is trained now, in words."""
        blocks, pair = len(self.units.blocks), self.schedule.pair
        if not self.schedule.is_planned:
            return f"the best of {blocks} blocks, once it is known"
        if pair[0] == self.schedule.most:
            return f"{blocks - self.units.depth(pair[0])} of {blocks} blocks in every step"
        parts = [f"{len(on)} of {len(self.units.units)} units in {blocks - self.units.depth(on)}" for on in pair]
        return f"{' and '.join(dict.fromkeys(parts))} of {blocks} blocks"
