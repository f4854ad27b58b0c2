"""Leases where nothing presses: an activation takes the pages that one of the same kind has given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from daf_core.memory.books import PagerBooks
from daf_core.memory.lease import Lease, LeaseKind
from daf_core.memory.release_clock import OwnerReference
from daf_kernels import Answer, PageAddresses, TwoValues

_UNASKED: Answer = (0, 0, 0, None)


class LeaseOwner(Protocol):
    """Gets a lease."""

    lease: Lease


class LeasesAtEase(PagerBooks):
    """The part of a `Pager` that has nothing to decide: each call takes a lock, and is a few lines of arithmetic."""

    def _look_for_pressure(self) -> None:
        # Whether nothing presses, so that `take` may be called.
        self.at_ease = self.budget is None and self.pool.uniform

    def kind(self, fixed: int, planes: Sequence[int] = (), importances: Sequence[float] = ()) -> LeaseKind:
        """Returns the kind of leases with these arguments of `writing`."""
        with self._lock:
            return self._idle.kind(fixed, planes, importances)

    def take(
        self,
        kind: LeaseKind,
        owner: LeaseOwner,
        encode: Callable[[int, PageAddresses], Answer] | None = None,
        origin: int = 0,
    ) -> Answer:
        """Gives an activation a lease while the pager is `at_ease`.

        Args:
            kind: Its kind.
            owner: The activation. When it dies, the lease is idle.
            encode: Encodes the elements at an address to pages, and answers with 0 or declines; None for a lease that
                is to be written until `finish` is called for it.
            origin: Where the elements lie; nobody else gets a page meanwhile, so they should be few.

        Returns:
            The answer; where `encode` declines there is no lease.
        """
        released, free, idle, index, answer = self._released, kind.free, self._idle, self._index, _UNASKED
        with self._lock:
            if released.untimed or released.dead or released.items:
                self._collect()
            lease = free[-1] if free else idle.last(kind)
            if encode is not None and (answer := encode(origin, lease.addresses))[0]:
                if kind.retired:  # then nobody else finds its pages
                    idle.empty(kind)
                return answer
            reference, serial, size = OwnerReference(owner, released.note_death), self._serial, kind.size
            # Nothing is called in these lines: an interrupt, such as Ctrl-C, comes before or after all of them.
            reference.item = owner.lease = lease
            lease.reference = reference
            lease.serial = serial
            lease.released = False
            del free[-1]
            if encode is None:
                lease.readers = 1
                self._writing[lease] = None
            else:
                index.unsorted[serial] = lease
                index.resident_pages += size
                index.droppable_pages += size - lease.least
            self._serial = serial + 1
            idle.pages -= size
            held = self.held_bytes = self.held_bytes + kind.bytes
            if held > self.account.peak_bytes:
                self.account.peak_bytes = held
            if held - self._outside_bytes > self._peak_on_pages:
                self._peak_on_pages = held - self._outside_bytes
        return answer

    def read(
        self, lease: Lease, decode: Callable[[int, PageAddresses, TwoValues], bool], out: int, two: TwoValues
    ) -> bool:
        """Has a small activation decoded that has all its pages; the arguments are as those of `take`.

        Returns:
            False where it has not, and `reading` finds what is left; or where `decode` declines.
        """
        with self._lock:
            kind = lease.kind
            return kind is not None and lease.pages.size == kind.size and decode(out, lease.addresses, two)
