"""Lossy: codes of up to 8 bits, cut into planes that lie on separate pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from typing_extensions import Self, override

from daf_core.autograd.sites import Site
from daf_core.codecs.base import EncodeContext, PagedActivation, StoredActivation
from daf_core.codecs.common_row import Common
from daf_core.codecs.deferred_check import Compact, PendingCheck, PendingChecks
from daf_core.codecs.plane_importance import LEVELS, plane_importances, rounding_errors
from daf_core.codecs.raw import KeptStorage
from daf_core.codecs.saved_tensor import SavedTensor, TensorKind
from daf_core.codecs.scaling_groups import Grouping, Roots, Totals
from daf_core.codecs.sides import KeptSides
from daf_core.memory.lease import Lease, LeaseKind
from daf_core.memory.pager import Pager
from daf_core.readers.table import Bounds, Reading
from daf_kernels import Backend, DeviceFlag, PlaneLayout, is_capturing, planes_for
from daf_kernels.layout import LARGEST_SPREAD_RATIO

TYPICAL_RANGE = 32.0
"""Squared range of a scaling group over its variance: that of 256 normal values. Without a budget nothing is dropped,
and nobody asks for the range; a budget that is set later counts it for what is held then."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types that the kernels encode."""


class LossyStore(Protocol):
    """Stores activations at the precision of their site, in training, or keeps them to try precisions."""

    def codec(self, site: Site) -> str | None:
        """Returns the name of the codec that a calibration has chosen for a site; None where it has chosen none."""
        ...

    def store(
        self, codec: type[PlanesActivation], site: Site, reading: Reading | None, ctx: EncodeContext
    ) -> StoredActivation | None:
        """Stores a tensor of a site with a codec; None keeps it as it is.

        `reading` is what its reader reads of it, None where that is not known yet.
        """
        ...

    @property
    def token(self) -> object:
        """The same object as long as every site is stored in the same bits, rounded to nearest; None otherwise."""
        ...

    @property
    def checks(self) -> PendingChecks | None:
        """Keeps values until it is known whether they are finite; None waits for that."""
        ...

    def count(self, site: Site, sizes: Sequence[int], stored: PlanesActivation) -> None:
        """Counts what was stored of a site without `store`; `sizes` as `PlanesActivation.sizes`."""
        ...

    def sharpens(self, site: Site, deviation: float) -> bool:
        """Says whether a query or key takes more bits where the scores have a deviation."""
        ...

    def withdraw(self, site: Site, stored: StoredActivation | None) -> None:
        """Takes back what was stored of a site, unless others share it: it is stored otherwise now."""
        ...


