"""Addresses of pages on a GPU: uploaded once, right whatever becomes of the memory, and not without bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from daf_kernels import FixedPages, Pages
from daf_kernels.triton.page_tables import PageTables
from tests.kernels.pretended_gpu import PretendedGpu, Stream, pretend

DEVICE = torch.device("cpu")
MEMORY = FixedPages(100, 128)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    return pretend(monkeypatch)


def table(tables: PageTables, *pages: int, memory: FixedPages = MEMORY) -> Tensor:
    """Returns the table of some pages, after a look at it."""
    numbers: Pages = np.array(pages)
    found = tables.table(memory, numbers, DEVICE)
    assert found.tolist() == memory.addresses(numbers).tolist()
    return found


def test_the_same_pages_are_uploaded_once(gpu: PretendedGpu) -> None:
    tables = PageTables()
    first, other = table(tables, 3, 1, 2), table(tables, 1, 2, 3)
    assert table(tables, 3, 1, 2) is first
    assert table(tables, 1, 2, 3) is other
    assert gpu.uploads == [24, 24]


def test_pages_of_other_memory_have_other_addresses(gpu: PretendedGpu) -> None:
    """Though their numbers are the same: a pool has given a region back, and reserved another one."""
    tables = PageTables()
    table(tables, 1, 2)
    table(tables, 1, 2, memory=FixedPages(100, 128))
    assert len(gpu.uploads) == 2


def test_each_stream_uploads_what_its_kernels_read(gpu: PretendedGpu) -> None:
    tables = PageTables()
    main = table(tables, 5)
    with gpu.on(Stream(3)):
        side = table(tables, 5)
        assert table(tables, 5) is side
    assert table(tables, 5) is main
    assert len(gpu.uploads) == 2


def test_what_was_not_used_for_the_longest_time_goes_first(gpu: PretendedGpu) -> None:
    tables = PageTables(most_bytes=3 * 8)
    kept = [table(tables, number) for number in range(3)]
    assert table(tables, 0) is kept[0]
    table(tables, 3)
    assert table(tables, 0) is kept[0]
    assert table(tables, 2) is kept[2]
    assert len(gpu.uploads) == 4
    assert table(tables, 1) is not kept[1]
    assert len(gpu.uploads) == 5


def test_a_table_beyond_the_bound_is_not_kept(gpu: PretendedGpu) -> None:
    tables = PageTables(most_bytes=3 * 8)
    for _ in range(2):
        table(tables, 1, 2, 3, 4)
    assert len(gpu.uploads) == 2
    kept = table(tables, 1, 2, 3)
    assert table(tables, 1, 2, 3) is kept
