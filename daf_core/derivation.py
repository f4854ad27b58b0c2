"""Which saved tensors follow from others that are stored already."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from daf_core.codecs import NormalizedActivation, ProductActivation, RawActivation, StoredActivation
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.derived import Source
from daf_core.handle import Handle

Node = Any
"""A node of the autograd graph; torch has no type for the kinds that are looked at here."""

_VIEWS = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "ExpandBackward0", "AliasBackward0"}
"""Nodes that keep the order of a dense tensor's elements, as long as their number is the same."""


class Peek(threading.local):
    """Shows what the pack hook put in place of a saved tensor.

    Reading a node's saved tensor calls the unpack hook. While a look is being taken, the hook hands over what it was
    given here and returns an empty tensor, so nothing is decoded.
    """

    def __init__(self) -> None:
        self._looking = False
        self._seen: object = None

    def intercept(self, packed: object) -> bool:
        """Says whether the unpack hook was called by a look, and notes what it was given."""
        if self._looking:
            self._seen = packed
        return self._looking

    def look(self, node: Node, name: str) -> object:
        """Returns what stands in for a saved tensor of a node; None where the node has none of that name any more."""
        self._looking, self._seen = True, None
        try:
            getattr(node, name, None)
        except RuntimeError:  # its graph has run backward, or the tensor was changed in place
            return None
        finally:
            self._looking = False
        seen, self._seen = self._seen, None
        return seen


def derive(tensor: Tensor, look: Callable[[Node, str], object], exact: bool) -> StoredActivation | None:
    """Returns a recipe for a tensor that is about to be saved, or None.

    It knows the result of a dropout on something that saves its result (a softmax) or its input (a layer
    normalization), and the result of a layer normalization itself. Backward needs the sources anyway, and later, so
    that nothing is kept for longer than without the recipe.

    Args:
        tensor: A tensor as autograd saves it.
        look: `Peek.look`.
        exact: Whether the recipe must give the same bits.
    """
    if not tensor.is_contiguous() or tensor._version:  # changed in place after its node made it
        return None
    node = _before_views(tensor.grad_fn)
    mask: Source | None = None
    if node is not None and node.name() == "MulBackward0" and node.next_functions[1][0] is None:
        mask = _source(look(node, "_saved_other"), tensor)
        if not isinstance(mask, BitmaskActivation | RawActivation):
            return None
        node = _before_views(node.next_functions[0][0])
    source = None if node is None else _result(node, tensor, look, exact)
    if source is None or mask is None:
        return source if isinstance(source, NormalizedActivation) else None
    return ProductActivation(source, mask)


def _result(node: Node, tensor: Tensor, look: Callable[[Node, str], object], exact: bool) -> Source | None:
    """Returns the result of a node, if it is stored or follows from what is."""
    if node.name() == "NativeLayerNormBackward0":
        return None if exact else _normalized(node, tensor, look)
    return _source(look(node, "_saved_result"), tensor)


def _normalized(node: Node, tensor: Tensor, look: Callable[[Node, str], object]) -> NormalizedActivation | None:
    source = _source(look(node, "_saved_input"), tensor)
    names = ("_saved_result1", "_saved_result2", "_saved_weight", "_saved_bias")
    rest = [packed for name in names if isinstance(packed := look(node, name), RawActivation)]
    return NormalizedActivation(source, *rest) if source is not None and len(rest) == len(names) else None


def _source(packed: object, like: Tensor) -> Source | None:
    """Returns what is stored for a saved tensor, if it is dense and as long as `like`, and of its type."""
    if isinstance(packed, Handle) and packed.is_dense(like):
        return packed.stored
    if isinstance(packed, RawActivation) and packed.is_dense(like):
        return packed
    return None


def _before_views(node: Node) -> Node:
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node
