"""Copies of a GPU that are made as late as what waits for them allows, on a machine that has none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
import torch

from daf_core.memory import devices
from daf_core.memory.pages.pool import PAGE_BYTES, PagePool
from daf_core.memory.tiers.pinned import HostMemory

CPU = torch.device("cpu")


class LateCopies:
    """Copies that nothing makes but a wait: what uses pages without one finds, or leaves, the wrong bytes in them."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self.made = 0

    def run(self, copy: Callable[[], None]) -> int:
        self.queue.append(copy)
        return self.made + len(self.queue)

    def wait(self, mark: int) -> None:
        while self.made < mark:
            self.queue.popleft()()
            self.made += 1


def host_memory(page_bytes: int = PAGE_BYTES, step: int = 64) -> HostMemory:
    """Returns main memory below main memory, with late copies; it grows by a number of pages."""
    return HostMemory(CPU, PagePool(CPU, step * page_bytes, page_bytes), LateCopies())


def copies_of(memory: HostMemory) -> LateCopies:
    assert isinstance(memory._copies, LateCopies)
    return memory._copies


@pytest.fixture
def like_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has engines treat the CPU as a GPU whose activations may move to main memory."""
    monkeypatch.setattr(devices, "host_memory_of", lambda device, page_bytes: host_memory(page_bytes))
