"""Exact: a copy of every byte, on pages."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import Self, override

from daf_core.codecs.base import EncodeContext, PagedActivation
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.memory.lease import Lease
from daf_core.memory.pager import Pager

CHUNK_PAGES = 256
"""Pages that are copied at a time: 1 MB."""


class ByteCopyActivation(PagedActivation):
    """A tensor on pages, from where it can move to the next tier; a tensor that stays as it is cannot move."""

    name: ClassVar[str] = "verbatim"
    lossy = False

    def __init__(self, pager: Pager, dtype: torch.dtype) -> None:
        super().__init__(pager)
        self._dtype = dtype

    @override
    @classmethod
    def accepts(cls, saved: SavedTensor) -> bool:
        return True

    @override
    @classmethod
    def encode(cls, saved: SavedTensor, ctx: EncodeContext) -> Self | None:
        movable = ctx.pager.spills and ctx.pager.budget is not None
        return cls.copy(ctx.values, ctx.pager) if movable else None

    @classmethod
    def copy(cls, values: Tensor, pager: Pager) -> Self:
        """Copies `values` to pages.

        Raises:
            ActivationBudgetError: The pages do not fit in the budget.
        """
        pool, stored = pager.pool, cls(pager, values.dtype)
        content = values.contiguous().view(-1).view(torch.uint8)
        with stored._new_pages(-(-content.numel() // pool.page_bytes)) as lease:
            for start in range(0, lease.size, CHUNK_PAGES):
                pages = lease.pages[start : start + CHUNK_PAGES]
                part = content[start * pool.page_bytes :][: pages.size * pool.page_bytes]
                full = pad(part, (0, pages.size * pool.page_bytes - part.numel()))
                pool.write(pages, full.view(pages.size, pool.page_bytes))
        return stored

    @override
    def _decode(self, out: Tensor, lease: Lease) -> None:
        pool = self.pager.pool
        in_place = out.is_contiguous() and out.dtype is self._dtype
        dense = out if in_place else torch.empty(out.shape, dtype=self._dtype, device=out.device)
        content = dense.view(-1).view(torch.uint8)
        for start in range(0, lease.size, CHUNK_PAGES):
            part = content[start * pool.page_bytes :][: CHUNK_PAGES * pool.page_bytes]
            part.copy_(pool.read(lease.pages[start : start + CHUNK_PAGES]).view(-1)[: part.numel()])
        if not in_place:
            out.copy_(dense)
