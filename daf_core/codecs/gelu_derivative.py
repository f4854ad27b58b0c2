"""Lossy: codes of GELU's derivative, which is all that its backward reads of its input."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from daf_core.codecs.base import EncodeContext
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.codecs.scaling_groups import Grouping
from daf_core.memory.lease import Lease
from daf_core.readers.table import Kind, Reading
from daf_kernels import DeviceFlag, PlaneLayout

GELU = "GeluBackward0"
"""The autograd node that alone may read them."""

_UNGROUPED = Grouping(0)
"""Codes stand for themselves."""

_RELATIVE_RANGE = 14.0
"""Squared range of the derivative over its variance, for inputs of neural networks."""


class GeluDerivativeActivation(PlanesActivation):
    """Planes of GELU's derivative; they decode to inputs with that derivative, and not to the values that were stored.

    Its layout has no groups; its numerics are those of `daf_kernels.reference.gelu_derivative`.
    """

    name: ClassVar[str] = "slopes"
    only_reader: ClassVar[str] = GELU
    readable_by_any_op = False

    @override
    @classmethod
    def accepts(cls, saved: SavedTensor) -> bool:
        return saved.codec == cls.name

    @override
    @classmethod
    def groups_of(cls, ctx: EncodeContext) -> Grouping:
        return _UNGROUPED

    @override
    def serves(self, reading: Reading) -> bool:
        # A gradient of the gradient (create_graph=True) would differentiate the derivative.
        return reading.kind is Kind.SHAPE or (reading.reader == self.only_reader and not torch.is_grad_enabled())

    @override
    @classmethod
    def _relative_range(cls, ctx: EncodeContext, values: Tensor, layout: PlaneLayout) -> float:
        return _RELATIVE_RANGE

    @override
    @classmethod
    def _write(cls, ctx: EncodeContext, values: Tensor, layout: PlaneLayout, lease: Lease) -> bool | DeviceFlag:
        return ctx.backend.encode_slopes(values, layout, lease.planes, ctx.pager.pool, lease.pages)

    @override
    def _decode(self, out: Tensor, lease: Lease) -> None:
        self._backend.decode_slopes(out, self.layout, lease.planes, self.pager.pool, lease.pages)
