"""Pages of a device, on the device and in the memory of its host."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor
from typing_extensions import override

from daf_core.memory.pages.pool import PagePool
from daf_kernels import HostBridge, Pages

HOST_STEP = 32 << 20
"""Bytes by which pages of the host grow: torch pins memory in powers of two, so another size would waste the rest."""

_FIRST_ON_HOST = 1 << 40
"""Number of the first page in host memory."""


class Place(threading.local):
    """Where the calling thread encodes."""

    on_host = False  # whether it takes pages in host memory


class LinkedPool(PagePool):
    """Pages on a device, and, for threads that encode on its host, in memory there that the device can read.

    All pages of one activation lie in the same memory.
    """

    def __init__(self, device: torch.device, step: int | None, page_bytes: int, link: HostBridge, place: Place) -> None:
        super().__init__(device, step, page_bytes)
        self.uniform = False
        # A device may be behind with reading what its host has given up, and torch knows of no kernel that reads there.
        self._host = PagePool(torch.device("cpu"), HOST_STEP, page_bytes, link.reserve, link.await_reads)
        weakref.finalize(self, link.await_reads).atexit = False
        self._link = link
        self._place = place

    @override
    def take(self, count: int, limit: int | None = None) -> Pages:
        if not self._place.on_host:
            return super().take(count, None if limit is None else limit - self._host.reserved_bytes)
        pages = self._host.take(count, None if limit is None else limit - super().reserved_bytes)
        self._link.await_reads()  # of what lay on them
        return pages + _FIRST_ON_HOST

    @override
    def give(self, pages: Pages) -> None:
        on_host = pages >= _FIRST_ON_HOST
        super().give(pages[~on_host])
        self._host.give(pages[on_host] - _FIRST_ON_HOST)

    @override
    def finish_step(self, peak: int | None = None) -> int:
        return super().finish_step() + self._host.finish_step()

    @override
    def release(self, keep: int = 0) -> None:
        super().release(keep)
        self._host.release(keep)

    @property
    @override
    def used_pages(self) -> int:
        return super().used_pages + self._host.used_pages

    @property
    @override
    def reserved_bytes(self) -> int:
        return super().reserved_bytes + self._host.reserved_bytes

    @override
    def addresses(self, pages: Pages) -> Pages:
        return self._host.addresses(pages - _FIRST_ON_HOST) if _on_host(pages) else super().addresses(pages)

    @override
    def read(self, pages: Pages) -> Tensor:
        if _on_host(pages):
            return self._host.read(pages - _FIRST_ON_HOST).to(self.device)
        return super().read(pages)

    @override
    def write(self, pages: Pages, content: Tensor) -> None:
        if _on_host(pages):
            self._host.write(pages - _FIRST_ON_HOST, content)
        else:
            super().write(pages, content)


def _on_host(pages: Pages) -> bool:
    return pages.size > 0 and int(pages[0]) >= _FIRST_ON_HOST