class PlanesActivation(PagedActivation):
    """Codes between the minimum and maximum of their scaling group; decoding restores the group's mean and deviation.

    Its layout is `daf_kernels.layout`, its numerics `daf_kernels.reference.codec`. Planes may be dropped at any time;
    the planes that are left decode at a lower precision.
    """

    name: ClassVar[str] = "planes"
    # The autograd node that alone may read the codes; "" for every node. A codec with one is taken where a calibration
    # has found no other reader, and a smaller error.
    only_reader: ClassVar[str] = ""
    check: PendingCheck | None = None  # keeps the values until it is known whether the codes stand for them
    beside: Common | Roots | Totals | None = None  # what is kept beside the codes
    _kept: KeptStorage | None = None  # accounts for it
    _sides: KeptSides | None = None  # where decoded values belong

    def __init__(self, pager: Pager, backend: Backend, layout: PlaneLayout, groups: Grouping) -> None:
        self.pager = pager  # `super` takes as long as the rest
        self._backend = backend
        self.layout = layout  # where its codes lie
        self.groups = groups  # its scaling groups

    @property
    def precision(self) -> int:
        """Code bits that are left."""
        return LEVELS[self.lease.planes]

    @property
    @override
    def suits_rows(self) -> bool:
        return self.groups.suits_rows

    @property
    @override
    def bounds(self) -> Bounds | None:
        return self.groups.bounds

    @property
    def is_codes_alone(self) -> bool:
        """Whether nothing is kept beside its codes."""
        return self.beside is None and self._sides is None

    @property
    def held_bytes(self) -> int:
        """Bytes of its pages, in memory or in the next tier, and of what is kept beside them."""
        beside = sum(0 if part is None else part.nbytes for part in (self.beside, self._sides))
        return self.lease.size * self.pager.pool.page_bytes + beside

    @override
    @classmethod
    def accepts(cls, saved: SavedTensor) -> bool:
        return saved.form is TensorKind.LOSSY

    @override
    @classmethod
    def encode(cls, saved: SavedTensor, ctx: EncodeContext) -> StoredActivation | None:
        """See `StoredActivation.encode`; None where a normalization would enlarge the error of a row."""
        if ctx.groups is None:
            return None
        if saved.normalizes and ctx.groups.shares and spreads_differ(ctx.values, ctx.groups):
            return None
        assert ctx.lossy is not None
        return ctx.lossy.store(cls, saved.site, saved.reading, ctx)

    @classmethod
    def groups_of(cls, ctx: EncodeContext) -> Grouping:
        """Returns the scaling groups of its codes."""
        assert ctx.groups is not None
        return ctx.groups

    @classmethod
    def sizes(cls, ctx: EncodeContext) -> list[int]:
        """Returns the bytes of the values at each of `LEVELS`, and as they are, which is the most."""
        values, groups, page_bytes = ctx.values, cls.groups_of(ctx), ctx.pager.pool.page_bytes
        beside = groups.bytes_beside(values.numel(), page_bytes)
        return cls.sizes_of(values.numel(), groups.group, values.element_size(), page_bytes, beside)

    @staticmethod
    @lru_cache(maxsize=4096)
    def sizes_of(elements: int, group: int, element_size: int, page_bytes: int, beside: int) -> list[int]:
        """Returns `sizes` of so many elements, of which so many make a scaling group, with `Grouping.bytes_beside`."""
        layout = PlaneLayout(elements, group, page_bytes)
        raw = elements * element_size
        return [*(min(layout.pages(planes) * page_bytes + beside, raw) for planes in range(len(LEVELS))), raw]

    @staticmethod
    def pages_of(
        elements: int, group: int, element_size: int, planes: int, pager: Pager, beside: int
    ) -> LeaseKind | None:
        """Returns the kind of leases that so many planes take without a budget; None where they would save nothing."""
        page_bytes = pager.pool.page_bytes
        layout, header_pages, pages = _pages(elements, group, page_bytes, LEVELS[planes])
        if layout.pages(planes) * page_bytes + beside >= elements * element_size:
            return None
        return pager.kind(header_pages, pages, _typical_importances(elements, pages, page_bytes))

    @classmethod
    def write(cls, ctx: EncodeContext) -> Self | None:
        """Encodes the values of a context straight into pages, at the precision that the budget leaves them.

        Returns:
            None where pages would take no less than the values themselves, or where a value is not finite and the
            context requires it: an overflow under fp16, or a logit masked with -inf, must reach backward as it is.
            Where that turns out later, the values are kept beside the pages.

        Raises:
            ActivationBudgetError: Not even the header fits in the budget.
        """
        values, pager, groups = ctx.values, ctx.pager, cls.groups_of(ctx)
        page_bytes = pager.pool.page_bytes
        layout, header_pages, pages = _pages(values.numel(), groups.group, page_bytes, ctx.precision)
        beside = groups.bytes_beside(values.numel(), page_bytes)
        if (header_pages + sum(pages)) * page_bytes + beside >= values.numel() * values.element_size():
            return None
        stored = cls(pager, ctx.backend, layout, groups)
        arranged = groups.arrange(stored.set_aside(values))
        if ctx.errors is not None:
            importances = tuple(plane_importances(ctx.errors, [page_bytes * count for count in pages]))
        elif pager.budget is None:
            importances = _typical_importances(values.numel(), pages, page_bytes)
        else:
            errors = rounding_errors(cls._relative_range(ctx, arranged, layout), values.numel())
            importances = tuple(plane_importances(errors, [page_bytes * count for count in pages]))
        with stored._new_pages(header_pages, pages, importances) as lease:
            finite = cls._write(ctx, arranged, layout, lease)
        if not ctx.require_finite:
            return stored
        if not isinstance(finite, bool):
            stored.check_later(ctx.checks, values, finite)
        return stored if stored.check is not None or finite else None

    def set_aside(self, values: Tensor) -> Tensor:
        """Keeps what lies beside the codes of compact values, and returns the rest, which is to be encoded.

        Raises:
            ActivationBudgetError: It does not fit in the budget.
        """
        if self.groups.bounds is not None:
            self._sides = KeptSides.of(values, self.groups.bounds, self.pager, self._backend)
        if self.groups.beside is None:
            return values
        self.beside, rest = self.groups.beside.split(values)
        if self.beside is not None and self.beside.nbytes:
            self._kept = KeptStorage(self.pager, self.beside.nbytes)
        return rest

    def check_later(
        self, checks: PendingChecks | None, values: Tensor, finite: DeviceFlag, compact: Compact | None = None
    ) -> None:
        """Keeps its values until the device says that they are finite, if `checks` allow that; see `PendingChecks`."""
        if checks is not None:
            self.check = checks.add(values, finite, self.pager, compact)

    @override
    def decode_to(self, address: int) -> bool:
        return (self.check is None or self.check.settle() is None) and super().decode_to(address)

    @override
    def decode_into(self, out: Tensor) -> None:
        exact = None if self.check is None else self.check.settle()
        (super() if exact is None else exact).decode_into(out)

    @classmethod
    def _relative_range(cls, ctx: EncodeContext, values: Tensor, layout: PlaneLayout) -> float:
        return ctx.backend.relative_range(values, layout)

    @classmethod
    def _write(cls, ctx: EncodeContext, values: Tensor, layout: PlaneLayout, lease: Lease) -> bool | DeviceFlag:
        return ctx.backend.encode(values, layout, lease.planes, ctx.pager.pool, lease.pages, ctx.seed)

    @override
    def _decode(self, out: Tensor, lease: Lease) -> None:
        beside, sides = self.beside, self._sides
        dense = out if self.is_codes_alone or out.is_contiguous() else out.new_empty(out.shape)
        self._backend.decode(self.groups.arrange(dense), self.layout, lease.planes, self.pager.pool, lease.pages)
        if beside is not None:
            beside.restore(dense)
        if sides is not None:
            sides.keep(dense)
        if dense is not out:
            out.copy_(dense)


