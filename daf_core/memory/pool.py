"""The page pool: fixed-size pages of regions that are reserved in growing steps, and a ledger of what is held."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import torch
from torch import Tensor

from daf_core.errors import ActivationBudgetError
from daf_kernels import FixedPages, Pages

PAGE_BYTES = 4096
"""An activation leaves at most one page part-filled for its header and each plane: 4 kB waste under 1% of the bytes of
RoBERTa-base at batch 8 x 128, 16 kB waste 5%, and the kernels are not faster with larger ones."""

FIRST_REGION = 1 << 24
"""Bytes of the first region; each later one is as large as all before it together, up to `LARGEST_REGION`."""

LARGEST_REGION = 1 << 28


class PagePool:
    """Leases pages for encoded activations on one device and counts all bytes that activations hold.

    Regions are only addresses until their pages are written, so that growing ahead of use costs no memory on a CPU.
    Leasing and releasing are thread-safe; releasing may happen inside a garbage collection and takes no lock.

    Args:
        device: Where the pages lie.
        budget: Bytes that may be held at once, pages and outside tensors together; None for no limit.
        page_bytes: Bytes in a page, a power of two.
    """

    def __init__(self, device: torch.device, budget: int | None = None, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self.budget = budget
        self.held_bytes = 0
        self.peak_bytes = 0
        self._device = device
        self._regions: list[FixedPages] = []
        self._addresses = np.empty(0, np.int64)
        self._region_of = np.empty(0, np.int64)
        self._first_page: list[int] = []
        self._free = np.empty(0, np.int64)
        self._free_count = 0
        self._returned: deque[Pages | int] = deque()
        self._lock = threading.Lock()

    def lease(self, count: int) -> Pages:
        """Takes `count` pages off the pool.

        Raises:
            ActivationBudgetError: The pages do not fit in the budget.
        """
        with self._lock:
            self._collect()
            self._check(count * self.page_bytes)
            while self._free_count < count:
                self._grow(count - self._free_count)
            self._count(count * self.page_bytes)
            self._free_count -= count
            return self._free[self._free_count : self._free_count + count].copy()

    def release(self, pages: Pages) -> None:
        """Gives pages back."""
        self._returned.append(pages)

    def hold(self, size: int) -> None:
        """Counts `size` bytes of an activation that lies outside the pool.

        Raises:
            ActivationBudgetError: They do not fit in the budget.
        """
        with self._lock:
            self._collect()
            self._check(size)
            self._count(size)

    def let_go(self, size: int) -> None:
        """Counts `size` bytes outside the pool as freed."""
        self._returned.append(size)

    def settle(self) -> int:
        """Counts what was released since the last lease and returns the bytes that are held now."""
        with self._lock:
            self._collect()
            return self.held_bytes

    def take_peak(self) -> int:
        """Returns the most bytes held at once since the last call."""
        held = self.settle()
        peak, self.peak_bytes = self.peak_bytes, held
        return peak

    @property
    def leased_pages(self) -> int:
        """Pages that are in use."""
        self.settle()
        return self._addresses.size - self._free_count

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all regions."""
        return self._addresses.size * self.page_bytes

    def addresses(self, pages: Pages) -> Pages:
        """Returns the memory address of each page."""
        return self._addresses[pages]

    def read(self, pages: Pages) -> Tensor:
        """Returns a copy of the pages, uint8 of shape (pages, page_bytes)."""
        content = torch.empty((pages.size, self.page_bytes), dtype=torch.uint8, device=self._device)
        for region, rows, inside in self._by_region(pages):
            content[rows.to(self._device)] = self._regions[region].read(inside)
        return content

    def write(self, pages: Pages, content: Tensor) -> None:
        """Fills the pages with uint8 content of shape (pages, page_bytes)."""
        for region, rows, inside in self._by_region(pages):
            self._regions[region].write(inside, content[rows.to(self._device)])

    def _by_region(self, pages: Pages) -> list[tuple[int, Tensor, Pages]]:
        """Splits pages into (region, their rows in `pages`, their numbers inside the region)."""
        regions = self._region_of[pages]
        return [
            (int(region), torch.from_numpy(np.flatnonzero(regions == region)), pages[regions == region] - first)
            for region, first in enumerate(self._first_page)
            if (regions == region).any()
        ]

    def _check(self, size: int) -> None:
        needed = self.held_bytes + size
        if self.budget is not None and needed > self.budget:
            raise ActivationBudgetError(needed, self.budget)

    def _count(self, size: int) -> None:
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _collect(self) -> None:
        """Puts what was released back: the last released is leased first, while it is in the cache."""
        while self._returned:
            item = self._returned.popleft()
            if isinstance(item, int):
                self.held_bytes -= item
                continue
            self._free[self._free_count : self._free_count + item.size] = item
            self._free_count += item.size
            self.held_bytes -= item.size * self.page_bytes

    def _grow(self, missing: int) -> None:
        step = min(max(self.reserved_bytes, FIRST_REGION), LARGEST_REGION) // self.page_bytes
        count, first = max(missing, step), self._addresses.size
        region = FixedPages(count, self.page_bytes, self._device)
        self._regions.append(region)
        self._first_page.append(first)
        self._addresses = np.concatenate([self._addresses, region.addresses(np.arange(count))])
        self._region_of = np.concatenate([self._region_of, np.full(count, len(self._regions) - 1)])
        # The new pages lie under those that are free already, lowest on top, so that used ones are used again first.
        fresh, old = np.arange(first + count - 1, first - 1, -1), self._free[: self._free_count]
        self._free = np.concatenate([fresh, old, np.empty(first + count - fresh.size - old.size, np.int64)])
        self._free_count += count
