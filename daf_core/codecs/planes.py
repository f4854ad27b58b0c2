"""Lossy: codes of up to 8 bits, cut into planes that lie on separate pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self, override

from daf_core.codecs.base import PagedActivation
from daf_core.codecs.deferred_check import PendingCheck, PendingChecks
from daf_core.codecs.plane_importance import LEVELS, plane_importances, rounding_errors
from daf_core.codecs.scaling_groups import Grouping
from daf_core.memory.lease import Lease
from daf_core.memory.pager import Pager
from daf_core.memory.pages.pool import PagePool
from daf_kernels import Backend, DeviceFlag, Pages, PlaneLayout, Seed, plane_layout, planes_for

TYPICAL_RANGE = 32.0
"""Squared range of a scaling group over its variance: that of 256 normal values. Without a budget nothing is dropped,
and what a range is goes without asking; should a budget be set later, it counts for what is held then."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types that the kernels encode."""


class PlanesActivation(PagedActivation):
    """Codes between the minimum and maximum of their scaling group; decoding restores the group's mean and deviation.

    Its layout is `daf_kernels.layout`, its numerics `daf_kernels.reference.codec`. Planes may be dropped at any time;
    what is left decodes at a lower precision.
    """

    codec: ClassVar[str] = "planes"

    def __init__(self, pager: Pager, lease: Lease, backend: Backend, layout: PlaneLayout, grouping: Grouping) -> None:
        super().__init__(pager, lease)
        self._backend = backend
        self._layout = layout
        self._grouping = grouping
        self._doubt: PendingCheck | None = None

    @property
    def precision(self) -> int:
        """Code bits that are left."""
        return LEVELS[self.lease.planes]

    @property
    def held_bytes(self) -> int:
        """Bytes of its pages, in memory or in the next tier."""
        return self.lease.size * self.pager.pool.page_bytes

    @staticmethod
    @lru_cache(maxsize=4096)
    def sizes(elements: int, row: int, element_size: int, page_bytes: int) -> list[int]:
        """Returns the bytes of so many elements at each of `LEVELS`, and as they are, which is the most."""
        layout = plane_layout(elements, row, page_bytes)
        raw = elements * element_size
        return [*(min(layout.pages(planes) * page_bytes, raw) for planes in range(len(LEVELS))), raw]

    @classmethod
    def encode(
        cls,
        values: Tensor,
        grouping: Grouping,
        precision: int,
        pager: Pager,
        backend: Backend,
        seed: Seed | None,
        finite: bool = True,
        errors: Sequence[float] | None = None,
        doubts: PendingChecks | None = None,
    ) -> Self | None:
        """Encodes `values` straight into pages, at the precision that the budget leaves them.

        Args:
            values: Tensor of one of `DTYPES`.
            grouping: Which of them share a scaling group.
            precision: Bits of a code at most: 8, 4, 2, 1, or 0 for the means of scaling groups alone.
            pager: Where the pages come from.
            backend: Kernels of the tensor's device.
            seed: Random stream for stochastic rounding; None rounds to nearest.
            finite: Whether scaling groups with a NaN or an infinity are refused; otherwise all their values decode to
                NaN.
            errors: What the values' error does at 0 bits and at each of `PRECISIONS`, squared and in any unit that is
                the same for all activations; None estimates it from their range, where there is a budget.
            doubts: Keeps values while a device works out whether they are finite. None waits for it.

        Returns:
            None where pages would take no less than the values themselves, or where a value is not finite: an overflow
            under fp16, or a logit masked with -inf, must reach backward as it is. Where that turns out later, the
            values are kept beside the pages.

        Raises:
            ActivationBudgetError: Not even the header fits in the budget.
        """
        page_bytes = pager.pool.page_bytes
        layout, planes = plane_layout(values.numel(), grouping.row, page_bytes), planes_for(precision)
        if layout.pages(planes) * page_bytes >= values.numel() * values.element_size():
            return None
        arranged = grouping.arrange(values)
        pages = [layout.plane_pages(plane) for plane in range(planes)]
        sizes = [page_bytes * count for count in pages]
        if errors is None:
            known = pager.budget is not None
            relative_range = cls._relative_range(backend, arranged, layout) if known else TYPICAL_RANGE
            errors = rounding_errors(relative_range, values.numel())
        importances = plane_importances(errors, sizes)
        with pager.writing(layout.header_pages, pages, importances) as lease:
            usable = cls._write(backend, arranged, layout, lease.planes, pager.pool, lease.pages, seed)
        stored = cls(pager, lease, backend, layout, grouping)
        if finite and doubts is not None and not isinstance(usable, bool):
            stored._doubt = doubts.add(values, usable, pager)
        return stored if not finite or stored._doubt is not None or usable else None

    @override
    def decode_into(self, out: Tensor) -> None:
        exact = None if self._doubt is None else self._doubt.settle()
        if exact is None:
            super().decode_into(out)
        else:
            out.copy_(exact.unpack())

    @staticmethod
    def _relative_range(backend: Backend, values: Tensor, layout: PlaneLayout) -> float:
        return backend.relative_range(values, layout)

    @staticmethod
    def _write(
        backend: Backend,
        values: Tensor,
        layout: PlaneLayout,
        planes: int,
        pool: PagePool,
        pages: Pages,
        seed: Seed | None,
    ) -> bool | DeviceFlag:
        return backend.encode(values, layout, planes, pool, pages, seed)

    @override
    def _decode(self, out: Tensor, lease: Lease) -> None:
        self._backend.decode(self._grouping.arrange(out), self._layout, lease.planes, self.pager.pool, lease.pages)
