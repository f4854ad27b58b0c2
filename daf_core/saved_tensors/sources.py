"""What is stored of the tensors that an autograd node has saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from daf_core.autograd.torch_private import Node, packed_for
from daf_core.codecs import StoredActivation
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.codecs.tensor_layout import geometry_of
from daf_core.saved_tensors.dedup import serves
from daf_core.saved_tensors.handle import Packed
from daf_core.saved_tensors.pending import PendingActivation

UnpackHook = Callable[[Any], Tensor]


def packed_of(node: Node, name: str, unpack: UnpackHook) -> Packed | None:
    """Returns what autograd keeps in place of a node's saved tensor; None where `unpack` does not give it back."""
    packed: Any = packed_for(node, name, unpack)
    return packed.packed if isinstance(packed, PendingActivation) else packed


def serves_reader(stored: StoredActivation, saved: SavedTensor) -> bool:
    """Says whether what follows from other values is as near to a tensor's as its reader needs them."""
    geometry = geometry_of(tuple(saved.tensor.shape), tuple(saved.tensor.stride()))
    return serves(stored, geometry, saved.form, saved.reading, saved.normalizes)
