"""Stores tensors of the CPU that are replayed with one call into compiled code each.

A call of a Python function takes 1 us between the kernels of a model, whose code and data fill the caches, and a tensor
passes thirty of them on the way through `ActivationStore.store`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from daf_core.codecs import PlanesActivation, RawActivation, StoredActivation
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.planes import LossyStore, spreads_differ
from daf_core.codecs.scaling_groups import Grouping
from daf_core.memory.lease import LeaseKind
from daf_core.memory.pager import Pager
from daf_core.saved_tensors.recording import Decision, Look
from daf_kernels import Backend, DirectBackend, DirectEncoder, PlaneLayout
from daf_kernels.layout import shares_groups


@dataclass(slots=True, frozen=True)
class Direct:
    """What a tensor of a decision is stored with.

    Attributes:
        encoder: Encodes its elements.
        kind: Its pages; None where it stays as it is.
        layout: Where its codes lie; None for a mask.
        groups: Its scaling groups; None for a mask.
        pager: Where they come from.
        backend: Decodes it.
        sizes: Bytes of it at each precision, and as it is; nothing for a mask.
        token: That of the precisions.
        spreads: Whether rows share scaling groups that a normalization reads, so that their spreads are compared.
    """

    encoder: DirectEncoder
    kind: LeaseKind | None
    layout: PlaneLayout | None
    groups: Grouping | None
    pager: Pager
    backend: Backend
    sizes: Sequence[int]
    token: object
    spreads: bool

    @classmethod
    def of(
        cls,
        decision: Decision,
        look: Look,
        tensor: Tensor,
        stored: StoredActivation,
        backend: Backend,
        lossy: LossyStore,
        pager: Pager,
    ) -> Direct | None:
        """Returns what the next tensor is stored with that is stored as this one; None where that takes more."""
        geometry, token = decision.geometry, lossy.token
        if decision.follows or not isinstance(backend, DirectBackend) or geometry.compact_strides != (1,):
            return None
        elements, page_bytes = geometry.compact_shape[0], pager.pool.page_bytes
        if isinstance(stored, RawActivation | BitmaskActivation):
            kind = stored.lease.kind if isinstance(stored, BitmaskActivation) else None
            encoder = backend.direct_mask(elements, tensor.dtype, page_bytes)
            return None if encoder is None else cls(encoder, kind, None, None, pager, backend, (), token, False)
        if not isinstance(stored, PlanesActivation) or token is None or stored.lease.kind is None:
            return None
        layout, groups = stored.layout, stored.groups
        encoder = backend.direct_planes(layout, stored.lease.planes, tensor.dtype)
        if encoder is None or groups.shape is not None or layout.elements != elements:
            return None
        spreads, sizes = look.reads_rows and shares_groups(groups.row), stored.sizes_as(tensor)
        return cls(encoder, stored.lease.kind, layout, groups, pager, backend, sizes, token, spreads)

    def store(self, decision: Decision, tensor: Tensor) -> PlanesActivation | BitmaskActivation | None:
        """Stores a tensor of the decision; None where its values do not allow that."""
        origin, layout, groups = tensor.data_ptr(), self.layout, self.groups
        if not origin:  # zero tensors, such as tangents of what has none, have no memory
            return None
        if self.kind is None:
            return None
        if layout is None or groups is None:
            return self._store_mask(self.kind, origin)
        if self.spreads and spreads_differ(decision.geometry.compact(tensor.detach()), groups.row):
            return None
        stored = PlanesActivation(self.pager, self.backend, layout, groups)
        lease = stored.lease = self.pager.take(self.kind, stored)
        answer = self.encoder.planes(origin, lease.addresses[0], self.kind.size)
        self.pager.finish(lease)
        return None if answer else stored  # it is of two values, or not finite

    def stays(self, tensor: Tensor) -> bool:
        """Says whether a tensor of the decision has no form that takes fewer bytes, as the others."""
        origin = tensor.data_ptr()
        return self.kind is None and origin != 0 and not self.encoder.is_mask(origin)

    def _store_mask(self, kind: LeaseKind, origin: int) -> BitmaskActivation | None:
        stored = BitmaskActivation(self.pager, self.backend, (0, 0))
        lease = stored.lease = self.pager.take(kind, stored)
        two = self.encoder.mask(origin, lease.addresses[0], kind.size)
        self.pager.finish(lease)
        if two is None:
            return None
        stored.two = two
        return stored
