"""Lossy: codes of up to 8 bits, cut into planes that lie on separate pages."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self, override

from daf_core.codecs.base import PagedActivation
from daf_core.memory.pool import PagePool
from daf_kernels import Backend, Pages, PlaneLayout, Seed, plane_layout, planes_for

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types that the kernels encode."""


class PlanesActivation(PagedActivation):
    """Codes between the minimum and maximum of their scaling group; decoding restores the group's mean and deviation.

    Its layout is `daf_kernels.layout`, its numerics `daf_kernels.reference`.
    """

    codec: ClassVar[str] = "planes"

    def __init__(self, pool: PagePool, pages: Pages, backend: Backend, layout: PlaneLayout, planes: int) -> None:
        super().__init__(pool, pages)
        self._backend = backend
        self._layout = layout
        self._planes = planes

    @classmethod
    def encode(
        cls, values: Tensor, row: int, precision: int, pool: PagePool, backend: Backend, seed: Seed | None
    ) -> Self | None:
        """Encodes `values` straight into pages.

        Args:
            values: Tensor of one of `DTYPES`.
            row: Elements in a row; scaling groups are rows or equal pieces of rows.
            precision: Bits of a code: 1, 2, 4 or 8.
            pool: Where the pages come from.
            backend: Kernels of the tensor's device.
            seed: Random stream for stochastic rounding; None rounds to nearest.

        Returns:
            None where pages would take no less than the values themselves, or where a value is not finite: an overflow
            under fp16, or a logit masked with -inf, must reach backward as it is.

        Raises:
            ActivationBudgetError: The pages do not fit in the budget.
        """
        layout, planes = plane_layout(values.numel(), row, pool.page_bytes), planes_for(precision)
        count = layout.pages(planes)
        if count * pool.page_bytes >= values.numel() * values.element_size():
            return None
        stored = cls(pool, pool.lease(count), backend, layout, planes)
        return stored if backend.encode(values, layout, planes, pool, stored.pages, seed) else None

    @override
    def decode_into(self, out: Tensor) -> None:
        self._backend.decode(out, self._layout, self._planes, self.pool, self.pages)
