"""The packed activation that autograd keeps in place of the saved tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from daf_core.codecs import StoredActivation
from daf_core.geometry import Geometry


class Handle:
    """A stored activation seen with the shape and strides of one saved tensor.

    Several handles may share one stored activation. Its pages are freed when the last of them dies, which is when
    autograd releases the graph's node: after its backward, or with a graph that never runs backward.
    """

    __slots__ = ("__weakref__", "_device", "_dtype", "_geometry", "stored")

    def __init__(self, stored: StoredActivation, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> None:
        self.stored = stored
        self._geometry = geometry
        self._dtype = dtype
        self._device = device

    def is_dense(self, like: Tensor) -> bool:
        """Says whether it is stored as one dense run of the elements of `like`, in row-major order, of its type."""
        geometry = self._geometry
        return self._dtype is like.dtype and geometry.compact_shape == (like.numel(),) and geometry.row_major

    def unpack(self) -> Tensor:
        """Returns the saved tensor: same shape, strides, type and device.

        A fresh tensor at every call, because consumers may overwrite it.
        """
        tensor, compact = self._geometry.allocate(self._dtype, self._device)
        self.stored.decode_into(compact)
        return tensor
