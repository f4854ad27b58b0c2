"""The page pool: no page with two owners, no byte lost, no more reserved than allowed, whatever the order."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from daf_core.memory.pages import pool as pool_module
from daf_core.memory.pages.free_list import FreeList
from daf_core.memory.pages.pool import SLACK, PagePool
from daf_kernels import Pages
from tests.core.books import check_free_list, check_pool

CPU = torch.device("cpu")
PAGE = 128
WINDOW = 3
LEAST = 4  # pages that are reserved at once


@pytest.fixture(autouse=True)
def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools reserve few pages, and three steps without a peak are enough to give memory back."""
    monkeypatch.setattr(pool_module, "LEAST_STEP", LEAST * PAGE)
    monkeypatch.setattr(pool_module, "WINDOW", WINDOW)


def fill(pool: PagePool, pages: Pages, byte: int) -> None:
    pool.write(pages, torch.full((pages.size, PAGE), byte, dtype=torch.uint8))


class PoolMachine(RuleBasedStateMachine):
    """Random actions against a list of regions and a ledger kept by hand."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(CPU, page_bytes=PAGE)
        self.taken: dict[int, tuple[Pages, Pages, int]] = {}
        self.regions: list[int] = []
        self.peaks: list[int] = []
        self.peak = 0
        self.count = 0

    @property
    def used(self) -> int:
        return sum(pages.size for pages, _, _ in self.taken.values())

    @rule(target=owners, count=st.integers(0, 30), limit=st.none() | st.integers(0, 80 * PAGE))
    def take(self, count: int, limit: int | None) -> int:
        missing = count - (sum(self.regions) - self.used)
        if missing > 0:
            reserved = sum(self.regions)
            step = max(reserved // 8, LEAST)
            allowed = step if limit is None else min(step, limit // PAGE - reserved)
            self.regions.append(max(missing, allowed))
        pages = self.pool.take(count, limit)
        assert pages.size == count
        assert np.array_equal(pages, np.unique(pages))
        self.count += 1
        fill(self.pool, pages, self.count % 251)
        self.taken[self.count] = pages, self.pool.addresses(pages), self.count % 251
        self.peak = max(self.peak, self.used)
        return self.count

    @rule(owner=consumes(owners))
    def give(self, owner: int) -> None:
        self.pool.give(self.taken.pop(owner)[0])

    @rule(owner=owners)
    def give_twice(self, owner: int) -> None:
        """Pages of which one is free are refused, all of them."""
        pages, free = self.taken[owner][0], np.flatnonzero(~self.pool._free._taken)
        if free.size:
            with pytest.raises(ValueError, match="given back twice"):
                self.pool.give(np.append(pages, free[0]))
        for none in (-1, sum(self.regions)):
            with pytest.raises(ValueError, match="that there are"):
                self.pool.give(np.append(pages, none))

    @rule()
    def finish_step(self) -> None:
        self.pool.finish_step()
        self.peaks, self.peak = [*self.peaks, self.peak][-WINDOW:], self.used
        if len(self.peaks) < WINDOW or sum(self.regions) <= SLACK * max(self.peaks):
            return
        used = {int(page) for pages, _, _ in self.taken.values() for page in pages}
        while self.regions and sum(self.regions[:-1]) >= max(self.peaks):
            if any(page >= sum(self.regions[:-1]) for page in used):
                break
            self.regions.pop()

    @invariant()
    def no_page_has_two_owners(self) -> None:
        numbers = [int(page) for pages, _, _ in self.taken.values() for page in pages]
        assert len(numbers) == len(set(numbers)) == self.pool.used_pages
        check_pool(self.pool)

    @invariant()
    def regions_are_as_predicted(self) -> None:
        assert self.pool.reserved_bytes == sum(self.regions) * PAGE

    @invariant()
    def contents_and_addresses_are_untouched(self) -> None:
        for pages, addresses, byte in self.taken.values():
            assert bool((self.pool.read(pages) == byte).all())
            assert np.array_equal(self.pool.addresses(pages), addresses)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TestPool(PoolMachine.TestCase):
    """Runs the machine with a short window."""

    @pytest.fixture(autouse=True)
    def _window(self, short_window: None) -> None:
        pass


@pytest.mark.parametrize(
    ("limit", "first", "second"),
    [(None, 4, 8), (100, 4, 8), (4, 4, 6), (3, 3, 6), (7, 4, 7), (2, 2, 6), (1, 2, 6), (0, 2, 6)],
)
def test_limit_bounds_what_is_reserved(limit: int | None, first: int, second: int) -> None:
    """Two pages, then four more: beyond the limit only what these pages need."""
    pool, limit = PagePool(CPU, page_bytes=PAGE), None if limit is None else limit * PAGE + PAGE - 1
    pool.take(2, limit)
    assert pool.reserved_bytes == first * PAGE
    pool.take(4, limit)
    assert pool.reserved_bytes == second * PAGE


def test_pages_in_use_keep_their_region() -> None:
    """However long ago the peak was, a region with one page in use stays, and those before it."""
    pool = PagePool(CPU, page_bytes=PAGE)
    pages = [pool.take(4) for _ in range(5)]
    reserved = pool.reserved_bytes
    fill(pool, pages[3], 7)
    for index in (0, 1, 2, 4):
        pool.give(pages[index])
    for _ in range(3 * WINDOW):
        pool.finish_step()
    assert reserved > pool.reserved_bytes >= (int(pages[3].max()) + 1) * PAGE
    assert bool((pool.read(pages[3]) == 7).all())
    pool.give(pages[3])
    for _ in range(WINDOW + 1):
        pool.finish_step()
    assert pool.reserved_bytes == 0
    assert pool.take(3).tolist() == [0, 1, 2]


def test_failed_growth_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine has no memory for a region, the pool is as before, and a later request works."""
    pool = PagePool(CPU, page_bytes=PAGE)
    kept = pool.take(3)
    fill(pool, kept, 9)
    before = pool.used_pages, pool.reserved_bytes, pool.addresses(kept).tolist()
    with monkeypatch.context() as patch:
        patch.setattr(pool_module, "FixedPages", _no_memory)
        with pytest.raises(MemoryError):
            pool.take(50)
        assert pool.take(1).tolist() == [3]
        pool.give(np.array([3]))
    check_pool(pool)
    assert (pool.used_pages, pool.reserved_bytes, pool.addresses(kept).tolist()) == before
    assert not set(pool.take(50).tolist()) & set(kept.tolist())
    assert bool((pool.read(kept) == 9).all())
    check_pool(pool)


