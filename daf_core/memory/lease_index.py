"""Where the pager finds the lease to drop from, to spill or to read back next."""

from __future__ import annotations

from collections.abc import Collection

from sortedcontainers import SortedDict, SortedList

from daf_core.memory.lease import Lease

Entry = tuple[float, int, Lease]
"""Importance of a lease's next drop, its serial number, the lease."""


class LeaseIndex:
    """All leases that are not in the middle of a move, in order. Every action is O(log n) in their number.

    A lease is *resident* (its pages are its only copy), *copied* (it lies in the next tier too) or *spilled* (it lies
    only there). Only resident ones are ranked by importance: dropping frees nothing of the others that giving up their
    pages would not free as well. Of each, only the next drop is in the order, because its others are more important.

    Without pressure nobody asks for an order. So a resident lease is sorted in when somebody does: that takes 5 us, and
    most leases come and go without.
    """

    def __init__(self) -> None:
        self._order: SortedList[Entry] = SortedList()
        self._resident: SortedDict[int, Lease] = SortedDict()
        self.unsorted: dict[int, Lease] = {}  # resident leases that are not sorted in yet, by serial number
        self._copied: SortedDict[int, Lease] = SortedDict()
        self.spilled: SortedDict[int, Lease] = SortedDict()  # the spilled leases by serial number
        self.resident_pages = 0  # pages of resident leases
        self.droppable_pages = 0  # those of them that may be dropped
        self.copied_pages = 0  # pages of copied leases

    def add(self, lease: Lease) -> None:
        """Enters a lease where it belongs."""
        if not lease.resident:
            self.spilled[lease.serial] = lease
        elif lease.slots is not None:
            self._copied[lease.serial] = lease
            self.copied_pages += lease.size
        else:
            self.unsorted[lease.serial] = lease
            self.resident_pages += lease.size
            self.droppable_pages += lease.size - lease.least

    def remove(self, lease: Lease) -> None:
        """Takes a lease out: before anything about it changes."""
        if not lease.resident:
            del self.spilled[lease.serial]
        elif lease.slots is not None:
            del self._copied[lease.serial]
            self.copied_pages -= lease.size
        else:
            self.resident_pages -= lease.size
            self.droppable_pages -= lease.size - lease.least
            if self.unsorted.pop(lease.serial, None) is None:
                del self._resident[lease.serial]
                if lease.drops:
                    self._order.remove(_entry(lease))

    def least_important(self, incoming: Lease | None = None) -> Lease | None:
        """Returns the lease whose next drop costs least, the oldest of equals, among those that nobody reads.

        An incoming lease, not entered yet, is the youngest.
        """
        self._sort()
        resident = next((lease for _, _, lease in self._order if not lease.readers), None)
        if incoming is None or not incoming.drops:
            return resident
        return resident if resident is not None and resident.drops[-1][0] <= incoming.drops[-1][0] else incoming

    def obtainable_pages(self, read: Collection[Lease], drop: bool, spill: bool) -> int:
        """Returns the pages that can be given up, by drops or by moving leases out, while some leases are read."""
        if spill:
            return self.copied_pages + self.resident_pages - sum(lease.size for lease in read)
        if drop:
            return self.copied_pages + self.droppable_pages - sum(lease.size - lease.least for lease in read)
        return self.copied_pages

    def needed_last(self, copied: bool = False) -> Lease | None:
        """Returns the resident or copied lease that backward needs last, among those that nobody reads."""
        self._sort()
        leases = self._copied if copied else self._resident
        return next((lease for lease in leases.values() if not lease.readers), None)

    @property
    def largest(self) -> int:
        """Pages of the largest lease, when everything was dropped that may be; O(n)."""
        self._sort()
        moved = [lease.size for leases in (self._copied, self.spilled) for lease in leases.values()]
        return max([*moved, *(lease.least for lease in self._resident.values())], default=0)

    def spilled_before(self, serial: int) -> Lease | None:
        """Returns the spilled lease that backward needs first after lease `serial`."""
        position = self.spilled.bisect_left(serial) - 1
        return None if position < 0 else self.spilled.peekitem(position)[1]

    def _sort(self) -> None:
        if self.unsorted:
            self._resident.update(self.unsorted)
            self._order.update(_entry(lease) for lease in self.unsorted.values() if lease.drops)
            self.unsorted.clear()


def _entry(lease: Lease) -> Entry:
    return lease.drops[-1][0], lease.serial, lease
