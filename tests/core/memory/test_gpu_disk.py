"""Activations of a GPU that move to main memory: the real copies, on a machine that has one; late ones elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from daf_core.memory import devices
from daf_core.memory.pager import Pager
from daf_core.memory.pages.pool import PagePool
from daf_core.memory.tiers.pinned import CPU, HostMemory, SideStream, host_memory_of
from daf_kernels.reference.backend import ReferenceBackend
from daf_kernels.triton.backend import TritonBackend
from tests.core.books import used_slots
from tests.core.late_copies import host_memory
from tests.core.leases import PAGE, content
from tests.core.test_gpu_kernels import train
from tests.kernels.triton_device import DEVICE

needs_gpu = pytest.mark.skipif(DEVICE == CPU, reason="streams and pinned memory need a GPU")

CYCLES = 20_000_000
"""About 10 ms of a GPU."""


@pytest.mark.parametrize("options", [{"precision": 4, "min_precision": 4}, {"precision": "exact"}], ids=["4", "exact"])
def test_gradients_are_those_without_a_budget(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Half of what is held moves out and comes back as it was."""
    if DEVICE == CPU:
        monkeypatch.setattr(devices, "host_memory_of", lambda device, page_bytes: host_memory(page_bytes))
    expected, held = train(monkeypatch, ReferenceBackend(), memory_budget="1GB", **options)
    found, least = train(monkeypatch, TritonBackend(), memory_budget=held // 2, **options)
    assert least <= held // 2
    assert all(torch.equal(gradient, wanted) for gradient, wanted in zip(found, expected, strict=True))


class SlowStream(SideStream):
    """A side stream on which every copy takes long."""

    def run(self, copy: Any) -> torch.cuda.Event:
        def slow_copy() -> None:
            torch.cuda._sleep(CYCLES)
            copy()
            torch.cuda._sleep(CYCLES)

        return super().run(slow_copy)


def make_pager(slow: bool) -> tuple[Pager, HostMemory]:
    memory = host_memory_of(DEVICE, PAGE)
    assert memory is not None
    if slow:
        memory._copies = SlowStream(DEVICE)
    return Pager(PagePool(DEVICE, page_bytes=PAGE), 6 * PAGE, 0, memory), memory


@needs_gpu
@pytest.mark.parametrize("slow", [False, True], ids=["slow kernels", "slow copies"])
@pytest.mark.parametrize("stream", ["default", "other"])
def test_copies_and_kernels_wait_for_each_other(slow: bool, stream: str) -> None:
    """Whichever of them is late: pages are copied once they are written, and written once they are copied."""
    pager, memory = make_pager(slow)
    current = torch.cuda.Stream(DEVICE) if stream == "other" else torch.cuda.default_stream(DEVICE)
    with torch.cuda.stream(current):
        leases = []
        for _ in range(8):
            with pager.writing(2) as lease:
                if not slow:
                    torch.cuda._sleep(CYCLES)
                pager.pool.write(lease.pages, content(lease).to(DEVICE, non_blocking=True))
            leases.append(lease)
        found = []
        for lease in reversed(leases):
            with pager.reading(lease):
                if not slow:
                    torch.cuda._sleep(CYCLES)
                found.append(pager.pool.read(lease.pages))
            pager.release(lease)
        for lease, pages in zip(reversed(leases), found, strict=True):
            assert torch.equal(pages.cpu(), content(lease)), lease.serial
    assert (pager.settle(), used_slots(memory)) == (0, 0)


@needs_gpu
def test_thread_does_not_wait_for_copies() -> None:
    """Moving out and bringing back are queued behind what the GPU computes."""
    pager, _ = make_pager(slow=False)
    leases = [write_on_gpu(pager) for _ in range(3)]
    torch.cuda.synchronize(DEVICE)
    torch.cuda._sleep(100 * CYCLES)
    kernels = torch.cuda.current_stream(DEVICE).record_event()
    leases.append(write_on_gpu(pager))
    for lease in reversed(leases):
        with pager.reading(lease):
            pass
    assert not kernels.query()
    torch.cuda.synchronize(DEVICE)


def write_on_gpu(pager: Pager) -> Any:
    """Writes pages with nothing but a kernel."""
    with pager.writing(2) as lease:
        pager.pool.write(lease.pages, torch.zeros(2, PAGE, dtype=torch.uint8, device=DEVICE))
    return lease


@needs_gpu
def test_memory_is_pinned_and_comes_back_whatever_dies_first() -> None:
    """A pool that is freed with copies under way is not used for anything else before they are done."""
    memory = host_memory_of(DEVICE, PAGE)
    assert memory is not None
    memory._copies = SlowStream(DEVICE)
    pool = PagePool(DEVICE, page_bytes=PAGE)
    pages = pool.take(4)
    wanted = torch.arange(4 * PAGE, device=DEVICE).view(4, PAGE).to(torch.uint8)
    pool.write(pages, wanted)
    slots = memory.write(pool, pages)
    assert all(view.is_pinned() for _, view in memory._slots.runs(slots))
    del pool
    trash = [torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE) for _ in range(8)]
    pool = PagePool(DEVICE, page_bytes=PAGE)
    pages = pool.take(4)
    memory.read(slots, pool, pages)
    memory.wait(slots)
    assert torch.equal(pool.read(pages), wanted)
    assert not any(bool(tensor.any()) for tensor in trash)


def test_more_than_one_region_and_run() -> None:
    """Pages and slots that are scattered come back, on a GPU as elsewhere."""
    pool = PagePool(DEVICE, page_bytes=PAGE)
    pages = pool.take(40)[::3].copy()
    memory = host_memory_of(DEVICE, PAGE) or host_memory(PAGE, 5)
    wanted = torch.arange(pages.size, device=DEVICE)[:, None].expand(-1, PAGE).to(torch.uint8)
    pool.write(pages, wanted)
    first = memory.write(pool, pages[:3])
    slots = memory.write(pool, pages)
    memory.free(first)
    slots = np.concatenate([memory.write(pool, pages[:5]), slots[5:]])
    memory.wait()
    pool.write(pages, torch.zeros_like(wanted))
    memory.read(slots, pool, pages)
    memory.wait(slots)
    assert torch.equal(pool.read(pages), wanted)
