"""Leases: in which portions planes are dropped, and what is left of an activation after each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daf_core.memory.lease import Drop, Lease, plan_drops


def hull(planes: Sequence[int], importances: Sequence[Fraction], least: int) -> list[Drop]:
    """The slopes of the least concave curve above (bytes, error), by trying every line from each corner."""
    portions, first = [], least
    while first < len(planes):
        slopes = {
            stop: sum(p * i for p, i in zip(planes[first:stop], importances[first:stop], strict=True))
            / Fraction(sum(planes[first:stop]))
            for stop in range(first + 1, len(planes) + 1)
        }
        stop = min(slopes, key=lambda stop: (-slopes[stop], stop))
        portions.append((slopes[stop], first))
        first = stop
    return portions


@st.composite
def activations(draw: st.DrawFn) -> tuple[list[int], list[Fraction], int]:
    """Pages and importances of up to five planes, and how many are kept. Fractions: averages are exact."""
    planes = draw(st.lists(st.integers(1, 4), max_size=5))
    importances = draw(st.lists(st.integers(0, 6).map(Fraction), min_size=len(planes), max_size=len(planes)))
    return planes, importances, draw(st.integers(0, 6))


@given(activations())
def test_portions_are_those_of_the_convex_hull(activation: tuple[list[int], list[Fraction], int]) -> None:
    """Neighbours that are in the wrong order are merged, and only those."""
    assert plan_drops(*activation) == hull(*activation)


@given(activations())
def test_portions_cover_the_planes_in_order(activation: tuple[list[int], list[Fraction], int]) -> None:
    """From the first to the last, importances never rise; each is the average of its planes weighted by their pages."""
    planes, importances, least = activation
    drops = plan_drops(planes, importances, least)
    assert [importance for importance, _ in drops] == sorted((importance for importance, _ in drops), reverse=True)
    bounds = [left for _, left in drops] + [len(planes)]
    assert bounds[0] == min(least, len(planes))
    assert bounds == sorted(set(bounds))
    for (importance, first), stop in zip(drops, bounds[1:], strict=True):
        pages = sum(planes[first:stop])
        assert importance * pages == sum(planes[plane] * importances[plane] for plane in range(first, stop))


@pytest.mark.parametrize("least", [0, 1, 3, 4, 7])
def test_falling_importances_are_dropped_plane_by_plane(least: int) -> None:
    """Each drop gives up the last plane that is left, down to those that are kept."""
    planes = [1, 1, 2, 4]
    lease = Lease(0, 3, planes, plan_drops(planes, [8.0, 4.0, 2.0, 1.0], least))
    assert lease.least == 3 + sum(planes[:least])
    stored = [(lease.planes, lease.size)]
    while lease.drops:
        assert lease.drops[-1] == (2.0 ** (4 - lease.planes), lease.planes - 1)
        assert lease.drop() == 1
        stored.append((lease.planes, lease.size))
    assert stored == [(left, 3 + sum(planes[:left])) for left in range(4, min(least, 4) - 1, -1)]
    assert lease.least == lease.size


@pytest.mark.parametrize(
    ("importances", "expected"),
    [
        ([1.0, 2.0, 3.0], [(2.25, 0)]),
        ([3.0, 1.0, 2.0], [(3.0, 0), (5 / 3, 1)]),
        ([3.0, 1.0, 0.5], [(3.0, 0), (1.0, 1), (0.5, 2)]),
        ([2.0, 2.0, 2.0], [(2.0, 0), (2.0, 1), (2.0, 2)]),
        ([1.0, math.inf, 2.0], [(math.inf, 0), (2.0, 2)]),
        ([math.inf, math.inf, math.inf], [(math.inf, 0), (math.inf, 1), (math.inf, 2)]),
        ([0.0, 0.0, math.inf], [(math.inf, 0)]),
    ],
)
def test_portions_worked_out_by_hand(importances: list[float], expected: list[Drop]) -> None:
    """Equals stay apart; what stands before a plane that must not go does not go either."""
    assert plan_drops([1, 1, 2], importances, 0) == [(pytest.approx(importance), left) for importance, left in expected]


def test_merged_planes_go_together() -> None:
    """One drop takes two planes where the first is worth less than the second."""
    lease = Lease(0, 1, [2, 3], plan_drops([2, 3], [1.0, 2.0], 0))
    assert (lease.size, lease.least) == (6, 1)
    assert lease.drop() == 2
    assert (lease.planes, lease.size, lease.least, lease.drops) == (0, 1, 1, [])


@pytest.mark.parametrize(
    ("planes", "importances"),
    [
        ([1, 1], [2.0, math.nan]),
        ([1, 1], [math.nan, 1.0]),
        ([1, 1], [1.0, -0.5]),
        ([1], [-math.inf]),
        ([1, 1], [1.0]),
        ([1], [2.0, 1.0]),
        ([], [1.0]),
    ],
)
@pytest.mark.parametrize("least", [0, 5])
def test_bad_importances_are_refused(planes: list[int], importances: list[float], least: int) -> None:
    """A NaN would leave the order of all leases undefined; it is refused even for planes that are never dropped."""
    with pytest.raises(ValueError, match="need as many importances of 0 or more"):
        plan_drops(planes, importances, least)


@pytest.mark.parametrize("planes", [[0], [1, 0], [0, 1], [2, -1]])
@pytest.mark.parametrize("least", [0, 5])
def test_plane_without_a_page_is_refused(planes: list[int], least: int) -> None:
    """To drop it would free nothing; it is refused even where it is never dropped."""
    with pytest.raises(ValueError, match=r"a plane has at least one page, got \["):
        plan_drops(planes, [1.0] * len(planes), least)


@pytest.mark.parametrize("fixed", [0, -1])
def test_lease_without_a_page_is_refused(fixed: int) -> None:
    """A lease without pages would count as one that lies in the spill file."""
    with pytest.raises(ValueError, match=f"at least one page that it cannot do without, got {fixed}"):
        Lease(0, fixed, [1], [])
