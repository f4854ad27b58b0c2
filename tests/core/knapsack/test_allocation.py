"""Which precision each site gets: against all combinations where these are few, against a lower bound where many."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from daf_core.knapsack.choose import Knapsack, Point

Totals = list[tuple[float, float]]
"""Bytes and error of combinations."""

Site = tuple[Point, ...]
"""Bytes and error of each choice of a site."""

Case = Callable[[np.random.Generator, int], Site]


def site(sizes: Sequence[float], errors: Sequence[float]) -> Site:
    return tuple(zip(sizes, errors, strict=True))


def least_error(sites: Sequence[Site], room: float) -> list[int]:
    return Knapsack(sites).picked(room)


def fewest_bytes(sites: Sequence[Site], error: float) -> list[int]:
    return Knapsack([tuple((error, size) for size, error in each) for each in sites]).picked(error)


def _anything(random: np.random.Generator, choices: int) -> Site:
    """Bytes and errors that have nothing to do with each other; equal ones and zeros among them."""
    return _exact_sums(random.integers(0, 40, choices), random.integers(0, 40, choices))


def _falling(random: np.random.Generator, choices: int) -> Site:
    """More bytes, less error, as a rule of no shape."""
    sizes, errors = np.cumsum(random.integers(0, 100, choices)), np.cumsum(random.integers(0, 100, choices))
    return _exact_sums(sizes, errors[::-1])


def _quartered(random: np.random.Generator, choices: int) -> Site:
    """A quarter of the error for each bit, from sites of very different weight."""
    bits = np.arange(choices)
    return _exact_sums((1 + bits) * random.integers(1, 100), random.integers(1, 1000) * 4.0 ** (10 - bits))


def _exact_sums(sizes: np.ndarray, errors: np.ndarray) -> Site:
    """Multiples of 1/1024: no sum is rounded, so limits can be hit exactly."""
    return site(sizes.tolist(), (np.round(errors * 1024.0) / 1024).tolist())


def _case(seed: int) -> list[Site]:
    random = np.random.default_rng(seed)
    make: Case = (_anything, _falling, _quartered)[seed % 3]
    return [make(random, int(random.integers(1, 6))) for _ in range(random.integers(1, 6))]


def _totals(sites: Sequence[Site]) -> Totals:
    """Returns bytes and error of every combination."""
    return [tuple(map(math.fsum, zip(*chosen, strict=True))) for chosen in itertools.product(*sites)]


def _total(sites: Sequence[Site], chosen: Sequence[int]) -> tuple[float, float]:
    """Returns bytes and error of one combination."""
    assert len(chosen) == len(sites)
    return (
        math.fsum(each[choice][0] for each, choice in zip(sites, chosen, strict=True)),
        math.fsum(each[choice][1] for each, choice in zip(sites, chosen, strict=True)),
    )


def _limits(values: list[float], random: np.random.Generator) -> list[float]:
    """Returns limits that can be hit exactly, some just below, and some that are below or above everything."""
    hit = random.choice(values, 6).tolist()
    return [*hit, *(np.nextafter(value, -1.0) for value in hit), min(values) - 1, max(values) + 1, math.inf]


@pytest.mark.parametrize("seed", range(200))
def test_least_error_against_all_combinations(seed: int) -> None:
    """None that fits has less error, and none with that error has fewer bytes."""
    sites = _case(seed)
    totals = _totals(sites)
    for room in _limits([size for size, _ in totals], np.random.default_rng(seed)):
        fitting = [total for total in totals if total[0] <= room] or [min(totals)]
        best = min(fitting, key=lambda total: (total[1], total[0]))
        assert _total(sites, least_error(sites, room)) == best


@pytest.mark.parametrize("seed", range(200))
def test_fewest_bytes_against_all_combinations(seed: int) -> None:
    """None whose error is allowed has fewer bytes, and none with these bytes has less error."""
    sites = _case(seed)
    totals = _totals(sites)
    least = min(totals, key=lambda total: (total[1], total[0]))
    for bound in _limits([error for _, error in totals], np.random.default_rng(seed)):
        fitting = [total for total in totals if total[1] <= bound] or [least]
        assert _total(sites, fewest_bytes(sites, bound)) == min(fitting)


TWO = [site([0, 10, 30], [9, 4, 1]), site([5, 8, 20], [7, 5, 0])]


@pytest.mark.parametrize("room", [-1, 0, 4.99])
def test_too_little_room_for_anything(room: float) -> None:
    """The smallest choices are the nearest to it."""
    assert least_error(TWO, room) == [0, 0]


@pytest.mark.parametrize("room", [50, 51, 1e300, math.inf])
def test_room_for_everything(room: float) -> None:
    """The least error there is."""
    assert least_error(TWO, room) == [2, 2]


@pytest.mark.parametrize("error", [-1, 0, 0.99])
def test_error_that_cannot_be_kept(error: float) -> None:
    """The choices that come nearest to it."""
    assert fewest_bytes(TWO, error) == [2, 2]


@pytest.mark.parametrize("error", [16, 1e300, math.inf])
def test_error_that_everything_keeps(error: float) -> None:
    """The fewest bytes there are."""
    assert fewest_bytes(TWO, error) == [0, 0]


@pytest.mark.parametrize(
    ("sizes", "errors", "by_room", "by_error"),
    [
        ([30, 10, 20], [2, 2, 2], [1, 1, 1], [1, 1, 1]),  # all alike: the smallest
        ([30, 10, 20], [0, 0, 0], [1, 1, 1], [1, 1, 1]),  # no error at all, as of a site that backward does not read
        ([10, 10, 10], [3, 1, 2], [1, 1, 1], [1, 1, 1]),  # the same bytes: the least error
        ([10, 20, 30], [5, 0, 0], [0, 1, 1], [0, 0, 1]),  # bytes beyond an error of 0 buy nothing
        ([0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]),
    ],
)
def test_equal_and_zero_errors(
    sizes: list[float], errors: list[float], by_room: list[int], by_error: list[int]
) -> None:
    """Where choices are equally good in one, the other decides."""
    sites = [site(sizes, errors)]
    assert [least_error(sites, room)[0] for room in (10, 20, 40)] == by_room
    assert [fewest_bytes(sites, error)[0] for error in (9, 5, 4)] == by_error


def test_sites_without_error_leave_the_room_to_others() -> None:
    """They take their fewest bytes."""
    sites = [site([4, 8], [0, 0]), site([4, 8], [5, 1]), site([4, 8], [0, 0])]
    assert least_error(sites, 16) == [0, 1, 0]


@pytest.mark.parametrize(("room", "choice"), [(0, 0), (9, 0), (10, 1), (19, 1), (20, 2), (39, 2), (40, 3), (99, 3)])
def test_one_site(room: float, choice: int) -> None:
    """The most bits that fit, and the fewest that keep the error."""
    errors = [64.0, 16.0, 4.0, 1.0]
    sites = [site([5, 10, 20, 40], errors)]
    assert least_error(sites, room) == fewest_bytes(sites, errors[choice]) == [choice]


def test_no_site() -> None:
    """Nothing to choose."""
    assert least_error([], 100) == fewest_bytes([], 0.1) == []


def test_choice_above_the_hull_is_taken_where_it_fits() -> None:
    """Its error per byte is worse than that of its neighbours together, which do not fit: marginal gains miss it."""
    sites = [site([0, 5, 10], [10, 9, 0])]
    assert [least_error(sites, room)[0] for room in (4, 5, 9, 10)] == [0, 1, 1, 2]
    assert [fewest_bytes(sites, error)[0] for error in (10, 9.5, 9, 8)] == [0, 1, 1, 2]


def test_more_bits_with_more_error_are_never_chosen() -> None:
    """Measured errors need not fall with the bits."""
    sites = [site([1, 2, 3], [4, 6, 2]), site([1, 2, 3], [4, 4, 2])]
    chosen = {tuple(least_error(sites, room)) for room in range(10)}
    assert chosen == {(0, 0), (2, 0), (2, 2)} or chosen == {(0, 0), (0, 2), (2, 2)}


SITES = 300
BITS = np.array([0, 1, 2, 4, 8])


def _network(seed: int, exact: bool) -> list[Site]:
    """Sites of a large network: bytes that rise with the bits, importances over many orders, errors with bends.

    A last choice without error, as it is there for an error that is to be kept, where `exact`.
    """
    random = np.random.default_rng(seed)
    sites: list[Site] = []
    for _ in range(SITES):
        elements, importance = 4096 * random.integers(1, 2000), random.lognormal(0, 2.5)
        errors = importance * 3.0**-BITS * random.lognormal(0, 0.5, BITS.size)
        sizes = elements * (BITS + 0.5) / 8
        sites.append(site([*sizes, 4.0 * elements], [*errors, 0.0]) if exact else site(sizes, errors))
    return sites


Steps = list[tuple[float, float]]
"""Bytes added and error taken away, the best error for a byte first."""


def _hull_steps(choices: Site) -> Steps:
    """Returns the steps along the lower convex hull of a site's choices, from the smallest one on."""
    points = sorted(choices)
    hull: Totals = []
    for size, error in points:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], (size, error)):
            hull.pop()
        if not hull or error < hull[-1][1]:
            hull.append((size, error))
    return [(after[0] - before[0], before[1] - after[1]) for before, after in itertools.pairwise(hull)]


