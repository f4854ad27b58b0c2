"""Main memory below a GPU's: pages come back as they were, however late they are copied, and no more than fit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from daf_core.errors import SpillError
from daf_core.memory import devices
from daf_core.memory.pager import Pager
from daf_core.memory.pages.pool import WINDOW, PagePool
from daf_core.memory.tiers import pinned
from daf_core.memory.tiers.pinned import HostMemory, PinnedFirst, SideStream, host_memory_of
from daf_kernels import Pages
from tests.core.books import check_pager, used_slots
from tests.core.late_copies import CPU, LateCopies, copies_of, host_memory
from tests.core.leases import PAGE, content, write


def make_pool(pages: int = 64) -> PagePool:
    """Returns a pool of two regions of which all pages are taken."""
    pool = PagePool(CPU, pages // 2 * PAGE, PAGE)
    pool.take(pages // 2)
    pool.take(pages // 2)
    return pool


def fill(pool: PagePool, pages: Pages, seed: int = 0) -> Tensor:
    """Writes random bytes into pages and returns them."""
    content = torch.randint(256, (pages.size, PAGE), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    pool.write(pages, content)
    return content


@given(data=st.data())
def test_random_page_sets_come_back(data: st.DataObject) -> None:
    """Any pages in any order, however often slots were freed and pages and slots used again meanwhile."""
    pool, memory = make_pool(), host_memory(PAGE, step=7)
    held: list[tuple[Pages, Tensor]] = []
    for _ in range(data.draw(st.integers(1, 8))):
        if held and data.draw(st.booleans()):
            memory.free(held.pop(data.draw(st.integers(0, len(held) - 1)))[0])
        pages = np.array(data.draw(st.lists(st.integers(0, 63), min_size=1, max_size=20, unique=True)))
        memory.wait()
        content = fill(pool, pages, data.draw(st.integers(0, 9)))
        held.append((memory.write(pool, pages), content))
        assert used_slots(memory) == sum(slots.size for slots, _ in held)
    for slots, content in held:
        pages = np.array(data.draw(st.permutations(range(64))))[: slots.size]
        memory.read(slots, pool, pages)
        memory.wait(slots)
        assert torch.equal(pool.read(pages), content)


@pytest.mark.parametrize("chunk_bytes", [1, PAGE, 3 * PAGE, 1 << 20])
def test_chunks_do_not_change_what_comes_back(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is gathered on the GPU at a time is bounded, and a page at least."""
    monkeypatch.setattr(pinned, "CHUNK_BYTES", chunk_bytes)
    pool, memory, pages = make_pool(), host_memory(PAGE, step=16), np.arange(63, 13, -1)
    wanted, sizes, read = pool.read(pages), list[int](), pool.read
    monkeypatch.setattr(pool, "read", lambda pages: (sizes.append(pages.size * PAGE), read(pages))[1])
    slots = memory.write(pool, pages)
    memory.wait()
    pool.write(pages, torch.zeros_like(wanted))
    memory.read(slots, pool, pages)
    memory.wait(slots)
    assert max(sizes) <= max(chunk_bytes, PAGE)
    assert torch.equal(read(pages), wanted)


def test_only_what_is_needed_is_waited_for() -> None:
    """An activation that is read does not wait for those that are read ahead of backward."""
    pool, memory = make_pool(), host_memory(PAGE)
    slots = [memory.write(pool, np.arange(first, first + 4)) for first in (0, 4)]
    for place in slots:
        memory.read(place, pool, np.arange(4))
    memory.wait(slots[0])
    assert len(copies_of(memory).queue) == 1
    memory.wait(slots[0])
    assert len(copies_of(memory).queue) == 1
    memory.wait()
    assert not copies_of(memory).queue


class Broken:
    """Copies that fail."""

    def run(self, copy: Any) -> None:
        raise torch.OutOfMemoryError("no memory on the GPU")

    def wait(self, mark: None) -> None:
        raise AssertionError


def test_write_that_fails_frees_its_slots() -> None:
    memory = HostMemory(CPU, PagePool(CPU, 16 * PAGE, PAGE), Broken())
    with pytest.raises(torch.OutOfMemoryError):
        memory.write(make_pool(), np.arange(4))
    assert used_slots(memory) == 0
    memory.wait()


def test_memory_that_is_not_needed_is_given_back() -> None:
    """After some steps without a peak, as the pool's."""
    pager, memory = make_pager(64)
    memory.free(memory.write(make_pool(), np.arange(32)))
    assert memory._slots.reserved_bytes > 0
    for _ in range(WINDOW + 1):
        pager.finish_step()
    assert memory._slots.reserved_bytes == 0


