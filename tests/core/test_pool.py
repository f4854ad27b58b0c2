"""The page pool: no page leased twice, no byte lost, whatever the order of leases and releases."""

from __future__ import annotations

import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from daf_core import ActivationBudgetError
from daf_core.codecs.base import PagedActivation
from daf_core.memory import pool as pool_module
from daf_core.memory.pool import PagePool
from daf_kernels import Pages

CPU = torch.device("cpu")
PAGE = 128
BUDGET = 40 * PAGE


@pytest.fixture(autouse=True)
def small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of four pages at first, so that a few leases need several."""
    monkeypatch.setattr(pool_module, "FIRST_REGION", 4 * PAGE)
    monkeypatch.setattr(pool_module, "LARGEST_REGION", 16 * PAGE)


class PoolMachine(RuleBasedStateMachine):
    """Random actions against a ledger kept by hand."""

    leases = Bundle("leases")
    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(CPU, BUDGET, PAGE)
        self.leased: dict[int, tuple[Pages, int]] = {}
        self.held = 0
        self.peak = 0
        self.count = 0

    @property
    def expected(self) -> int:
        return self.held + PAGE * sum(pages.size for pages, _ in self.leased.values())

    @rule(target=leases, count=st.integers(1, 15))
    def lease(self, count: int) -> Any:
        self.count += 1
        if self.expected + count * PAGE > BUDGET:
            with pytest.raises(ActivationBudgetError) as raised:
                self.pool.lease(count)
            assert (raised.value.needed, raised.value.allowed) == (self.expected + count * PAGE, BUDGET)
            return None
        pages, fill = self.pool.lease(count), self.count % 251
        self.pool.write(pages, torch.full((count, PAGE), fill, dtype=torch.uint8))
        self.leased[self.count] = pages, fill
        self.peak = max(self.peak, self.expected)
        return self.count

    @rule(number=consumes(leases))
    def release(self, number: int | None) -> None:
        if number is not None:
            self.pool.release(self.leased.pop(number)[0])

    @rule(target=holds, size=st.integers(0, 12 * PAGE))
    def hold(self, size: int) -> int:
        if self.expected + size > BUDGET:
            with pytest.raises(ActivationBudgetError):
                self.pool.hold(size)
            return 0
        self.pool.hold(size)
        self.held += size
        self.peak = max(self.peak, self.expected)
        return size

    @rule(size=consumes(holds))
    def let_go(self, size: int) -> None:
        self.pool.let_go(size)
        self.held -= size

    @rule()
    def take_peak(self) -> None:
        assert self.pool.take_peak() == self.peak
        self.peak = self.expected

    @invariant()
    def no_page_is_leased_twice(self) -> None:
        numbers = [int(page) for pages, _ in self.leased.values() for page in pages]
        assert len(numbers) == len(set(numbers)) == self.pool.leased_pages

    @invariant()
    def ledger_agrees(self) -> None:
        assert self.pool.settle() == self.expected <= BUDGET
        assert self.pool.reserved_bytes >= self.expected - self.held
        free = self.pool._free[: self.pool._free_count].tolist()
        numbers = [int(page) for pages, _ in self.leased.values() for page in pages]
        assert sorted(free + numbers) == list(range(self.pool.reserved_bytes // PAGE))

    @invariant()
    def contents_are_untouched(self) -> None:
        for pages, fill in self.leased.values():
            assert bool((self.pool.read(pages) == fill).all())


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TestPool(PoolMachine.TestCase):
    """Runs the machine with small regions."""

    @pytest.fixture(autouse=True)
    def _regions(self, small_regions: None) -> None:
        pass


def test_budget_error_says_what_was_needed_and_changes_nothing() -> None:
    """A lease that does not fit takes no page, counts no byte and reserves no region."""
    pool = PagePool(CPU, 10 * PAGE, PAGE)
    pages = pool.lease(6)
    before = pool.settle(), pool.leased_pages, pool.peak_bytes, pool.reserved_bytes
    for refused in (lambda: pool.lease(5), lambda: pool.hold(4 * PAGE + 1)):
        with pytest.raises(ActivationBudgetError, match="Raise memory_budget, lower precision") as raised:
            refused()
        assert raised.value.allowed == 10 * PAGE
        assert raised.value.needed > 10 * PAGE
        assert (pool.settle(), pool.leased_pages, pool.peak_bytes, pool.reserved_bytes) == before
    pool.hold(4 * PAGE)
    pool.release(pages)
    assert pool.lease(6).size == 6


def test_released_pages_count_for_the_next_lease() -> None:
    """A budget of four pages serves any number of leases of four, one after the other."""
    pool = PagePool(CPU, 4 * PAGE, PAGE)
    for _ in range(10):
        pool.release(pool.lease(4))
    assert pool.settle() == 0
    assert pool.reserved_bytes == 4 * PAGE


def test_growth_doubles_up_to_the_largest_region() -> None:
    """Regions grow with what is leased; a single large lease gets a region of its own size."""
    pool = PagePool(CPU, None, PAGE)
    sizes = []
    for _ in range(40):
        pool.lease(1)
        sizes.append(pool.reserved_bytes // PAGE)
    assert sorted(set(sizes)) == [4, 8, 16, 32, 48]
    pool.lease(1000)
    assert pool.reserved_bytes // PAGE == 1040
    assert pool.leased_pages == 1040


def test_failed_growth_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine has no memory for a region, the ledger is as before, and a later lease works."""
    pool = PagePool(CPU, None, PAGE)
    kept = pool.lease(3)
    with monkeypatch.context() as patch:
        patch.setattr(pool_module, "FixedPages", _no_memory)
        with pytest.raises(MemoryError):
            pool.lease(50)
    assert (pool.settle(), pool.leased_pages, pool.peak_bytes) == (3 * PAGE, 3, 3 * PAGE)
    pages = pool.lease(50)
    assert not set(pages.tolist()) & set(kept.tolist())