def _slope(start: tuple[float, float], end: tuple[float, float]) -> float:
    return (end[1] - start[1]) / (end[0] - start[0])


def _relaxed(sites: Sequence[Site]) -> tuple[np.ndarray, np.ndarray]:
    """Returns bytes and error along the optimum where fractions of choices may be taken; no combination is below."""
    steps = sorted((step for each in sites for step in _hull_steps(each)), key=lambda step: step[0] / step[1])
    least = [min(each) for each in sites]
    size, error = (math.fsum(values) for values in zip(*least, strict=True))
    added, taken = (np.cumsum([0.0, *values]) for values in zip(*steps, strict=True))
    return size + added, error - taken


def test_relaxed_bound_by_hand() -> None:
    """The first site's hull leaves out its bend; half a step is taken where half fits."""
    sizes, errors = _relaxed([site([0, 5, 10], [10, 9, 0]), site([2, 6], [4, 2])])
    assert (sizes.tolist(), errors.tolist()) == ([2.0, 12.0, 16.0], [14.0, 4.0, 2.0])
    assert np.interp(7, sizes, errors) == 9.0


@pytest.mark.parametrize("seed", range(3))
def test_least_error_of_many_sites_is_near_the_bound(seed: int) -> None:
    """At most 1% above what no choice can beat, whatever the room, and never more bytes than it."""
    sites = _network(seed, exact=False)
    sizes, errors = _relaxed(sites)
    for share in (0.02, 0.1, 0.3, 0.6, 0.9):
        room = sizes[0] + share * (sizes[-1] - sizes[0])
        size, error = _total(sites, least_error(sites, room))
        bound = float(np.interp(room, sizes, errors))
        assert size <= room
        assert bound <= error <= 1.01 * bound


