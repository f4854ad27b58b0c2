"""Which saved tensors follow from others that are stored already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from daf_core.codecs import NormalizedActivation, ProductActivation, RawActivation, StoredActivation
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.derived import Source
from daf_core.handle import Handle
from daf_core.sites import ModuleScopes
from daf_core.torch_internals import packed_for, skip_nodes

UnpackHook = Callable[[Any], Tensor]

Node = Any
"""A node of the autograd graph; torch has no type for the kinds that are looked at here."""

_VIEWS = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "ExpandBackward0", "AliasBackward0"}
"""Nodes that keep the order of a dense tensor's elements, as long as their number is the same."""


SAMPLES = 64
"""Elements of a product that are compared with its factors, where these are there to be looked at."""


class Derivation:
    """Recognizes tensors that follow from others.

    Args:
        scopes: Knows the latest result of a layer normalization.
    """

    def __init__(self, scopes: ModuleScopes) -> None:
        self._scopes = scopes

    def derive(self, tensor: Tensor, exact: bool, unpack: UnpackHook) -> StoredActivation | None:
        """Returns a recipe for a tensor that is about to be saved, or None.

        It knows the result of a dropout on something that saves its result (a softmax) or its input (a layer
        normalization), and the result of a layer normalization itself. Backward needs the sources anyway, and usually
        later.

        Args:
            tensor: A tensor as autograd saves it.
            exact: Whether the recipe must give the same bits.
            unpack: The unpack hook whose packed tensors are looked at; other people's are left alone.
        """
        if not tensor.is_contiguous() or tensor._version:  # changed in place after its node made it
            return None
        node = skip_nodes(tensor.grad_fn, _VIEWS)
        if node is None or node.name() != "MulBackward0" or node.next_functions[1][0] is not None:
            # A result that its own node saves is the same storage, and shared.
            return None if exact or node is None else self._normalized(node, tensor, unpack)
        mask = _source(node, "other", tensor, unpack)
        factor_node = skip_nodes(node.next_functions[0][0], _VIEWS)
        if factor_node is None or not isinstance(mask, BitmaskActivation | RawActivation):
            return None
        factor = _source(factor_node, "result", tensor, unpack)
        if factor is None and not exact:
            factor = self._normalized(factor_node, tensor, unpack)
        if factor is None or not _agree(tensor, factor, mask):
            return None
        return ProductActivation(factor, mask)

    def _normalized(self, node: Node, tensor: Tensor, unpack: UnpackHook) -> NormalizedActivation | None:
        if node.name() != "NativeLayerNormBackward0" or not self._is_unchanged_result(node):
            return None
        source = _source(node, "input", tensor, unpack)
        rest = [_packed(node, name, unpack) for name in ("result1", "result2", "weight", "bias")]
        if source is None or None in rest:
            return None
        return NormalizedActivation(source, *(packed.unpack for packed in rest if packed is not None))

    def _is_unchanged_result(self, node: Node) -> bool:
        """Says whether the result of a normalization is still there to be looked at, and as the operator made it."""
        result = self._scopes.last_normalized
        return result is not None and result.grad_fn is node and not result._version


def _packed(node: Node, name: str, unpack: UnpackHook) -> Handle | RawActivation | None:
    packed = packed_for(node, name, unpack)
    return packed if isinstance(packed, Handle | RawActivation) else None


def _source(node: Node, name: str, like: Tensor, unpack: UnpackHook) -> Source | None:
    """Returns what is stored for a node's saved tensor, if it is dense and as long as `like`, and of its type."""
    packed = _packed(node, name, unpack)
    if packed is None or not packed.is_dense(like):
        return None
    return packed.stored if isinstance(packed, Handle) else packed


def _agree(tensor: Tensor, factor: Source, mask: BitmaskActivation | RawActivation) -> bool:
    """Compares some elements of a product with its factors, where they are raw, bit by bit.

    This finds what was changed behind autograd's back, as through ``tensor.data``.
    """
    if not isinstance(factor, RawActivation):
        return True
    step = max(tensor.numel() // SAMPLES, 1)
    found, factors = (values.detach().view(-1)[::step] for values in (tensor, factor.unpack()))
    if isinstance(mask, RawActivation):
        return torch.equal(found, factors * mask.unpack().view(-1)[::step])
    low, high = mask.values(tensor.dtype).to(tensor.device)
    return bool(((found == factors * low) | (found == factors * high)).all())
