"""Results of elementwise operators that have saved all of their arguments: backward computes them again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from daf_core.autograd.torch_private import Node, skip_nodes
from daf_core.codecs.base import StoredActivation
from daf_core.codecs.gelu_derivative import GELU
from daf_core.codecs.raw import RawActivation
from daf_core.codecs.recomputed import RECIPES, ElementwiseActivation
from daf_core.codecs.saved_tensor import ACTIVATIONS, VIEWS, SavedTensor
from daf_core.errors import ModifiedInPlaceError
from daf_core.readers.patterns import PRODUCT
from daf_core.readers.waiting import Unpack
from daf_core.saved_tensors.dedup import serves_reader
from daf_core.saved_tensors.handle import Packed
from daf_core.saved_tensors.pending import packed_of

DEEPEST = 2
"""Operators that follow one another at most when a result is decoded, as in gated layers and normalizations: a loop of
products would run all steps before each of its steps again."""

_BOUNDED = frozenset(("HardsigmoidBackward0", "SigmoidBackward0", "TanhBackward0"))
"""Nodes of functions whose results are at most 1."""

COMPARABLE = ("cpu", "meta")
"""Devices on which all elements are compared in exact mode: a GPU's host would wait for that."""

_OPERATORS: dict[str, Callable[..., object]] = {
    PRODUCT: torch.ops.aten.mul.out,
    "HardswishBackward0": torch.ops.aten.hardswish.out,
    "MishBackward0": torch.ops.aten.mish.out,
    "SiluBackward0": torch.ops.aten.silu.out,
}


def elementwise(node: Node, saved: SavedTensor, exact: bool, unpack: Unpack) -> ElementwiseActivation | None:
    """Returns the recipe for the result of a product or an activation function, if its `node` has saved all it needs.

    Of products, lossy ones are those with an activation function, as in gated layers, and those with an exact factor
    of 1 at most. In others an argument's error may be far larger beside the product than that of codes of its own, as
    where a factor makes up for values that are far larger in some channels.
    """
    if exact and saved.tensor.device.type not in COMPARABLE:
        return None
    is_product = node.name() == PRODUCT
    if not is_product and node.name() not in ACTIVATIONS:
        return None
    arguments = list[Packed]()
    for name in ("self", "other") if is_product else ("self",):
        argument = _argument(node, name, saved, unpack)
        if argument is None:
            return None
        arguments.append(argument)
    if is_product and not exact and not any(map(_is_gate, node.next_functions, arguments)):
        return None
    shape = torch.broadcast_shapes(*(argument.shape for argument in arguments))
    if shape.numel() != saved.tensor.numel():
        return None
    return ElementwiseActivation(_operator(node), arguments, shape)


def agrees(recipe: StoredActivation, tensor: Tensor) -> bool:
    """Says whether a recipe gives all elements of a tensor."""
    computed = torch.empty_like(tensor)
    try:
        recipe.decode_into(computed)
    except ModifiedInPlaceError:  # of what an argument follows from
        return False
    return torch.equal(computed, tensor)


def _is_gate(factor: tuple[Node, int], packed: Packed) -> bool:
    """Says whether a factor of a product, given what made it, lets the other one's error through as it is."""
    made = skip_nodes(factor[0], VIEWS)
    name = "" if made is None else made.name()
    return name in ACTIVATIONS or (name in _BOUNDED and not packed.stored.lossy)


def _argument(node: Node, name: str, saved: SavedTensor, unpack: Unpack) -> Packed | None:
    """Returns what stands for an argument that a node has saved, if its result may follow from that.

    A parameter may be another one, or somewhere else, before the product's own backward asks for it.
    """
    packed = packed_of(node, name, unpack)
    if packed is None or not packed.stored.readable_by_any_op or not serves_reader(packed.stored, saved):
        return None
    if isinstance(packed, RawActivation):
        return packed if packed.is_unchanged and packed.holder is not None else None
    stored = packed.stored
    # What follows from another recipe would be computed from what that follows from, and so on.
    deep = stored.depth >= DEEPEST if isinstance(stored, ElementwiseActivation) else isinstance(stored, RECIPES)
    return None if packed.is_changed or deep else packed.as_stored()


def _operator(node: Node) -> Callable[..., object]:
    """Returns the operator of a node; it takes what the node has saved, and a tensor for the result as ``out``."""
    name = node.name()
    return partial(torch.ops.aten.gelu.out, approximate=node._saved_approximate) if name == GELU else _OPERATORS[name]