def _no_memory(*_: object) -> None:
    raise MemoryError


def test_contents_across_regions() -> None:
    """Pages of several regions, in any order, are read as they were written, wherever they lie."""
    pool = PagePool(CPU, None, PAGE)
    pages = np.concatenate([pool.lease(count) for count in (3, 9, 30)])
    order = np.random.default_rng(0).permutation(pages)
    content = torch.randint(256, (order.size, PAGE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pool.write(order, content)
    assert len(pool._regions) >= 3
    assert torch.equal(pool.read(order), content)
    assert torch.equal(pool.read(order[::-1].copy()), content.flip(0))
    assert np.unique(pool.addresses(pages)).size == pages.size


def test_addresses_stay_valid_when_the_pool_grows() -> None:
    """Kernels hold addresses while another thread leases."""
    pool = PagePool(CPU, None, PAGE)
    pages = pool.lease(3)
    before = pool.addresses(pages)
    pool.lease(500)
    assert np.array_equal(pool.addresses(pages), before)


def test_leases_and_releases_from_many_threads() -> None:
    """Each thread finds its pages as it left them, and in the end nothing is leased."""
    pool = PagePool(CPU, None, PAGE)

    def work(seed: int) -> bool:
        numbers, intact = random.Random(seed), True
        for _ in range(150):
            pages = pool.lease(numbers.randint(1, 9))
            pool.write(pages, torch.full((pages.size, PAGE), seed, dtype=torch.uint8))
            intact = intact and bool((pool.read(pages) == seed).all())
            pool.release(pages)
        return intact

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(6)))
    assert (pool.leased_pages, pool.settle()) == (0, 0)


class _Cycle:
    """Garbage that only the collector finds, and that owns pages."""

    def __init__(self, pool: PagePool) -> None:
        self.me = self
        self.activation = _Pages(pool, pool.lease(2))


class _Pages(PagedActivation):
    codec = "test"

    def decode_into(self, out: torch.Tensor) -> None:
        raise NotImplementedError


def test_release_inside_a_garbage_collection_takes_no_lock() -> None:
    """The collector may run while the pool's lock is held: giving pages back must neither wait nor be lost."""
    pool = PagePool(CPU, None, PAGE)
    _Cycle(pool)
    with pool._lock:
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    assert (pool.leased_pages, pool.settle()) == (0, 0)


def test_release_from_another_thread() -> None:
    """Autograd frees nodes wherever they die."""
    pool = PagePool(CPU, 4 * PAGE, PAGE)
    pages = pool.lease(4)
    thread = threading.Thread(target=pool.release, args=(pages,))
    thread.start()
    thread.join()
    assert set(pool.lease(4).tolist()) == set(pages.tolist())
