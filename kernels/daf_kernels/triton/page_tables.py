"""Addresses of pages, where kernels read them."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from daf_kernels.backend import PageMemory, Pages, is_capturing
from daf_kernels.triton.launch import stream_number

Key = tuple[torch.device, int, bytes]
"""A device, a stream of it, and addresses."""

MOST_BYTES = 32 << 20
"""Bytes of the tables that are kept: those of 16 GB of activations, as a table has 8 bytes for a page."""


def upload(addresses: Pages, device: torch.device) -> Tensor:
    """Returns addresses on a GPU, for kernels that the calling thread launches."""
    # From pinned memory, from which a GPU copies without being waited for.
    return torch.from_numpy(addresses).pin_memory().to(device, non_blocking=True)


def computed(addresses: Pages, page_bytes: int, device: torch.device) -> Tensor:
    """Returns addresses of pages as a GPU computes them: a CUDA graph would copy what the host has there by then."""
    ends = np.flatnonzero(np.diff(addresses) != page_bytes) + 1
    runs = [
        torch.arange(int(run[0]), int(run[-1]) + 1, page_bytes, dtype=torch.int64, device=device)
        for run in np.split(addresses, ends)
    ]
    return runs[0] if len(runs) == 1 else torch.cat(runs)


class PageTables:
    """Tables of addresses on GPUs. Steps that are alike get the same pages, whose addresses are there already.

    A table is found by the addresses themselves, so that it is right whatever has become of the memory; and by the
    stream that it was uploaded on, so that kernels read it after that without being told to wait. Thread-safe.

    Args:
        most_bytes: Bytes of all tables that are kept; those that were not used for the longest time go first.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._tables: OrderedDict[Key, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def table(self, memory: PageMemory, pages: Pages, device: torch.device) -> Tensor:
        """Returns the addresses of pages as int64 of shape (pages,), for kernels that the calling thread launches."""
        addresses, stream = memory.addresses(pages), stream_number(device)
        if stream is None:
            return torch.from_numpy(addresses)
        if is_capturing():  # no other graph, and nothing outside of one, may rely on what this one computes
            return computed(addresses, memory.page_bytes, device)
        key = device, stream, addresses.tobytes()
        with self._lock:
            table = self._tables.get(key)
            if table is None:
                table = upload(addresses, device)
                self._keep(key, table)
            else:
                self._tables.move_to_end(key)
        return table

    def _keep(self, key: Key, table: Tensor) -> None:
        """Adds a table and drops old ones; torch gives their memory to what the stream does after their kernels."""
        self._tables[key] = table
        self._bytes += table.nbytes
        while self._bytes > self._most_bytes:
            self._bytes -= self._tables.popitem(last=False)[1].nbytes