@pytest.mark.parametrize("seed", range(3))
def test_fewest_bytes_of_many_sites_are_near_the_bound(seed: int) -> None:
    """At most 1% above what no choice can beat, whatever the error, and never more error than it."""
    sites = _network(seed, exact=True)
    sizes, errors = _relaxed(sites)
    for share in (0.5, 0.1, 1e-2, 1e-3, 1e-4):
        allowed = share * errors[0]
        size, error = _total(sites, fewest_bytes(sites, allowed))
        bound = float(np.interp(-allowed, -errors, sizes))
        assert error <= allowed * (1 + 1e-12)
        assert bound <= size <= 1.01 * bound


def test_both_ends_of_many_sites() -> None:
    """Nothing fits: the fewest bytes, or the least error."""
    sites = _network(0, exact=True)
    assert least_error(sites, 0) == [0] * SITES
    assert fewest_bytes(sites, 0) == [BITS.size] * SITES


@pytest.mark.parametrize("seed", range(30))
def test_thinning_breaks_no_limit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for few combinations an answer may be worse, but fits where anything does."""
    monkeypatch.setattr("daf_core.knapsack.choose.MAX_STATES", 2)
    sites = _case(seed)
    totals = _totals(sites)
    smallest, least = min(totals), min(totals, key=lambda total: (total[1], total[0]))
    for size, error in totals:
        assert _total(sites, least_error(sites, size))[0] <= size
        assert _total(sites, fewest_bytes(sites, error))[1] <= error
    assert _total(sites, least_error(sites, -1)) == smallest
    assert _total(sites, fewest_bytes(sites, -1)) == least
