"""The pagers of all devices that a model's activations lie on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from daf_core.config import DAFConfig
from daf_core.memory import forks
from daf_core.memory.books import PagerAccount
from daf_core.memory.pager import Pager
from daf_core.memory.pages.host_linked_pool import LinkedPool, Place
from daf_core.memory.pages.pool import PAGE_BYTES, PagePool
from daf_core.memory.release_clock import ReleaseClock
from daf_core.memory.system.available import AutoBudget
from daf_core.memory.tiers.base import Tier
from daf_core.memory.tiers.disk import SpillFile
from daf_core.memory.tiers.pinned import host_memory_of
from daf_kernels import PRECISIONS, HostBridge


class DevicePagers:
    """One pager for each device, made when the first activation lies there.

    A device's pager counts all that activations of the device hold, also on pages in the memory of its host.

    Args:
        config: Budget, spill folder and growth.
        page_bytes: Bytes in a page.
        links: Connect devices with their host; those of others have all their pages on the device.
        to_host: Whether a GPU's activations may move to main memory where there is no spill folder.

    Raises:
        SpillError: The spill folder takes no file.
    """

    def __init__(
        self,
        config: DAFConfig,
        page_bytes: int = PAGE_BYTES,
        links: Mapping[torch.device, HostBridge] | None = None,
        to_host: bool = True,
    ) -> None:
        self._page_bytes = page_bytes
        self.links = {} if links is None else links  # more of them may come
        self.place = Place()  # on which pages the calling thread encodes
        # Bytes that may be held at once on each device, "auto" for what is available, None for no limit.
        self.budget = config.memory_budget
        self._set_aside = 0
        self.clock = ReleaseClock()  # the time of releases
        self._least_planes = sum(bits <= config.kept_precision for bits in PRECISIONS)
        self._ways = config.ways_to_fit()
        self._step = None if isinstance(config.pool_growth, str) else config.pool_growth  # of each pool
        self._to_host = to_host
        self._file = None if config.spill_dir is None else SpillFile(config.spill_dir, page_bytes)
        self._pagers: dict[torch.device, Pager] = {}
        self._available: dict[torch.device, AutoBudget] = {}
        self._lock = forks.lock(forks.Level.DEVICES)

    def on(self, device: torch.device) -> Pager:
        """Returns the device's pager."""
        pager = self._pagers.get(device)
        return self._add(device) if pager is None else pager

    @property
    def total_budget(self) -> int | None:
        """Bytes that may be held on all devices that have pages; None where one of them has no limit.

        A model on a GPU may save a number that lies in the memory of the CPU, which makes no room on the GPU.
        """
        budgets = [pager.budget for pager in list(self._pagers.values()) if pager.pool.reserved_bytes]
        limited = [budget for budget in budgets if budget is not None]
        return sum(limited) if budgets and len(limited) == len(budgets) else None

    def set_budget(self, budget: int | str | None, set_aside: int = 0) -> None:
        """Changes the budget of every device; "auto" follows what is available, and None is no limit.

        `set_aside` is the part of it for activations that stay as they are.

        Raises:
            ActivationBudgetError: What a device holds does not fit even if everything is given up that may be; its
                budget stays as it was.
            SpillError: The next tier takes nothing more.
        """
        for device, pager in list(self._pagers.items()):
            pager.set_budget(self._bytes(budget, device, pager))
            pager.set_aside = set_aside
        self.budget, self._set_aside = budget, set_aside
        if budget != "auto":
            self._available.clear()

    def follow_available_memory(self) -> None:
        """Adapts an "auto" budget to the memory that is available now; the errors are those of `set_budget`."""
        if self.budget == "auto":
            self.set_budget("auto")

    def finish_step(self) -> list[PagerAccount]:
        """Ends a step on all devices and returns what was done in it."""
        for available in self._available.values():
            available.finish_step()
        return [pager.finish_step() for pager in list(self._pagers.values())]

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that forgets what was done in this step from now on, and releases unused pages."""
        before = {pager: replace(pager.account) for pager in list(self._pagers.values())}

        def restore() -> None:
            for pager in list(self._pagers.values()):
                pager.set_budget(pager.budget)  # waits for what is being read back
                pager.account = replace(before.get(pager, PagerAccount()))  # a pager may be newer than the snapshot
                pager.shrink()

        return restore

    @property
    def held_bytes(self) -> int:
        """Bytes that are held on all devices."""
        return sum(pager.settle() for pager in list(self._pagers.values()))

    def room_beside(self) -> int | None:
        """Returns the bytes that the budget leaves beside what is held; None where no number limits them."""
        return self.budget - self.held_bytes if isinstance(self.budget, int) else None

    @property
    def leased_pages(self) -> int:
        """Pages that are in use on all devices."""
        return sum(pager.leased_pages for pager in list(self._pagers.values()))

    @property
    def resident_bytes(self) -> int:
        """Bytes of the page pools of all devices that take memory."""
        return sum(pager.pool.resident_bytes for pager in list(self._pagers.values()))

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the page pools of all devices."""
        return sum(pager.pool.reserved_bytes for pager in list(self._pagers.values()))

    def _add(self, device: torch.device) -> Pager:
        with self._lock:
            if device not in self._pagers:
                pool, tier = self._make_pool(device), self._next_tier(device)
                pager = Pager(pool, None, self._least_planes, tier, self.clock, self._ways)
                pager.set_budget(self._bytes(self.budget, device, pager))
                pager.set_aside = self._set_aside
                self._pagers[device] = pager
            return self._pagers[device]

    def _make_pool(self, device: torch.device) -> PagePool:
        link = self.links.get(device)
        if link is None:
            return PagePool(device, self._step, self._page_bytes)
        return LinkedPool(device, self._step, self._page_bytes, link, self.place)

    def _next_tier(self, device: torch.device) -> Tier | None:
        if self._file is not None or not self._to_host or device in self.links:  # the latter are on their host already
            return self._file
        return host_memory_of(device, self._page_bytes)

    def _bytes(self, budget: int | str | None, device: torch.device, pager: Pager) -> int | None:
        if not isinstance(budget, str):
            return budget
        outside = pager.outside_bytes
        return self._available.setdefault(device, AutoBudget(device)).update(pager.pool.resident_bytes + outside)
