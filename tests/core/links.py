"""A link that stands for a GPU's on a machine that has none: copies and reads are done late, and nobody else waits."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from daf_core.saved_tensors import backends
from daf_kernels import Backend, PageMemory, Pages
from daf_kernels.cpu.backend import CpuBackend

LATE = 0.003
"""Seconds until a copy is there."""


class LateLink:
    """See `daf_kernels.HostBridge`.

    Attributes:
        reserved: Memory that the device can read.
        copied: Bytes of each copy.
        reading: Addresses of pages that the device may still be reading.
        error: What copies fail with; a `MemoryError` is one of `reserve`.
    """

    def __init__(self) -> None:
        self.reserved: list[Tensor] = []
        self.copied: list[int] = []
        self.reading: set[int] = set()
        self.error: BaseException | None = None
        self.noted = True
        self._ordered = threading.local()

    def reserve(self, size: int) -> Tensor:
        if isinstance(self.error, MemoryError):
            raise self.error
        self.reserved.append(torch.empty(size, dtype=torch.uint8))
        return self.reserved[-1]

    def has(self, address: int) -> bool:
        """Whether an address lies in memory that the device can read."""
        return any(0 <= address - memory.data_ptr() < memory.nbytes for memory in self.reserved)

    def mark(self) -> threading.Event:
        return _Late()

    @contextmanager
    def after(self, moment: Any) -> Generator[None]:
        assert isinstance(moment, _Late)
        self._ordered.now = True
        try:
            yield
        finally:
            self._ordered.now = False

    def copy(self, values: Tensor, into: Tensor) -> Any:
        assert getattr(self._ordered, "now", False), "the tensor may not be made yet"
        assert self.has(into.data_ptr())
        if self.error is not None:
            raise self.error
        self.copied.append(values.nbytes)
        into.view(-1).view(torch.uint8).fill_(255)
        done = _Late()
        threading.Timer(LATE, _copy, (values, into, done)).start()
        return done

    def note_reads(self) -> None:
        self.noted = True

    def await_reads(self) -> None:
        assert self.noted, "a read was not noted"
        self.reading.clear()


class _Late(threading.Event):
    def synchronize(self) -> None:
        assert self.wait(30)


def _copy(values: Tensor, into: Tensor, done: _Late) -> None:
    into.copy_(values)
    done.set()


def reading(backend: Backend, link: LateLink) -> Backend:
    """Returns kernels that may still be reading pages when they return."""

    def late(decode: Any) -> Any:
        def begin(*arguments: Any) -> None:
            decode(*arguments)
            memory, pages = arguments[-2:]
            link.noted = False
            link.reading |= set(memory.addresses(pages).tolist())

        return begin

    for name in ("decode", "decode_slopes", "decode_mask", "rectify"):
        setattr(backend, name, late(getattr(backend, name)))
    return backend


class CheckedHost(CpuBackend):
    """Kernels that look whose memory they are given: what was copied goes to pages that the device can read."""

    def __init__(self, link: LateLink) -> None:
        super().__init__()
        self._link = link

    def _over(self, values: Tensor, kernel: Any, memory: PageMemory, pages: Pages, **access: Any) -> int:
        addresses = memory.addresses(pages)
        on_host = {self._link.has(address) for address in addresses.tolist()}
        assert on_host == {True} or (on_host == {False} and not self._link.has(values.data_ptr()))
        assert not (True in on_host and self._link.reading & set(addresses.tolist())), "the device is still reading"
        assert np.unique(addresses).size == addresses.size
        return super()._over(values, kernel, memory, pages, **access)


def connect(monkeypatch: pytest.MonkeyPatch, device: Backend | None = None) -> LateLink:
    """Makes the CPU a device with a link for engines that are made from now on.

    Args:
        monkeypatch: The test's.
        device: Its kernels.
    """
    link = LateLink()
    kernels = itertools.cycle([reading(device or CpuBackend(), link), CheckedHost(link)])
    monkeypatch.setattr(backends, "host_bridge", lambda device: link)
    monkeypatch.setattr(backends, "load_backend", lambda *_: next(kernels))
    return link
