"""What activations hold on one device: leases, bytes outside of the pool, and what was released of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daf_core.memory import forks
from daf_core.memory.idle_leases import IdleLeases
from daf_core.memory.lease import NOWHERE, Lease, Outside
from daf_core.memory.lease_index import LeaseIndex
from daf_core.memory.pages.pool import PagePool
from daf_core.memory.release_clock import ReleaseClock, Releases
from daf_core.memory.tiers.base import Tier
from daf_kernels import Pages


@dataclass
class PagerAccount:
    """What the pager did during a step."""

    peak_bytes: int = 0  # the most bytes that were held at once
    dropped_planes: int = 0  # planes given up under pressure, before or after they were written
    dropped_bytes: int = 0  # bytes of their pages
    spilled_bytes: int = 0  # bytes copied to the next tier
    # Time spent on leases and drops, and on writing to the next tier and waiting for it; what a GPU waits for copies is
    # not in it.
    seconds: float = 0.0


class PagerBooks:
    """The books of a `Pager`, which alone changes them."""

    def __init__(
        self, pool: PagePool, budget: int | None, least_planes: int, spill: Tier | None, clock: ReleaseClock | None
    ) -> None:
        self.pool = pool  # where the pages come from
        self.budget = budget  # bytes that may be held at once, pages and outside tensors together; None for no limit
        self.held_bytes = 0  # bytes that are held, without what was released since they were counted
        self.account = PagerAccount()  # what was done so far in this step; it goes on counting
        self._spill = spill
        self._outside_bytes = 0
        self._peak_on_pages = 0
        self._writing: dict[Lease, None] = {}
        self._owned: dict[Outside, None] = {}
        self._idle = IdleLeases(pool, least_planes, spill)
        self._index = LeaseIndex()
        self._read: set[Lease] = set()
        self._released: Releases[Lease | Outside] = Releases(clock)
        self._lock = forks.lock(forks.Level.PAGER)

    def release(self, lease: Lease) -> None:
        """Gives a lease back, once."""
        self._released.add(lease)

    @property
    def outside_bytes(self) -> int:
        """Bytes that are held outside of the pool."""
        self.settle()
        return self._outside_bytes

    def settle(self) -> int:
        """Counts what was released meanwhile and returns the bytes that are held now."""
        with self._lock:
            self._collect()
            return self.held_bytes

    @property
    def leased_pages(self) -> int:
        """Pages that are in use."""
        self.settle()
        return self.pool.used_pages - self._idle.pages

    def _collect(self) -> None:
        """Counts what was released; pages go back in one go, as each trip to the pool costs 50 us with cold caches."""
        self._collect_at_ease()
        freed: list[Pages] = []
        for item in self._released.due() if self._released else ():
            if isinstance(item, Outside):  # see `hold`
                self.held_bytes -= item.size
                self._outside_bytes -= item.size
                item.size = 0
                item.reference = None
                self._owned.pop(item, None)
                continue
            before, item.released = item.released, True
            if not before and item.loading is None:  # otherwise the read that is in progress frees it
                self._read.discard(item)
                if item in self._writing:  # an interrupt has kept it from being published
                    del self._writing[item]
                elif item.resident or item.slots is not None:  # it got no pages otherwise
                    self._index.remove(item)
                if self._idle.accept(item):
                    self.held_bytes -= item.size * self.pool.page_bytes
                    continue
                freed.append(item.pages)
                self._free(item)
        if freed:
            self._give(np.concatenate(freed))

    def _collect_at_ease(self) -> None:
        """Counts what needs few words: whose owner has died, and which nobody has sorted in."""
        waiting, index, idle, owned = self._released.untimed, self._index, self._idle, self._owned
        unsorted = index.unsorted
        while waiting:
            reference = waiting[0]
            item = reference.item
            if item.reference is reference:  # otherwise it was released before, and has another owner
                # Nothing is called in these lines: an interrupt, such as Ctrl-C, comes before or after all of them.
                if item in owned:
                    del owned[item]
                    self.held_bytes -= item.size
                    self._outside_bytes -= item.size
                    item.size = 0
                elif (
                    (kind := item.kind) is not None
                    and not kind.retired
                    and item.size == kind.size
                    and item.serial in unsorted
                ):
                    del unsorted[item.serial]
                    index.resident_pages -= kind.size
                    index.droppable_pages -= kind.size - item.least
                    item.released = True
                    kind.free += (item,)
                    idle.pages += kind.size
                    self.held_bytes -= kind.bytes
                else:
                    return
                item.reference = None
            waiting.popleft()

    def _free(self, lease: Lease) -> None:
        lease.pages = NOWHERE
        if lease.slots is not None and self._spill is not None:
            self._spill.free(lease.slots)
            lease.slots = None

    def _give(self, pages: Pages) -> None:
        self.pool.give(pages)
        self.held_bytes -= pages.size * self.pool.page_bytes

    def _count(self, size: int) -> None:
        self.held_bytes += size
        if self.budget is not None and self.held_bytes > self.budget:
            raise AssertionError(f"{self.held_bytes} bytes are held, and {self.budget} are allowed")
        self.account.peak_bytes = max(self.account.peak_bytes, self.held_bytes)
        self._peak_on_pages = max(self._peak_on_pages, self._bytes_on_pages)

    @property
    def _bytes_on_pages(self) -> int:
        return self.held_bytes - self._outside_bytes
