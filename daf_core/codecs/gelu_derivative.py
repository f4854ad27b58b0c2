"""Lossy: codes of GELU's derivative, which is all that its backward asks of its input."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.scaling_groups import Grouping
from daf_core.memory.lease import Lease
from daf_core.memory.pages.pool import PagePool
from daf_core.readers.table import Kind, Reading
from daf_kernels import Backend, DeviceFlag, Pages, PlaneLayout, Seed

GELU = "GeluBackward0"
"""The autograd node that is the only one to use them."""

UNGROUPED = Grouping(0)
"""Codes stand for themselves."""

_RELATIVE_RANGE = 14.0
"""Squared range of the derivative over its variance, for inputs of neural networks."""


class GeluDerivativeActivation(PlanesActivation):
    """Planes of GELU's derivative; they decode to inputs with that derivative, and not to the values that were stored.

    Its layout has no groups; its numerics are those of `daf_kernels.reference.gelu_derivative`.
    """

    codec: ClassVar[str] = "slopes"
    whole = False

    @override
    def serves(self, reading: Reading) -> bool:
        # A gradient of the gradient (create_graph=True) would differentiate the derivative.
        return reading.kind is Kind.SHAPE or (reading.reader == GELU and not torch.is_grad_enabled())

    @override
    @staticmethod
    def _relative_range(backend: Backend, values: Tensor, layout: PlaneLayout) -> float:
        return _RELATIVE_RANGE

    @override
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
        return backend.encode_slopes(values, layout, planes, pool, pages)

    @override
    def _decode(self, out: Tensor, lease: Lease) -> None:
        self._backend.decode_slopes(out, self._layout, lease.planes, self.pager.pool, lease.pages)
