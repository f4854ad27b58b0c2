"""Which precision each site gets: the least error that fits in a number of bytes, or the fewest bytes for an error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from daf_core.knapsack.choose import Knapsack, Point


@dataclass(frozen=True)
class Choices:
    """The precisions that a site may get: bytes and squared gradient error of each.

    Raises:
        ValueError: There is no choice, or bytes or errors are negative or not finite.
    """

    sizes: Sequence[float]
    errors: Sequence[float]

    def __post_init__(self) -> None:
        sizes, errors = len(self.sizes), len(self.errors)
        if not sizes == errors > 0:
            raise ValueError(f"a site has as many sizes as errors and at least one, got {sizes}, {errors}")
        if not all(0 <= value < math.inf for value in (*self.sizes, *self.errors)):
            raise ValueError(f"bytes and errors are finite and 0 or more, got {self}")


def least_error(sites: Sequence[Choices], size: float) -> list[int]:
    """Returns the index of each site's choice for the least error within `size` bytes, or else for the fewest bytes."""
    return _solved([tuple(zip(site.sizes, site.errors, strict=True)) for site in sites], size)


def fewest_bytes(sites: Sequence[Choices], error: float) -> list[int]:
    """Returns the index of each site's choice for the fewest bytes whose squared errors sum up to `error` at most.

    If no choices keep the error, those with the least error.
    """
    return _solved([tuple(zip(site.errors, site.sizes, strict=True)) for site in sites], error)


def _solved(items: Sequence[tuple[Point, ...]], budget: float) -> list[int]:
    knapsack = Knapsack(items)
    found = knapsack.solve(budget)
    return knapsack.cheapest if found is None else found.picked
