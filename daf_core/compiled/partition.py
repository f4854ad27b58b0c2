"""Tells torch's partitioner what is cheap to work out again in backward, so that it is not saved beside its source.

The partitioner weighs bytes as they are before they are encoded, and never works a tensor out again that a matrix
product reads in backward. So it saves the result of a dropout beside its factor and its mask, and of a normalization
with its weight and bias beside the normalized values. Both are one fused loop away. Of weights it saves what autocast
makes of them: as an activation of few bits its error would reach every layer below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from daf_core.autograd.torch_compile import IN_FORWARD, given_parameters
from daf_core.compiled.decide import LEAST_ELEMENTS, made_of_gradients
from daf_core.compiled.readers import (
    CASTS,
    EXPONENTIALS,
    comparison_of,
    is_side,
    is_view,
    multiple_of,
    name_of,
    tensors_of,
)
from daf_core.compiled.rows import is_softmax
from daf_core.compiled.sizes import elements_of

_REGION = 0
"""The partitioner numbers regions that are worked out again; ours is one, and it saves nothing at its border."""


def with_hints(
    joint: fx.GraphModule, inputs: Any, before: Callable[..., fx.GraphModule] | None = None
) -> fx.GraphModule:
    """Marks what is to be worked out again in backward, or saved, in a graph of forward and backward together.

    `before` is a pass of somebody else, which comes first.
    """
    if before is not None:
        joint = before(joint, inputs)
    nodes = list(joint.graph.nodes)
    if any("recompute" in node.meta for node in nodes):  # the user's own checkpoints say what is saved
        return joint
    gradients, inputs_of = made_of_gradients(joint.graph), joint.graph.find_nodes(op="placeholder")
    weights, copies = {inputs_of[place] for place in given_parameters()}, set[fx.Node]()
    free = {*weights}  # what is made of parameters alone, which are there in backward
    for node in nodes:
        if node.op != "call_function" or node in gradients:
            continue
        if node.all_input_nodes and free.issuperset(node.all_input_nodes):
            free.add(node)
        casts, side = name_of(node) in CASTS, is_side(node)
        if (casts or is_view(node)) and weights.issuperset(node.all_input_nodes):
            weights.add(node)
            if casts or not copies.isdisjoint(node.all_input_nodes):
                copies.add(node)
                node.meta["recompute"], node.meta["ac_graph_id"] = CheckpointPolicy.MUST_RECOMPUTE, _REGION
            continue
        if _is_piece_of_what_is_worked_out_again(node):
            _copied(node).meta["recompute"] = CheckpointPolicy.MUST_SAVE
            continue
        if side and node in free:
            continue
        policy = _policy(node)
        if policy is not None:
            node.meta["recompute"], node.meta["ac_graph_id"] = policy, _REGION
        if side:  # also of what backward alone compares, as that of a hardswish does
            node.meta[IN_FORWARD] = True
        elif name_of(node) in EXPONENTIALS and _is_used_below_one(node):
            _limit(node)
    return joint


def _policy(node: fx.Node) -> CheckpointPolicy | None:
    """Returns what to tell the partitioner of a forward node; None leaves the choice to it."""
    name = name_of(node)
    if name == "div" and is_softmax(node):  # rather than the scores, whose error an exponential enlarges
        return CheckpointPolicy.MUST_SAVE
    if is_side(node) and not _is_small(node):  # codes of what it reads lose it close to a bound
        return CheckpointPolicy.MUST_SAVE
    # A mean or the like, which stays as it is: of codes it would have their error.
    if _is_small(node) and not is_view(node) and not all(map(_is_small, tensors_of(node))):
        return CheckpointPolicy.MUST_SAVE
    again = CheckpointPolicy.MUST_RECOMPUTE
    if name == "mul" and any(_is_mask(each) or _is_vector(each) for each in node.all_input_nodes):
        return again
    if name == "add" and len(node.all_input_nodes) == 2 and any(map(_is_vector, node.all_input_nodes)):
        return again if any("recompute" in each.meta for each in node.all_input_nodes) else None
    if name in ("mul", "div", *CASTS) and len(node.all_input_nodes) == 1:  # a dropout's scale, autocast
        marked = node.all_input_nodes[0].meta.get("recompute")
        return again if marked is again else None
    return None


def _limit(exponential: fx.Node) -> None:
    """Has an exponential be of 0 where its argument is larger, and nobody reads it.

    Of codes an argument just below 0 may come back above it, by half a step; and where it is large, the exponential
    would leave codes for nothing else.
    """
    [argument] = exponential.all_input_nodes
    with exponential.graph.inserting_before(exponential):
        limited = exponential.graph.call_function(torch.ops.aten.clamp_max.default, (argument, 0))
    limited.meta = {**exponential.meta, "val": argument.meta["val"]}
    exponential.replace_input_with(argument, limited)


def _is_piece_of_what_is_worked_out_again(node: fx.Node) -> bool:
    """Says whether a node is a view of few of the values that backward makes of codes.

    The first token of each row is such a piece: a last layer reads it, and outside of graphs that layer's gradient has
    no error, as what is small stays as it is.
    """
    if not is_view(node) or not _is_small(node) or len(tensors_of(node)) != 1:
        return False
    [source] = tensors_of(node)
    while is_view(source) and len(tensors_of(source)) == 1:
        [source] = tensors_of(source)
    return source.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE and not _is_small(source)


def _copied(node: fx.Node) -> fx.Node:
    """Puts a copy in the place of a view, which the partitioner always works out again; returns the copy.

    By an operator of its own, as Inductor takes torch's copies for views.
    """
    with node.graph.inserting_after(node):
        copied = node.graph.call_function(torch.ops.daf.copy.default, (node,))
    copied.meta = {**node.meta}
    node.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)
    return copied


def _is_small(node: fx.Node) -> bool:
    """Says whether a node's tensor stays as it is because it is small."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and elements_of(value) < LEAST_ELEMENTS


