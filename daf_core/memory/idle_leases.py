"""Leases that were given back and keep their pages, for the activations of the next step."""

from __future__ import annotations

from collections.abc import Sequence

from daf_core.memory.lease import NOWHERE, Lease, LeaseKind, planned_drops
from daf_core.memory.pages.pool import PagePool
from daf_core.memory.tiers.base import Tier
from daf_kernels import PageAddresses

MOST_KINDS = 1 << 12
"""Kinds of leases that are remembered: a step of RoBERTa-base has six for each length of its batch."""


class IdleLeases:
    """The idle leases of a pager, by their kind.

    To take pages off the pool and to give them back takes 10 us an activation, and those of the next step are as large
    as those of this one. Whoever else needs pages has the idle ones first.
    """

    def __init__(self, pool: PagePool, least_planes: int, spill: Tier | None) -> None:
        self.pages = 0  # pages of idle leases
        self._pool = pool
        self._spill = spill
        self._least_planes = least_planes
        self._kinds: dict[tuple[object, ...], LeaseKind] = {}

    def kind(self, fixed: int, planes: Sequence[int], importances: Sequence[float]) -> LeaseKind:
        """Returns the kind of leases with these arguments of `Pager.writing`; the pager's lock is held."""
        key = (fixed, *planes, None, *importances)
        found = self._kinds.get(key)
        if found is None:
            if len(self._kinds) >= MOST_KINDS:
                self.reclaim()
                for known in self._kinds.values():
                    known.retired = True
                self._kinds.clear()
            found = self._kinds[key] = LeaseKind(fixed, planes, importances, self._pool.page_bytes)
        return found

    def last(self, kind: LeaseKind) -> Lease:
        """Returns the idle lease of a kind that is the last of `LeaseKind.free`; it is made if there is none."""
        if not kind.free:
            if self._pool.free_pages < kind.size:
                self.reclaim()
            drops = list(planned_drops(kind.planes, kind.importances, self._least_planes)) if kind.planes else []
            lease, pages = Lease(0, kind.fixed, kind.planes, drops), self._pool.take(kind.size)
            if self._spill is not None:
                self._spill.wait()  # pages that were given up under a budget may still be on their way
            addresses = PageAddresses(self._pool.addresses(pages))
            # Nothing is called in these lines: an interrupt, such as Ctrl-C, comes before or after all of them.
            lease.kind, lease.pages, lease.addresses = kind, pages, addresses
            kind.free += (lease,)
            self.pages += kind.size
        return kind.free[-1]

    def accept(self, lease: Lease) -> bool:
        """Takes a lease that was given back, if it has a kind and all pages of it."""
        kind = lease.kind
        if kind is None or kind.retired or lease.size != kind.size or lease.slots is not None or not lease.resident:
            return False
        # Nothing is called in these lines, see above.
        lease.reference = None
        kind.free += (lease,)
        self.pages += kind.size
        return True

    def reclaim(self) -> None:
        """Gives the pages of all idle leases back to the pool."""
        for kind in self._kinds.values() if self.pages else ():
            self.empty(kind)

    def empty(self, kind: LeaseKind) -> None:
        """Gives the pages of the idle leases of a kind back to the pool."""
        while kind.free:
            lease = kind.free[-1]
            self._pool.give(lease.pages)
            # Nothing is called in these lines, see above.
            lease.pages = NOWHERE
            del kind.free[-1]
            self.pages -= kind.size
