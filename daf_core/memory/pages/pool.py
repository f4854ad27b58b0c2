"""The page pool: fixed-size pages of regions that are reserved as they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from daf_core.memory import forks
from daf_core.memory.pages.free_list import FreeList, runs
from daf_kernels import FixedPages, Pages

PAGE_BYTES = 4096
"""An activation leaves at most one page part-filled for its header and each plane: 4 kB waste under 1% of the bytes of
RoBERTa-base at batch 8 x 128, 16 kB waste 5%, and the kernels are not faster with larger ones."""

LEAST_STEP = 1 << 20
"""The fewest bytes that a pool without a fixed step reserves at once."""

WINDOW = 10
"""Steps without a peak after which the memory for it is given back."""

SLACK = 1.15
"""Reserved bytes over the largest recent peak that are not worth giving back."""


class PagePool:
    """Pages on one device. They need not be neighbours, so any free ones serve any request.

    Thread-safe. Addresses stay valid while the page is taken.

    Args:
        device: Where the pages lie.
        step: Bytes that are reserved when no page is free; by default an eighth of what is reserved, or `LEAST_STEP`.
        page_bytes: Bytes in a page, a power of two.
        reserve: Returns so many uninitialized bytes there; by default as suits the device.
        before_free: Is called before memory goes back to the system, to wait for what may still read it.
    """

    def __init__(
        self,
        device: torch.device,
        step: int | None = None,
        page_bytes: int = PAGE_BYTES,
        reserve: Callable[[int], Tensor] | None = None,
        before_free: Callable[[], None] = lambda: None,
    ) -> None:
        self.page_bytes = page_bytes
        self.device = device
        self.uniform = True  # whether any page serves an activation as well as any other
        self._reserve = reserve
        self._before_free = before_free
        self._step = step
        self._free = FreeList()
        self._regions: list[FixedPages] = []
        self._first_page: list[int] = []
        self._addresses = np.empty(0, np.int64)
        self._peaks: deque[int] = deque(maxlen=WINDOW)  # bytes that were in use at once in each of the last steps
        self._peak_pages = 0
        self._lock = forks.lock(forks.Level.POOL)

    def take(self, count: int, limit: int | None = None) -> Pages:
        """Takes `count` pages off the pool, which reserves `limit` bytes at most unless these pages need more.

        Raises:
            MemoryError: The system has no memory for another region; the pool is as before.
        """
        with self._lock:
            if count > self._free.count:
                self._grow(count - self._free.count, limit)
            pages = self._free.take(count)
            self._peak_pages = max(self._peak_pages, self._free.used)
            return pages

    def give(self, pages: Pages) -> None:
        """Takes pages back.

        Raises:
            ValueError: One of them is free already.
        """
        with self._lock:
            self._free.give(pages)

    def finish_step(self, peak: int | None = None) -> int:
        """Ends a step: regions that only a peak needed which did not return go back to the system.

        A next step that takes and gives back as this one gets the pages of this one, in the same order. `peak` are the
        bytes of the pages that were in use at once, where not all that were taken were.

        Returns:
            Bytes that are worth keeping.
        """
        with self._lock:
            self._peaks.append(self._peak_pages * self.page_bytes if peak is None else peak)
            self._peak_pages = self._free.used
            keep = self._worth_keeping()
            self._shrink(keep)
            self._free.sort()
            return keep

    def can_shrink_to(self, keep: int) -> bool:
        """Says whether a region is not among the first `keep` bytes."""
        return bool(self._first_page) and self._first_page[-1] * self.page_bytes >= keep

    def release(self, keep: int = 0) -> None:
        """Gives regions back, the last one first, as long as `keep` bytes and the pages in use are left."""
        with self._lock:
            self._shrink(keep)

    @property
    def used_pages(self) -> int:
        """Pages that are taken."""
        return self._free.used

    @property
    def free_pages(self) -> int:
        """Pages that are reserved and not taken."""
        return self._free.count

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all regions."""
        return self._free.total * self.page_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of the regions that take memory: on a CPU, pages that were never written to take none."""
        untouched = self._free.untouched if self.device.type == "cpu" else 0
        return (self._free.total - untouched) * self.page_bytes

    def addresses(self, pages: Pages) -> Pages:
        """Returns the memory address of each page."""
        return self._addresses[pages]

    def read(self, pages: Pages) -> Tensor:
        """Returns a copy of the pages, uint8 of shape (pages, page_bytes)."""
        parts = self._by_region(pages)
        if len(parts) == 1:  # as nearly always: nothing is copied twice
            return parts[0][0].read(parts[0][2])
        content = torch.empty((pages.size, self.page_bytes), dtype=torch.uint8, device=self.device)
        words = content.view(torch.int64)
        for region, rows, inside in parts:
            words[rows.to(self.device, non_blocking=True)] = region.read(inside).view(torch.int64)
        return content

    def write(self, pages: Pages, content: Tensor) -> None:
        """Fills the pages with uint8 content of shape (pages, page_bytes)."""
        parts = self._by_region(pages)
        if len(parts) == 1:
            parts[0][0].write(parts[0][2], content.to(self.device))
            return
        words = content.view(torch.int64)
        for region, rows, inside in parts:
            part = words.index_select(0, rows.to(content.device, non_blocking=True))
            region.write(inside, part.view(torch.uint8).to(self.device))

    def runs(self, pages: Pages) -> Iterator[tuple[slice, Tensor]]:
        """Cuts pages into runs of neighbours: (their rows in `pages`, their memory as (pages, page_bytes))."""
        with self._lock:
            regions, first = list(self._regions), np.array(self._first_page, np.int64)
        for rows in runs(pages, first):
            start, count = int(pages[rows.start]), rows.stop - rows.start
            owner = int(np.searchsorted(first, start, side="right")) - 1
            inside = start - int(first[owner])
            yield rows, regions[owner].run(inside, inside + count)

    def _by_region(self, pages: Pages) -> list[tuple[FixedPages, Tensor, Pages]]:
        """Splits pages into (region, their rows in `pages`, their numbers inside the region)."""
        with self._lock:
            regions, first = list(self._regions), np.array(self._first_page, np.int64)
        owners = np.searchsorted(first, pages, side="right") - 1
        return [
            (regions[owner], torch.from_numpy(np.flatnonzero(owners == owner)), pages[owners == owner] - first[owner])
            for owner in np.unique(owners).tolist()
        ]

    def _grow(self, missing: int, limit: int | None) -> None:
        step = max(self.reserved_bytes // 8, LEAST_STEP) if self._step is None else self._step
        count = step // self.page_bytes
        if limit is not None:
            count = min(count, limit // self.page_bytes - self._free.total)
        count = max(missing, count)
        region = FixedPages(count, self.page_bytes, self.device, self._reserve)
        self._regions.append(region)
        self._first_page.append(self._free.total)
        self._addresses = np.concatenate([self._addresses, region.addresses(np.arange(count))])
        self._free.extend(count)

    def _worth_keeping(self) -> int:
        """Returns how many of the reserved bytes are likely to be needed again."""
        reserved, peak = self._free.total * self.page_bytes, max(self._peaks)
        return reserved if len(self._peaks) < WINDOW or reserved <= SLACK * peak else peak

    def _shrink(self, keep: int) -> None:
        """Gives regions back, the last one first, as long as `keep` bytes and the pages in use are left."""
        while self.can_shrink_to(keep):
            first = self._first_page[-1]
            if not self._free.free_from(first):
                return
            self._before_free()
            self._free.truncate(first)
            self._addresses = self._addresses[:first].copy()
            self._regions.pop()
            self._first_page.pop()
