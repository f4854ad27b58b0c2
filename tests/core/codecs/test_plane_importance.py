"""What a plane is worth: the formulas, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from daf_core.codecs.plane_importance import LEVELS, plane_importances, rounding_errors


@pytest.mark.parametrize(
    ("relative_range", "elements", "expected"),
    [
        (256.0, 1, [256.0, 64.0, 16.0, 1.0, 0.00390625]),  # 256 / 4**bits at 0, 1, 2, 4 and 8 bits
        (12.0, 1000, [12000.0, 3000.0, 750.0, 46.875, 0.18310546875]),
        (0.0, 4096, [0.0] * 5),
        (5.0, 0, [0.0] * 5),
    ],
)
def test_rounding_error_at_each_level(relative_range: float, elements: int, expected: list[float]) -> None:
    """Steps of range / 2**bits, squared, for each element; the first level has no bits at all."""
    assert LEVELS == (0, 1, 2, 4, 8)
    assert rounding_errors(relative_range, elements) == expected


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
    errors = rounding_errors(relative_range, elements)
    assert plane_importances(errors, plane_bytes) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("errors", "plane_bytes", "expected"),
    [
        ([9.0, 5.0, 2.0, 1.0, 0.5], [1, 2, 4, 8], [4.0, 1.5, 0.25, 0.0625]),
        ([9.0, 5.0, 2.0, 1.0, 0.5], [2, 2], [2.0, 1.5]),  # planes that are not there are worth nothing
        ([1.0, 3.0, 0.5, 0.5, 0.0], [1, 1, 1, 1], [0.0, 2.5, 0.0, 0.5]),  # more bits, more error: free to drop
        ([0.0] * 5, [1, 1, 1, 1], [0.0] * 4),
    ],
)
def test_measured_errors_take_the_place_of_rounding(
    errors: list[float], plane_bytes: list[int], expected: list[float]
) -> None:
    """Whatever the errors are, a plane is worth what its loss adds, and never less than nothing."""
    assert plane_importances(errors, plane_bytes) == expected


@pytest.mark.parametrize("relative_range", [math.inf, -math.inf, math.nan])
def test_unknown_range_makes_every_plane_priceless(relative_range: float) -> None:
    """Where the range says nothing, other activations lose their planes first; no importance is NaN."""
    assert plane_importances(rounding_errors(relative_range, 100), [8, 8, 16]) == [math.inf] * 3


@pytest.mark.parametrize("unknown", [math.inf, math.nan])
@pytest.mark.parametrize("level", range(5))
def test_one_unknown_error_makes_every_plane_priceless(unknown: float, level: int) -> None:
    """Also where the planes that are there stop below it: none is dropped on half a knowledge."""
    errors = [16.0, 4.0, 1.0, 0.25, 0.0]
    errors[level] = unknown
    assert plane_importances(errors, [1, 1, 1]) == [math.inf] * 3


@pytest.mark.parametrize("relative_range", [1e-30, 12.0, 1e30])
def test_importance_falls_with_the_plane_number(relative_range: float) -> None:
    """Planes of equal size are dropped from the last to the first."""
    importances = plane_importances(rounding_errors(relative_range, 4096), [512] * 4)
    assert importances == sorted(set(importances), reverse=True)
    assert min(importances) > 0