def _is_mask(node: fx.Node) -> bool:
    """Says whether a node is a mask, or zeros and ones made of one."""
    while True:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dtype is torch.bool:
            return True
        if name_of(node) not in CASTS and not is_view(node):
            return False
        node = node.all_input_nodes[0]


def _is_vector(node: fx.Node) -> bool:
    """Says whether a node is a vector that the graph is given, such as a weight or a bias."""
    value = node.meta.get("val")
    return node.op == "placeholder" and isinstance(value, Tensor) and value.dim() == 1


_library = torch.library.Library("daf", "FRAGMENT")
_library.define("copy(Tensor values) -> Tensor")
_library.impl("copy", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("daf::copy", torch.empty_like, lib=_library)


def _is_used_below_one(exponential: fx.Node) -> bool:
    """Says whether an exponential is read where its argument is not positive alone, as by the derivative of an ELU.

    In a graph of forward and backward together.
    """
    argument = exponential.all_input_nodes[0]
    products = [user for user in exponential.users if name_of(user) == "mul"]
    readers = [(product, reader) for product in products for reader in product.users]
    if not readers or len(products) != len(exponential.users):
        return False
    return all(_takes_where_negative(reader, product, argument) for product, reader in readers)


def _takes_where_negative(node: fx.Node, values: fx.Node, argument: fx.Node) -> bool:
    """Says whether a node takes values only where an argument is not positive."""
    if name_of(node) != "where" or len(node.args) != 3:
        return False
    condition, first, second = cast("tuple[fx.Node, Any, Any]", node.args)
    side = comparison_of(condition, argument)
    if side is None or side.bound != 0:
        return False
    (compared, factor), (source, other) = map(multiple_of, (condition.all_input_nodes[0], argument))
    if name_of(condition) in ("gt", "ge"):
        first, second = second, first
    return compared is source and factor * other > 0 and first is values and second is not values