@pytest.mark.parametrize(("room", "fits"), [(3, False), (4, True), (100, True)])
def test_main_memory_that_is_full_is_an_error(room: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would leave the machine without memory is refused, and the step of growth shrinks to what is there."""
    pool, memory = make_pool(), host_memory(PAGE, step=32)
    memory.write(pool, np.arange(30))
    monkeypatch.setattr(pinned, "beside_reserve", lambda total, available: room * PAGE)
    if fits:
        memory.write(pool, np.arange(6))
        assert memory._slots.reserved_bytes == (32 + min(room, 32)) * PAGE
        return
    with pytest.raises(SpillError, match=r"cannot move .* to main memory: .* left .*name a spill_dir"):
        memory.write(pool, np.arange(6))
    assert used_slots(memory) == 30
    memory.write(pool, np.arange(2))


class Recorder:
    """Stands for a stream and for the one that is current."""

    def __init__(self, name: str, seen: list[object]) -> None:
        self.name, self.seen = name, seen

    def __getattr__(self, action: str) -> Any:
        return lambda *others: self.seen.append((self.name, action, *others)) or action


@pytest.mark.parametrize("fails", [False, True])
def test_order_on_the_side_stream(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy comes after what was computed; one that fails halfway is done before its pages are given back."""
    seen: list[object] = []
    side, current = Recorder("side", seen), Recorder("current", seen)

    def copy() -> None:
        seen.append("copy")
        if fails:
            raise MemoryError

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    copies = SideStream(torch.device("cuda", 0))
    with pytest.raises(MemoryError) if fails else nullcontext():
        copies.wait(copies.run(copy))
    wanted: list[object] = [("side", "wait_stream", current), "copy"]
    after = (
        [("side", "synchronize")] if fails else [("side", "record_event"), ("current", "wait_event", "record_event")]
    )
    assert seen == wanted + after


def test_memory_that_cannot_be_pinned_is_pageable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, whatever was pinned before; what moves comes back as it was."""
    asked: list[int] = []

    def pin(size: int) -> Tensor:
        asked.append(size)
        if len(asked) > 1:
            raise MemoryError("the system gives no 0 MB of pinned memory")
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(pinned, "pinned_memory", pin)
    slots = PagePool(CPU, PAGE, PAGE, PinnedFirst().reserve)
    pool, memory = make_pool(), HostMemory(CPU, slots, LateCopies())
    kept = {first: fill(pool, np.arange(first, first + 4), first) for first in (0, 4, 8)}
    moved = {first: memory.write(pool, np.arange(first, first + 4)) for first in kept}
    memory.wait()
    for first, places in moved.items():
        memory.read(places, pool, np.arange(20, 24))
        memory.wait(places)
        assert torch.equal(pool.read(np.arange(20, 24)), kept[first])
    assert asked == [4 * PAGE] * 2
    [record] = [each for each in caplog.records if each.name == "daf"]
    assert "pageable memory from now on" in record.getMessage()


def test_a_machine_without_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> Tensor:
        raise MemoryError("the system gives none")

    monkeypatch.setattr(pinned, "pinned_memory", none)
    monkeypatch.setattr(pinned, "system_memory", none)
    memory = HostMemory(CPU, PagePool(CPU, PAGE, PAGE, PinnedFirst().reserve), Broken())
    with pytest.raises(SpillError, match=r"to main memory: .*Free main memory, name a spill_dir"):
        memory.write(make_pool(), np.arange(4))
    assert used_slots(memory) == 0


def test_main_memory_has_nothing_below_it() -> None:
    assert host_memory_of(CPU, PAGE) is None
    assert devices.host_memory_of is host_memory_of


def make_pager(budget: int) -> tuple[Pager, HostMemory]:
    memory = host_memory(PAGE)
    return Pager(PagePool(CPU, 4 * PAGE, PAGE), budget * PAGE, 0, memory), memory


def read(pager: Pager, lease: Any) -> None:
    with pager.reading(lease):
        assert torch.equal(pager.pool.read(lease.pages), content(lease))


def test_next_to_move_is_copied_before_its_room_is_needed() -> None:
    """Once another activation like the last would not fit, the one that it would push out is on its way."""
    pager, memory = make_pager(6)
    leases = [write(pager, 2) for _ in range(2)]
    assert used_slots(memory) == 0
    leases.append(write(pager, 2))
    assert [lease.slots is not None for lease in leases] == [True, False, False]
    assert all(lease.resident for lease in leases)
    leases.append(write(pager, 2))
    assert not leases[0].resident
    assert [lease.slots is not None for lease in leases] == [True, True, False, False]
    assert pager.finish_step().spilled_bytes == 4 * PAGE
    check_pager(pager)


def test_what_may_be_dropped_is_not_copied_ahead() -> None:
    """Planes go first, and what they leave room for need not move."""
    pager, memory = make_pager(6)
    write(pager, 1, [4], [1.0])
    write(pager, 1)
    assert used_slots(memory) == 0
    write(pager, 2)
    assert (used_slots(memory), pager.finish_step().dropped_planes) == (0, 1)


def test_full_main_memory_is_no_error_before_room_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    pager, _ = make_pager(6)
    monkeypatch.setattr(pinned, "beside_reserve", lambda total, available: 0)
    leases = [write(pager, 2) for _ in range(3)]
    with pytest.raises(SpillError):
        write(pager, 2)
    check_pager(pager)
    for lease in leases:
        read(pager, lease)


def test_backward_finds_the_next_on_its_way() -> None:
    """Each read queues the copies of those that are needed next, as many as there is room for, on its own thread."""
    pager, memory = make_pager(6)
    leases = [write(pager, 2) for _ in range(6)]
    assert [lease.resident for lease in leases] == [False] * 3 + [True] * 3
    for number in range(5, -1, -1):
        assert leases[number].resident
        read(pager, leases[number])
        pager.release(leases[number])
    assert pager._read_ahead._executor is None
    assert (pager.settle(), used_slots(memory)) == (0, 0)
    check_pager(pager)


def test_release_of_what_is_on_its_way_leaves_its_pages_to_others() -> None:
    """A copy that nobody waited for must not land on what the pages hold next, nor in slots that are used again."""
    pager, memory = make_pager(6)
    leases = [write(pager, 2) for _ in range(6)]
    pager.release(leases.pop())
    read(pager, leases[-1])
    assert copies_of(memory).queue
    while leases:
        pager.release(leases.pop())
    assert (pager.settle(), memory._arrivals) == (0, {})
    others = [write(pager, 2) for _ in range(5)]
    for lease in reversed(others):
        read(pager, lease)
        pager.release(lease)
    assert (pager.settle(), used_slots(memory)) == (0, 0)
