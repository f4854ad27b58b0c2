"""Gives memory back that nobody uses: to the device, and to the system."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterable

import torch


def release_memory(devices: Iterable[torch.device]) -> None:
    """Frees what only reference cycles keep, and what the allocators of main memory and of these devices keep."""
    gc.collect()
    release_caches(devices)


def release_caches(devices: Iterable[torch.device]) -> None:
    """Does what `release_memory` does, but for what reference cycles keep."""
    for kind in {device.type for device in devices} - {"cpu", "meta"}:
        torch.get_device_module(kind).empty_cache()
    release_free_memory()


def release_free_memory() -> None:
    """Has the allocator of main memory give back what it keeps of freed memory, so that resident means live.

    tcmalloc, mimalloc and glibc can; glibc otherwise keeps half of what a training step frees.
    """
    if os.name == "nt":  # where a process has no symbols of its own to look up
        return
    process = ctypes.CDLL(None)
    if hasattr(process, "MallocExtension_ReleaseFreeMemory"):  # tcmalloc
        process.MallocExtension_ReleaseFreeMemory()
    elif hasattr(process, "mi_collect"):  # mimalloc
        process.mi_collect(True)
    elif hasattr(process, "malloc_trim"):  # glibc
        process.malloc_trim(0)
