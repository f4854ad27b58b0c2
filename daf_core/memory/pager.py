"""The pager: keeps what activations hold inside a budget, by giving up the least important bits first."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from daf_core.errors import ActivationBudgetError, SpillError
from daf_core.memory.at_ease import LeaseOwner, LeasesAtEase
from daf_core.memory.books import PagerAccount
from daf_core.memory.lease import NOWHERE, Lease, LeaseKind, LeaseScope, Outside, planned_drops
from daf_core.memory.pages.pool import PagePool
from daf_core.memory.read_ahead import ReadAhead
from daf_core.memory.release_clock import OwnerReference, ReleaseClock
from daf_core.memory.tiers.base import Tier
from daf_kernels import Pages


class Pager(LeasesAtEase):
    """Leases pages to activations on one device, and counts all bytes that activations hold.

    Under pressure it gives up pages that also lie in the next tier; then planes, the least important of all leases
    first; then it moves whole activations to the next tier, those needed last in backward first. If that is not enough,
    it raises `ActivationBudgetError` first. Thread-safe. A release takes no lock, and counts with the next call.

    Args:
        pool: Where the pages come from; the pager is its only user.
        budget: Bytes that may be held at once, pages and outside tensors together; None for no limit.
        least_planes: Leading planes that are never dropped.
        spill: Where activations move that do not fit; None for nowhere.
        clock: Says which releases count already; by default all do.
        ways: What else may be changed where the budget is too small, see `ActivationBudgetError`.
    """

    def __init__(
        self,
        pool: PagePool,
        budget: int | None = None,
        least_planes: int = 0,
        spill: Tier | None = None,
        clock: ReleaseClock | None = None,
        ways: Sequence[str] = (),
    ) -> None:
        super().__init__(pool, budget, least_planes, spill, clock)
        self._ways = ways
        self.spills = spill is not None  # whether activations on pages may move
        # Bytes of the budget for what will lie outside of the pool, which keeps pages that it had once.
        self.set_aside = 0
        self._least_planes = least_planes
        self._read_ahead = ReadAhead(self._load_next, spill is not None and spill.queued, pool.device)
        self._serial = 0
        self._look_for_pressure()

    def writing(
        self, fixed: int, planes: Sequence[int] = (), importances: Sequence[float] = (), owner: object = None
    ) -> LeaseScope:
        """Leases pages to a new activation; inside, its planes are written. They may be fewer than asked for.

        An exception inside releases the lease; otherwise it is held until `release`, or until its owner dies.

        Args:
            fixed: Pages that it cannot do without.
            planes: Pages of each plane, most significant first.
            importances: Growth of the error if a plane is dropped, per byte that this frees.
            owner: The activation; None for a lease that `release` gives back.

        Raises:
            ActivationBudgetError: It does not fit even if everything is given up that may be.
            SpillError: The next tier takes nothing more.
        """
        return LeaseScope(self._open(fixed, planes, importances, owner), self.finish, self.release)

    def writing_again(self, kind: LeaseKind, owner: LeaseOwner) -> LeaseScope:
        """As `writing`, for a kind of leases: without pressure one takes the pages of another that was given back."""
        if not self.at_ease or self._released.timed:
            return self.writing(kind.fixed, kind.planes, kind.importances, owner)
        self.take(kind, owner)
        return LeaseScope(owner.lease, self.finish, self.release)

    def reading(self, lease: Lease) -> LeaseScope:
        """Brings an activation back if it was spilled; inside, its pages and planes stay as they are.

        Raises:
            ActivationBudgetError: It does not fit beside what cannot be spilled.
            SpillError: The next tier cannot be read.
        """
        if self._spill is not None:
            self._pin(lease)
        else:
            with self._lock:
                lease.readers += 1
                self._read.add(lease)
        return LeaseScope(lease, self._unpin)

    def shrink(self, keep: int = 0) -> None:
        """Gives memory back to the system that no page in use lies in, as long as `keep` bytes are left."""
        with self._lock:
            self._idle.reclaim()
        self.pool.release(keep)

    def hold(self, size: int, owner: object | None = None, outside: Outside | None = None) -> Outside:
        """Counts `size` bytes of an activation outside the pool, until their owner dies.

        `outside` are bytes of the owner to which they are added; by default they are counted by themselves.

        Raises:
            ActivationBudgetError: They do not fit even if everything is given up that may be.
            SpillError: The next tier takes nothing more.
        """
        released, reference, counted = self._released, None, outside or Outside()
        if owner is not None and released.timed:
            released.add(counted, owner)
        elif owner is not None:
            reference = OwnerReference(owner, released.note_death)
        started = 0.0 if self.budget is None else self._begin_pressing()
        with self._lock:
            if released.untimed or released.dead or released.items:
                self._collect()
            if self.budget is not None:
                self._make_room(size, size, self.budget, drop=True)
            # Nothing is called in these lines: an interrupt, such as Ctrl-C, comes before or after all of them.
            if reference is not None:
                self._owned[counted] = None
                reference.item = counted
                counted.reference = reference
            held = self.held_bytes = self.held_bytes + size
            self._outside_bytes += size
            counted.size += size
            if self.budget is not None:
                self._count(0)
                self.account.seconds += time.perf_counter() - started
            elif held > self.account.peak_bytes:
                self.account.peak_bytes = held
        return counted

    def set_budget(self, budget: int | None) -> None:
        """Changes the budget; if less is allowed than is held, the least important bits are given up now.

        Raises:
            ActivationBudgetError: What is held does not fit even so; the budget stays as it was.
        """
        self._begin_pressing()
        with self._lock:
            self._collect()
            largest = 0 if self._spill is None else self._index.largest * self.pool.page_bytes
            if budget is not None and largest > budget:  # it could be spilled, and never be read back
                raise ActivationBudgetError(largest, budget, self._ways)
            self._make_room(0, 0, budget, drop=True)
            self._idle.reclaim()
            self.budget = budget
            self._look_for_pressure()

    def finish_step(self) -> PagerAccount:
        """Ends a step and returns what was done in it."""
        with self._lock:
            self._collect()
            account, self.account = self.account, PagerAccount(peak_bytes=self.held_bytes)
            peak, self._peak_on_pages = self._peak_on_pages, self._bytes_on_pages
        if self._spill is not None:
            self._spill.finish_step()  # first: it may still copy pages that the pool is about to give back
        keep = self.pool.finish_step(peak)
        if self._idle.pages and self.pool.can_shrink_to(keep):
            self.shrink(keep)
        return account

    def _begin_pressing(self) -> float:
        """Prepares for what may drop planes, without the lock yet, and returns the time."""
        started = time.perf_counter()
        if self._spill is not None:
            self._read_ahead.stop()  # the drops would depend on how far it has come
        return started

    def _open(self, fixed: int, planes: Sequence[int], importances: Sequence[float], owner: object | None) -> Lease:
        drops = list(planned_drops(tuple(planes), tuple(importances), self._least_planes)) if planes else []
        page = self.pool.page_bytes
        started = self._begin_pressing()
        with self._lock:
            self._collect()
            lease, budget = Lease(self._serial, fixed, planes, drops), self.budget
            if budget is not None:
                budget -= max(self.set_aside - self._outside_bytes, 0)
            self._serial += 1
            self._make_room(lease.size * page, lease.least * page, budget, drop=True, incoming=lease)
            if owner is not None:
                self._released.add(lease, owner)
            self._idle.reclaim()
            pages, size = self.pool.take(lease.size, budget), lease.size * page
            if self._spill is not None:
                self._spill.wait()  # pages that were just given up may still be on their way
            self._writing[lease] = None
            # Nothing is called in these lines: an interrupt, such as Ctrl-C, comes before or after all three.
            lease.readers = 1
            lease.pages = pages
            self.held_bytes += size
            self._count(0)
            self.account.seconds += time.perf_counter() - started
            return lease

    def finish(self, lease: Lease) -> None:
        """Ends the writing of a lease."""
        with self._lock:
            lease.readers -= 1
            del self._writing[lease]
            self._index.add(lease)
            if self._spill is not None:
                self._copy_ahead(lease.size)

    def _pin(self, lease: Lease) -> None:
        started = time.perf_counter()
        while not self._pin_resident(lease, started):
            if (loading := lease.loading) is not None:
                loading.wait()
            else:
                self._read_ahead.stop()  # what it is loading takes room that cannot be given up before it is there
                with self._lock:
                    claimed = not lease.resident and lease.loading is None  # no other thread loads it
                    if claimed:
                        self._collect()
                        self._begin_load(lease)
                if claimed:
                    self._load(lease)
        if self._index.spilled:
            self._read_ahead.start(lease.serial)

    def _unpin(self, lease: Lease) -> None:
        with self._lock:
            lease.readers -= 1
            if not lease.readers:
                self._read.discard(lease)

    def _pin_resident(self, lease: Lease, started: float) -> bool:
        with self._lock:
            if lease.resident:
                if lease.slots is not None and self._spill is not None:
                    self._spill.wait(lease.slots)
                lease.readers += 1
                self._read.add(lease)
                self.account.seconds += time.perf_counter() - started
            return lease.resident

    def _load_next(self, serial: int) -> int | None:
        """Reads back what was spilled and is needed next before `serial`, if it fits; returns its number."""
        with self._lock:
            self._collect()
            lease = self._index.spilled_before(serial)
            room = math.inf if self.budget is None else self.budget - self.held_bytes
            if lease is None or lease.size * self.pool.page_bytes > room:
                return None
            self._begin_load(lease)
        self._load(lease)
        return lease.serial

    def _begin_load(self, lease: Lease) -> None:
        """Claims a spilled lease and the room for it; `_load` must follow, without the lock."""
        size = lease.size * self.pool.page_bytes
        self._make_room(size, size, self.budget, drop=False)
        self._index.remove(lease)
        lease.loading = threading.Event()
        self._count(size)

    def _load(self, lease: Lease) -> None:
        assert self._spill is not None
        assert lease.slots is not None
        pages = NOWHERE
        try:
            pages = self.pool.take(lease.size, self.budget)
            self._spill.read(lease.slots, self.pool, pages)
        except BaseException:
            with self._lock:
                self.pool.give(pages)
                self.held_bytes -= lease.size * self.pool.page_bytes
                self._finish_load(lease)
            raise
        with self._lock:
            lease.pages = pages
            self._finish_load(lease)

    def _finish_load(self, lease: Lease) -> None:
        loading, lease.loading = lease.loading, None
        if lease.released:
            self._give(lease.pages)
            self._free(lease)
        else:
            self._index.add(lease)
        if loading is not None:
            loading.set()

    def _make_room(
        self, wanted: int, least: int, budget: int | None, drop: bool, incoming: Lease | None = None
    ) -> None:
        """Gives up as little as possible so that `wanted` bytes fit, which may shrink to `least` with `incoming`."""
        if budget is None or self.held_bytes + wanted <= budget:
            return
        page = self.pool.page_bytes
        needed = self.held_bytes + least - self._index.obtainable_pages(self._read, drop, self.spills) * page
        if needed > budget:  # before anything is given up in vain
            raise ActivationBudgetError(needed, budget, self._ways)

        def excess() -> int:
            return self.held_bytes + (wanted if incoming is None else incoming.size * page) - budget

        while excess() > 0 and (copied := self._index.needed_last(copied=True)) is not None:
            self._evict(copied)
        dropped: list[Pages] = []
        while drop and excess() > 0 and (lease := self._index.least_important(incoming)) is not None:
            dropped.append(self._drop(lease))
        if dropped:
            self.pool.give(np.concatenate(dropped[::-1]))
        while self._spill is not None and excess() > 0 and (last := self._index.needed_last()) is not None:
            self._copy_out(self._spill, last)
            self._evict(last)
        if excess() > 0:
            raise ActivationBudgetError(budget + excess(), budget, self._ways)

    def _drop(self, lease: Lease) -> Pages:
        """Drops the next planes of a lease, written or not, and returns the pages that the caller gives the pool."""
        before = lease.size
        if lease.resident:
            self._index.remove(lease)
        self.account.dropped_planes += lease.drop()
        pages, lease.pages = lease.pages[lease.size :], lease.pages[: lease.size]
        if lease.resident:
            self._index.add(lease)
        self.held_bytes -= pages.size * self.pool.page_bytes
        self.account.dropped_bytes += (before - lease.size) * self.pool.page_bytes
        return pages

    def _copy_ahead(self, size: int) -> None:
        """Has copied, while others compute, what an activation of as many pages would make room by moving out."""
        if self._spill is None or not self._spill.queued or self.budget is None:
            return
        self._collect()
        with suppress(SpillError):  # whoever needs the room tries again
            while (last := self._index.needed_last()) is not None and not last.drops:
                kept = size - self._index.copied_pages - self._index.droppable_pages
                if self.held_bytes + kept * self.pool.page_bytes <= self.budget:
                    return
                self._copy_out(self._spill, last)

    def _copy_out(self, spill: Tier, lease: Lease) -> None:
        slots = spill.write(self.pool, lease.pages)
        self.account.spilled_bytes += lease.size * self.pool.page_bytes
        self._index.remove(lease)
        lease.slots = slots
        self._index.add(lease)

    def _evict(self, lease: Lease) -> None:
        """Gives up pages whose content lies in the next tier too."""
        self._index.remove(lease)
        self._give(lease.pages)
        lease.pages, lease.kind = NOWHERE, None  # it comes back to other pages
        self._index.add(lease)
