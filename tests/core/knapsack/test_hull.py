"""Convex hulls and dominance against their definitions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from daf_core.knapsack.choose import lower_hull, slope, undominated

POINTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=12).map(tuple)


@given(POINTS)
def test_hull_is_what_some_price_of_a_cost_makes_best(points: tuple[tuple[int, int], ...]) -> None:
    hull = [points[index] for index in lower_hull(points)]
    assert hull[0] == min(points)
    assert hull[-1][1] == min(loss for _, loss in points)
    slopes = [slope(before, after) for before, after in pairwise(hull)]
    assert slopes == sorted(slopes)
    assert all(each < 0 for each in slopes)
    costs, losses = zip(*hull, strict=True)
    assert all(loss >= np.interp(cost, costs, losses) - 1e-9 for cost, loss in points)


def test_points_on_a_line_stay() -> None:
    line = tuple((cost, 8.0 - 2 * cost) for cost in range(5))
    assert lower_hull(line) == [0, 1, 2, 3, 4]
    rounded = ((0.0, 8.0), (1.0, 6.0 + 1e-12), (2.0, 4.0))
    assert lower_hull(rounded) == [0, 2]
    assert lower_hull(rounded, 1e-9) == [0, 1, 2]


@given(POINTS)
def test_undominated_points(points: tuple[tuple[int, int], ...]) -> None:
    found = [points[index] for index in undominated(*np.array(points, np.float64).T)]
    expected = {
        point for point in points if not any(p != point and p[0] <= point[0] and p[1] <= point[1] for p in points)
    }
    assert found == sorted(expected)
