"""Pages on a device and in the memory of its host, in one pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from daf_core import DAFConfig
from daf_core.memory.devices import DevicePagers
from daf_core.memory.pages.host_linked_pool import LinkedPool, Place
from tests.core.books import check_pool
from tests.core.links import LateLink

PAGE = 128
CPU = torch.device("cpu")


@pytest.fixture
def link() -> LateLink:
    return LateLink()


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def pool(link: LateLink, place: Place) -> LinkedPool:
    return LinkedPool(CPU, 16 * PAGE, PAGE, link, place)


def test_each_thread_takes_the_pages_of_its_place(pool: LinkedPool, link: LateLink, place: Place) -> None:
    own = pool.take(3)
    place.on_host = True
    shared = pool.take(5)
    assert not any(link.has(address) for address in pool.addresses(own).tolist())
    assert all(link.has(address) for address in pool.addresses(shared).tolist())
    assert pool.used_pages == 8
    for pages in (own, shared):
        content = torch.randint(256, (pages.size, PAGE), dtype=torch.uint8)
        pool.write(pages, content)
        assert torch.equal(pool.read(pages), content)
        assert torch.equal(pool.read(pages[1:]), content[1:])
    pool.give(np.concatenate([shared[1:], own]))
    check_pool(pool)
    assert pool.used_pages == 1
    with pytest.raises(ValueError, match="twice"):
        pool.give(shared[:2])


def test_both_memories_are_reserved_within_one_limit(pool: LinkedPool, place: Place) -> None:
    limit = 24 * PAGE
    pool.take(1, limit)
    assert pool.reserved_bytes == 16 * PAGE
    place.on_host = True
    pool.take(1, limit)
    assert pool.reserved_bytes == limit
    assert pool.resident_bytes <= 16 * PAGE  # of the device's own memory


def test_pages_are_handed_out_when_nobody_reads_them(pool: LinkedPool, link: LateLink, place: Place) -> None:
    """Those of the device are read and written in order anyway."""
    link.reading = {1}
    pool.take(1)
    assert link.reading
    place.on_host = True
    pool.take(1)
    assert not link.reading


def test_memory_goes_back_when_nobody_reads_it(pool: LinkedPool, link: LateLink, place: Place) -> None:
    """At the end of a step, when asked to, and with the pool; nobody waits where nothing goes back."""
    place.on_host = True
    for give_back in (lambda: [pool.finish_step() for _ in range(12)], pool.release):
        pages = pool.take(40)
        link.reading = {1}
        give_back()
        assert link.reading
        pool.give(pages)
        give_back()
        assert not link.reading
        assert pool.reserved_bytes == 0


def test_memory_outlives_what_reads_it(link: LateLink, place: Place) -> None:
    pool = LinkedPool(CPU, 16 * PAGE, PAGE, link, place)
    link.reading = {1}
    del pool
    assert not link.reading


def test_peaks_of_both_memories_are_given_back(pool: LinkedPool, link: LateLink, place: Place) -> None:
    pool.give(pool.take(40))
    place.on_host = True
    pool.give(pool.take(40))
    for _ in range(12):
        pool.finish_step()
    assert pool.reserved_bytes == 0
    check_pool(pool)


def test_devices_without_a_link_have_a_pool_of_their_own(link: LateLink) -> None:
    pagers = DevicePagers(DAFConfig(), links={CPU: link})
    assert isinstance(pagers.on(CPU).pool, LinkedPool)
    assert not isinstance(DevicePagers(DAFConfig()).on(CPU).pool, LinkedPool)


def test_unused_regions_of_both_memories_are_released(pool: LinkedPool, place: Place) -> None:
    """The last ones first, up to one that has a page in use."""
    own = [pool.take(16), pool.take(16)]
    place.on_host = True
    shared = pool.take(5)
    pool.give(np.concatenate([own[1], shared]))
    assert pool.reserved_bytes > 32 * PAGE
    pool.release()
    check_pool(pool)
    assert pool.reserved_bytes == 16 * PAGE
    pool.give(own[0])
    pool.release()
    assert pool.reserved_bytes == 0
    assert pool.take(3).size == 3
