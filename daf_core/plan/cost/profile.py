"""Measures what a step of a model costs, on a few rows, and says what it costs with any number of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from daf_core.config import DAFConfig
from daf_core.model.blocks import Block
from daf_core.plan.cost.costs import Costs, Numbers, PolicyCosts, costs_of, interpolate
from daf_core.plan.cost.simulate import simulate
from daf_core.plan.observe.trace import Observation
from daf_core.plan.policies import COMPRESS, KEEP, RECOMPUTE
from daf_kernels import PRECISIONS

PLANNED_BITS = 4
"""Where the precision is "auto", a plan has room for as many bits, as long as there is such a plan. They make gradient
errors of a few percent; what room is left goes to more bits."""

ALIKE = 0.02
"""Relative difference in bytes up to which blocks of a class count as alike: they get the same times, so that noise
does not decide which of them are recomputed."""


@dataclass(frozen=True)
class Observed:
    """Passes of N rows in pairs, everything compressed and all blocks recomputed; at `bits` None all stays exact."""

    rows: int
    bits: int | None
    metered: tuple[Observation, Observation]
    timed: Sequence[tuple[Observation, Observation]]


class Profile:
    """What a model's step costs with any number of rows, from passes with few and, if there are any, with many rows.

    `changed` are the names of what each pass changes in the model once more.
    """

    off: frozenset[int] = frozenset()  # numbers of the blocks that build no graph

    def __init__(
        self, blocks: Sequence[Block], few: Observed, many: Observed | None = None, changed: Collection[str] = ()
    ) -> None:
        self.blocks = list(blocks)
        self.names = [block.name for block in blocks]
        self.calls = few.metered[0].blocks  # the number of the block of each call in a pass
        self._changed = sorted(name for name in changed if "." in name)  # what the model itself counts, it may
        self._few, self._many = few, many
        self._known: dict[tuple[int, int | None], Costs] = {}

    @property
    def whole(self) -> str | None:
        """Why no batch can be split, as far as a pass shows that; None where it can."""
        if not self._changed:
            return None
        return f"each forward pass changes {self._changed[0]}, and one for each part would do so several times"

    def at(self, rows: float, bits: int | None) -> Costs:
        """Returns what a pass of so many rows, as long as those that were observed, costs at a precision."""
        few = self._costs(self._few, bits)
        if self._many is not None:
            share = (rows - self._few.rows) / (self._many.rows - self._few.rows)
            return interpolate(few, self._costs(self._many, bits), share)
        none = {
            policy: PolicyCosts(*(np.where(np.isinf(each), each, 0.0) for each in costs))
            for policy, costs in few.by_policy.items()
        }
        return interpolate(Costs(none, 0 * few.between), few, rows / self._few.rows)

    def with_off(self, names: Collection[str]) -> Profile:
        """Returns the profile of steps in which the blocks of these names build no graph."""
        other = copy(self)
        other.off = frozenset(number for number, name in enumerate(self.names) if name in names)
        return other

    def observed_peak(self, rows: int) -> int:
        """Returns the memory that observing a pass of so many rows takes."""
        costs = self.at(rows, self._few.bits)
        passes = [[COMPRESS, *[policy] * len(self.calls)] for policy in (COMPRESS, RECOMPUTE)]
        return max(simulate(costs, policies).peak_bytes for policies in passes)

    def _costs(self, observed: Observed, bits: int | None) -> Costs:
        """Returns what the passes took, at a precision; computed once, as a search asks for it a hundred times."""
        key = observed.rows, bits
        if key in self._known:
            return self._known[key]
        costs = costs_of(self.names, *observed.metered, bits)
        timed = [costs_of(self.names, *pair, bits) for pair in observed.timed]
        alike = self._alike(costs[KEEP].held[1:])
        for policy, each in costs.by_policy.items():
            seconds = np.minimum.reduce([other[policy].seconds for other in timed])
            unsuitable = [1 + call for call, block in enumerate(self.calls) if not policy.suits(self.blocks[block])]
            for values, measured in zip(each, each._replace(seconds=seconds), strict=True):
                values[:] = measured
                for group in alike:
                    values[group] = np.median(measured[group])
                values[unsuitable] = np.inf
        self._known[key] = costs
        return costs

    def _alike(self, raw: Numbers) -> list[list[int]]:
        """Returns rows of calls of blocks of one class that hold as many bytes."""
        kinds = [type(self.blocks[block].module) for block in self.calls]
        alike: list[list[int]] = []
        for call, size in enumerate(raw):
            for group in alike:
                if kinds[group[0]] is kinds[call] and abs(raw[group[0]] - size) <= ALIKE * size:
                    group.append(call)
                    break
            else:
                alike.append([call])
        return [[1 + call for call in group] for group in alike]


def planned_bits(config: DAFConfig) -> list[int | None]:
    """Returns the precisions that are planned with, the best first; None where nothing loses precision."""
    if config.precision == "exact":
        return [None]
    most = max(PLANNED_BITS if config.precision == "auto" else config.precision, config.kept_precision)
    return [bits for bits in PRECISIONS[::-1] if config.kept_precision <= bits <= most]


def most_bits(config: DAFConfig) -> int | None:
    """Returns the precision that activations have where there is room; None where nothing loses precision."""
    if config.precision == "exact":
        return None
    return PRECISIONS[-1] if config.precision == "auto" else config.precision
