"""Leases whose pages are filled with what can be known again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from daf_core.memory.lease import Lease
from daf_core.memory.pager import Pager

PAGE = 128
"""Bytes in a page of the pools that are tested alone."""


def write(pager: Pager, fixed: int, planes: Sequence[int] = (), importances: Sequence[float] = ()) -> Lease:
    """Leases pages and fills them with `content`."""
    with pager.writing(fixed, planes, importances) as lease:
        pager.pool.write(lease.pages, content(lease))
    return lease


def content(lease: Lease) -> torch.Tensor:
    """Rows that differ from page to page and from lease to lease."""
    first = torch.arange(lease.size)[:, None] + 31 * lease.serial
    return ((first + torch.arange(PAGE)) % 251).to(torch.uint8)
