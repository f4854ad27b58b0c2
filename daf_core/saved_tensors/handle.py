"""The packed activation that autograd keeps in place of the saved tensor."""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor

from daf_core.codecs.base import StoredActivation
from daf_core.codecs.raw import RawActivation
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.codecs.tensor_layout import Geometry
from daf_core.codecs.without_values import ShapeActivation
from daf_core.readers.places import Place
from daf_core.readers.table import Reading


class Handle:
    """A stored activation seen with the shape and strides of one saved tensor.

    Several handles may share one stored activation. Its pages are freed when the last of them dies, which is when
    autograd releases the graph's node: after its backward, or with a graph that never runs backward.
    """

    __slots__ = ("__weakref__", "_geometry", "_saved", "_version", "device", "dtype", "place", "reading", "stored")

    def __init__(
        self, stored: StoredActivation, geometry: Geometry, dtype: torch.dtype, device: torch.device,
        place: Place | None, reading: Reading | None, saved: weakref.ref[Tensor], version: int,
    ) -> None:  # fmt: skip
        self.stored = stored
        self._geometry = geometry
        self.dtype = dtype  # type of the saved tensor
        self.device = device
        self.place = place  # where the tensor was saved; None where that is of no use
        self.reading = reading  # what the operator reads that has saved it; None where that is not known yet
        self._saved = saved
        self._version = version

    @classmethod
    def of(cls, stored: StoredActivation, geometry: Geometry, saved: SavedTensor) -> Handle:
        """Returns the handle of a saved tensor."""
        tensor = saved.tensor
        return cls(
            stored, geometry, tensor.dtype, tensor.device, saved.place, saved.reading, saved.reference, saved.version
        )

    def as_stored(self) -> Handle:
        """Returns a handle of what is stored now, whatever this one has later."""
        geometry, dtype, device = self._geometry, self.dtype, self.device
        return Handle(self.stored, geometry, dtype, device, self.place, self.reading, self._saved, self._version)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the saved tensor."""
        return self._geometry.shape

    @property
    def holder(self) -> StoredActivation:
        """Holds its bytes as long as it exists."""
        return self.stored

    @property
    def elements(self) -> int:
        """Different elements in memory of the saved tensor."""
        return math.prod(self._geometry.compact_shape)

    @property
    def is_unchanged(self) -> bool:
        """Whether the saved tensor is still there to be looked at, and has the values that were stored."""
        saved = self._saved()
        return saved is not None and saved._version == self._version

    @property
    def is_changed(self) -> bool:
        """Whether the saved tensor is still there, and has other values than were stored."""
        saved = self._saved()
        return saved is not None and saved._version != self._version

    def is_dense(self, like: Tensor, dtype: torch.dtype) -> bool:
        """Says whether it is one dense run of as many elements as `like`, there and in its order, and has a type."""
        geometry = self._geometry
        if self.dtype is not dtype or geometry.compact_shape != (like.numel(),) or self.device != like.device:
            return False
        if geometry.row_major:
            return like.is_contiguous()
        return (geometry.shape, geometry.strides) == (like.shape, like.stride())

    def unpack(self) -> Tensor:
        """Returns the saved tensor: same shape, type and device, and same strides unless its shape alone is read.

        A fresh tensor at every call, because consumers may overwrite it.
        """
        geometry, stored = self._geometry, self.stored
        if type(stored) is ShapeActivation and geometry.row_major:
            return torch.zeros((), dtype=self.dtype, device=self.device).expand(geometry.shape)
        if stored.direct is not None and not geometry.has_holes:
            tensor = torch.empty_strided(geometry.shape, geometry.strides, dtype=self.dtype, device=self.device)
            if stored.decode_to(tensor.data_ptr()):
                return tensor
        tensor, compact = geometry.allocate(self.dtype, self.device)
        stored.decode_into(compact)
        return tensor


Packed = Handle | RawActivation
"""What autograd keeps in place of a tensor; a `RawActivation` where the tensor stays as it is."""
