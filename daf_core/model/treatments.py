"""What happens to the activations of which part of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Treatments:
    """How parts of a model are treated, by their qualified names; "" is the model itself.

    Attributes:
        kept: Whether what a module saves stays as it is; so does what is saved in modules inside of it that are not
            named themselves.
        recomputed: Modules that save their input alone. It is stored in 8 bits or more: all activations of the block
            are computed from it, so that 4 bits there make a larger error than 4 bits for each of them (GPT-2: .11
            against .075), while 8 bits make a tenth of it (.007) and take a hundredth of a block's bytes.
    """

    kept: Mapping[str, bool] = field(default_factory=dict[str, bool])
    recomputed: frozenset[str] = frozenset()

    def state(self) -> dict[str, Any]:
        """Returns it as JSON-able values."""
        return {"kept": dict(self.kept), "recomputed": sorted(self.recomputed)}