def _no_memory(*_: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("free", [[0], [1, 5], [2, 0], [1, 1]])
def test_giving_a_free_page_changes_nothing(free: list[int]) -> None:
    """A page that is given back twice would get two owners."""
    pool = PagePool(CPU, page_bytes=PAGE)
    pool.take(6)
    pool.give(np.array([0, 5]))
    with pytest.raises(ValueError, match=r"pages \[.*\] are given back twice"):
        pool.give(np.array(free))
    assert pool.used_pages == 4
    check_pool(pool)


def test_contents_across_regions() -> None:
    """Pages of several regions, in any order, are read as they were written, at the addresses that kernels get."""
    pool = PagePool(CPU, page_bytes=PAGE)
    pages = np.concatenate([pool.take(count) for count in (3, 9, 30)])
    order = np.random.default_rng(0).permutation(pages)
    content = torch.randint(256, (order.size, PAGE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pool.write(order, content)
    assert len(pool._regions) >= 3
    assert torch.equal(pool.read(order), content)
    assert torch.equal(pool.read(order[::-1].copy()), content.flip(0))
    assert torch.equal(pool.read(order[5:9]), content[5:9])
    memory = b"".join(ctypes.string_at(address, PAGE) for address in pool.addresses(order).tolist())
    assert memory == content.numpy().tobytes()


def test_addresses_stay_valid_when_the_pool_grows_and_shrinks() -> None:
    """Kernels hold addresses while another thread takes pages or ends a step."""
    pool = PagePool(CPU, page_bytes=PAGE)
    pages = pool.take(3)
    fill(pool, pages, 5)
    before = pool.addresses(pages)
    pool.give(pool.take(500))
    for _ in range(WINDOW + 1):
        pool.finish_step()
    assert pool.reserved_bytes == 4 * PAGE
    assert np.array_equal(pool.addresses(pages), before)
    assert ctypes.string_at(int(before[2]), PAGE) == bytes([5]) * PAGE


def test_many_threads_take_and_give() -> None:
    """Each thread finds its pages as it left them while others grow and shrink the pool; in the end all are free."""
    pool = PagePool(CPU, page_bytes=PAGE)

    def work(seed: int) -> bool:
        numbers, intact = random.Random(seed), True
        for turn in range(100):
            pages = pool.take(numbers.randint(1, 9))
            fill(pool, pages, seed)
            intact = intact and bool((pool.read(pages) == seed).all())
            pool.give(pages)
            if turn % 10 == 0:
                pool.finish_step()
        return intact

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    assert pool.used_pages == 0
    check_pool(pool)


def test_used_pages_are_used_again_first() -> None:
    """What was given back last is in the cache; fresh pages, which the system has yet to map, come last."""
    free = FreeList()
    free.extend(8)
    first, second = free.take(3), free.take(2)
    assert [first.tolist(), second.tolist()] == [[0, 1, 2], [3, 4]]
    free.give(first)
    free.extend(4)
    assert free.take(3).tolist() == [0, 1, 2]
    assert free.take(2).tolist() == [5, 6]
    check_free_list(free)


def test_steps_that_are_alike_get_the_same_pages() -> None:
    """Though each gives them back in an order of its own making: a GPU then keeps the addresses that it has."""
    pool = PagePool(CPU, page_bytes=PAGE)
    kept = pool.take(2)

    def step() -> list[list[int]]:
        taken = [pool.take(count) for count in (3, 1, 4, 2)]
        for index in (1, 3, 0):
            pool.give(taken[index])
        taken.append(pool.take(5))
        for pages in taken[2::2]:
            pool.give(pages)
        pool.finish_step()
        check_pool(pool)
        return [pages.tolist() for pages in taken]

    first = step()
    assert [step() for _ in range(3)] == [first] * 3
    pool.give(kept)
    pool.finish_step()
    assert step()[0] == [0, 1, 2]


def test_sorting_leaves_fresh_pages_for_last() -> None:
    free = FreeList()
    free.extend(6)
    free.give(free.take(4)[[2, 0, 3, 1]])
    free.sort()
    check_free_list(free)
    assert free.untouched == 2
    assert [free.take(1).tolist() for _ in range(4)] == [[0], [1], [2], [3]]
    assert free.untouched == 2


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda free: free.take(4), "4 pages were asked for, and 3 of 5 are free"),
        (lambda free: free.truncate(1), "pages from 1 on are in use"),
    ],
)
def test_free_list_refuses_what_it_cannot_do(refused: Callable[[FreeList], object], message: str) -> None:
    """An error changes nothing."""
    free = FreeList()
    free.extend(5)
    free.take(2)
    with pytest.raises(ValueError, match=message):
        refused(free)
    assert (free.total, free.count) == (5, 3)
    check_free_list(free)
