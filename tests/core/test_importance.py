"""What a plane is worth: the formula, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from daf_core.precision.importance import plane_importances


@pytest.mark.parametrize(
    ("relative_range", "elements", "plane_bytes", "expected"),
    [
        (256.0, 1, [1, 1, 1, 1], [192.0, 48.0, 15.0, 0.99609375]),  # 256 - 64, 64 - 16, 16 - 1, 1 - 1/256
        (12.0, 1000, [125, 125], [72.0, 18.0]),  # 12 * 3/4 * 1000 / 125, and a quarter of it
        (16.0, 64, [8, 8, 16, 32], [96.0, 24.0, 3.75, 0.12451171875]),  # the widths that planes have
        (12.0, 1000, [250, 125], [36.0, 18.0]),  # twice the bytes, half the worth
        (0.0, 10, [4, 4], [0.0, 0.0]),
        (5.0, 10, [], []),
    ],
)
def test_growth_of_the_squared_error_per_byte(
    relative_range: float, elements: int, plane_bytes: list[int], expected: list[float]
) -> None:
    """A plane between b and B bits is worth range**2 * (4**-b - 4**-B) per element, over its bytes."""
    assert plane_importances(relative_range, elements, plane_bytes) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("relative_range", [math.inf, -math.inf, math.nan])
def test_unknown_range_makes_every_plane_priceless(relative_range: float) -> None:
    """Where the range says nothing, other activations lose their planes first; no importance is NaN."""
    assert plane_importances(relative_range, 100, [8, 8, 16]) == [math.inf] * 3


@pytest.mark.parametrize("relative_range", [1e-30, 12.0, 1e30])
def test_importance_falls_with_the_plane_number(relative_range: float) -> None:
    """Planes of equal size are dropped from the last to the first."""
    importances = plane_importances(relative_range, 4096, [512] * 4)
    assert importances == sorted(set(importances), reverse=True)
    assert min(importances) > 0
