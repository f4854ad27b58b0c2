"""Points of cost and loss that can be best: the lower convex hull, and the points that no other dominates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Point = tuple[float, float]
"""Cost and loss of an option, or of a set of options."""

ROUNDING = 1e-12
"""Relative difference that sums of floats in different orders may have."""


def lower_hull(points: Sequence[Point], tolerance: float = 0.0) -> list[int]:
    """Returns the indices of the lower convex hull, from the lowest cost to the least loss.

    Costs rise and losses fall along it. Points on a line between two others stay: a walk along it has short steps. Two
    slopes count as one line up to the relative tolerance.
    """
    hull: list[int] = []
    for index in sorted(range(len(points)), key=points.__getitem__):
        point = points[index]
        if hull and point[1] >= points[hull[-1]][1]:
            continue
        while len(hull) > 1 and (
            slope(points[hull[-2]], points[hull[-1]]) > slope(points[hull[-1]], point) * (1 - tolerance)
        ):
            hull.pop()
        hull.append(index)
    return hull


def slope(before: Point, after: Point) -> float:
    """Returns the change of the loss per unit of cost between two points of different cost."""
    return (after[1] - before[1]) / (after[0] - before[0])


def undominated(costs: Floats, losses: Floats) -> Indices:
    """Returns the indices of the points with less loss than all cheaper ones, by rising cost and falling loss."""
    order = np.lexsort((losses, costs))
    least_before = np.minimum.accumulate(np.concatenate(([np.inf], losses[order])))[:-1]
    return order[losses[order] < least_before * (1 - ROUNDING)]