@lru_cache(maxsize=4096)
def _pages(elements: int, group: int, page_bytes: int, precision: int) -> tuple[PlaneLayout, int, tuple[int, ...]]:
    """Returns the layout of an activation, the pages of its header, and those of each plane of a precision."""
    layout = PlaneLayout(elements, group, page_bytes)
    return layout, layout.header_pages, tuple(layout.plane_pages(plane) for plane in range(planes_for(precision)))


@lru_cache(maxsize=4096)
def _typical_importances(elements: int, pages: tuple[int, ...], page_bytes: int) -> tuple[float, ...]:
    """Returns the importances of planes that nothing else is known of."""
    return tuple(plane_importances(rounding_errors(TYPICAL_RANGE, elements), [page_bytes * count for count in pages]))


def spreads_differ(values: Tensor, groups: Grouping) -> bool:
    """Says whether some rows of flat values spread so little beside others that a code shared with them hides them.

    In a CUDA graph they may in a later run, whatever they do now.
    """
    if values.numel() % groups.row:
        return False
    if is_capturing():
        return True
    rows = groups.arrange(values).reshape(-1, groups.row)
    low, high = rows.aminmax(dim=1)
    least, most = (high - low).aminmax()
    return bool(least * LARGEST_SPREAD_RATIO < most)
