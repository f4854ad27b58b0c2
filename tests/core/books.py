"""Whether pages, bytes and leases are lost or counted wrongly, and what of them only tests ask for."""

from __future__ import annotations

from typing import Any

import numpy as np

from daf_core.memory.lease import Outside
from daf_core.memory.lease_index import LeaseIndex
from daf_core.memory.pager import Pager
from daf_core.memory.pages.free_list import FreeList
from daf_core.memory.pages.host_linked_pool import LinkedPool
from daf_core.memory.pages.pool import PagePool


def check_pager(pager: Pager) -> None:
    """Checks a pager's books; not while a lease is being read back."""
    with pager._lock:
        pager._collect()
        check_pool(pager.pool)
        check_index(pager._index)
        used = pager.pool.used_pages - pager._idle.pages
        assert pager.held_bytes == pager._outside_bytes + used * pager.pool.page_bytes
        assert pager._writing or used == pager._index.resident_pages + pager._index.copied_pages
        assert pager.budget is None or pager.held_bytes <= pager.budget


def check_pool(pool: PagePool) -> None:
    """Checks that no page is lost or free twice."""
    with pool._lock:
        check_free_list(pool._free)
        assert pool._addresses.size == pool._free.total
    if isinstance(pool, LinkedPool):
        check_pool(pool._host)


def check_free_list(free: FreeList) -> None:
    """Checks that the stack holds exactly those pages once that are marked as free."""
    found = np.bincount(free._stack[: free.count], minlength=free.total)
    assert np.array_equal(found, ~free._taken)


def check_index(index: LeaseIndex) -> None:
    """Checks that each lease is in its place, and that the counts are those of the leases."""
    index._sort()
    resident, copied, spilled = list(index._resident.values()), list(index._copied.values()), index.spilled.values()
    ranked = [(lease.drops[-1][0], lease.serial, lease) for lease in resident if lease.drops]
    assert list(index._order) == sorted(ranked)
    assert index.resident_pages == sum(lease.size for lease in resident)
    assert index.droppable_pages == sum(lease.size - lease.least for lease in resident)
    assert index.copied_pages == sum(lease.size for lease in copied)
    assert all(lease.pages.size == lease.size for lease in [*resident, *copied])
    assert all(lease.slots is None for lease in resident)
    assert all(lease.slots is not None for lease in copied)
    assert all(not lease.resident and lease.slots is not None for lease in spilled)


def let_go(pager: Pager, size: int) -> None:
    """Counts bytes as freed that `Pager.hold` has counted for nobody."""
    pager._released.add(Outside(size))


def used_slots(tier: Any) -> int:
    """Returns how many slots of a tier below the pages hold a page."""
    slots = tier._slots
    return slots.used if isinstance(slots, FreeList) else slots.used_pages
