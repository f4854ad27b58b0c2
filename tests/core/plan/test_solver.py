"""The treatment of each block: the least time in the budget, exactly."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from daf_core.knapsack import choose as knapsack
from daf_core.plan.search.solver import Choice, choose, least

Blocks = list[list[Choice]]


def needs(picked: Sequence[Choice]) -> int:
    """Returns the bytes that choices take together."""
    return sum(c.held_bytes for c in picked) + max((c.transient_bytes for c in picked), default=0)


def seconds(picked: Sequence[Choice]) -> float:
    return sum(c.seconds for c in picked)


def picked(blocks: Blocks, chosen: Sequence[int]) -> list[Choice]:
    return [block[index] for block, index in zip(blocks, chosen, strict=True)]


def brute_force(blocks: Blocks, budget: int) -> tuple[float, int] | None:
    """Returns the least time and the fewest bytes for it, of all that fits."""
    fitting = [found for found in itertools.product(*blocks) if needs(found) <= budget]
    return min(((seconds(found), needs(found)) for found in fitting), default=None)


def random_blocks(rng: random.Random) -> Blocks:
    """Returns up to 6 blocks, some alike; small numbers, whose sums are exact, make many ties."""
    most = rng.choice([4, 30, 1000])

    def block() -> list[Choice]:
        numbers = [(rng.randrange(most) / 8, rng.randrange(most), rng.randrange(most)) for _ in range(4)]
        return [Choice(*found) for found in numbers[: rng.randint(1, 4)]]

    kinds = [block() for _ in range(3)]
    return [rng.choice([rng.choice(kinds), block()]) for _ in range(rng.randint(0, 6))]


@pytest.mark.parametrize("seed", range(300))
def test_nothing_that_fits_is_better(seed: int) -> None:
    rng = random.Random(seed)
    blocks = random_blocks(rng)
    budget = rng.randrange(int(1.5 * least(blocks)) + 2)
    chosen, expected = choose(blocks, budget), brute_force(blocks, budget)
    assert (chosen is None) == (expected is None)
    if chosen is not None:
        found = picked(blocks, chosen)
        assert (seconds(found), needs(found)) == expected


@pytest.mark.parametrize("seed", range(50))
def test_least_budget_is_the_smallest_that_has_a_solution(seed: int) -> None:
    blocks = random_blocks(random.Random(seed))
    budget = least(blocks)
    assert choose(blocks, budget) is not None
    assert choose(blocks, budget - 1) is None


def test_more_room_never_takes_longer() -> None:
    rng = random.Random(1)
    blocks = [[Choice(rng.random(), rng.randrange(10**8), rng.randrange(10**7)) for _ in range(4)] for _ in range(24)]
    lowest = least(blocks)
    found = [choose(blocks, lowest + extra * 10**7) for extra in range(0, 100, 5)]
    times = [seconds(picked(blocks, chosen)) for chosen in found if chosen is not None]
    assert len(times) == len(found)
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_what_holds_less_comes_first_among_blocks_that_are_alike() -> None:
    keep, recompute, other = Choice(0, 100), Choice(1, 10), Choice(0, 50)
    blocks = [[keep, recompute], [other], [keep, recompute], [keep, recompute], [keep, recompute]]
    assert choose(blocks, 50 + 2 * 100 + 2 * 10) == [1, 0, 1, 0, 0]


def test_a_transient_counts_once_and_only_the_largest() -> None:
    """Two that are recomputed are never there at the same time; a small transient may leave room to keep a block."""
    keep, recompute = Choice(0, 100, 0), Choice(2, 10, 60)
    assert choose([[keep, recompute]] * 3, 90) == [1, 1, 1]
    assert choose([[keep, recompute]] * 3, 89) is None
    slow = Choice(3, 10, 0)
    assert choose([[keep, recompute, slow]] * 2, 110) == [2, 0]  # keep one; one recomputed as usual would take 170


def test_no_block_needs_nothing() -> None:
    assert choose([], 0) == []
    assert choose([], -1) is None
    assert least([]) == 0


def test_a_block_without_a_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="needs one choice"):
        choose([[Choice(1, 1)], []], 10)


@pytest.mark.parametrize("numbers", [(-1, 0, 0), (float("nan"), 0, 0), (float("inf"), 0, 0), (0, -1, 0), (0, 0, -1)])
def test_a_treatment_has_finite_time_and_bytes(numbers: tuple[float, int, int]) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        Choice(*numbers)


def test_many_states_are_thinned_and_lose_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times in proportion to bytes: nearly every sum is a state of its own, and none can be left out for certain."""
    rng = random.Random(2)
    sizes = [rng.randrange(10**6) for _ in range(16)]
    blocks = [[Choice(0, size), Choice(size / 10**6, 0)] for size in sizes]
    budget = sum(sizes) // 2
    exact, few = choose(blocks, budget), 200
    monkeypatch.setattr(knapsack, "MAX_STATES", few)
    thinned = choose(blocks, budget)
    assert exact is not None
    assert thinned is not None
    assert thinned != exact
    found = picked(blocks, thinned)
    assert needs(found) <= budget
    assert seconds(found) - seconds(picked(blocks, exact)) <= len(blocks) / few * sum(sizes) / 10**6
