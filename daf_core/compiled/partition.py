"""Tells torch's partitioner what is cheap to work out again in backward, so that it is not saved beside its source.

The partitioner weighs bytes as they are before they are encoded, and never works a tensor out again that a matrix
product reads in backward. So it saves the result of a dropout beside its factor and its mask, and of a normalization
with its weight and bias beside the normalized values. Both are one fused loop away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from daf_core.compiled.readers import is_view, name_of

_CASTS = ("convert_element_type", "_to_copy")
_REGION = 0
"""The partitioner numbers regions that are worked out again; ours is one, and it saves nothing at its border."""


def with_hints(
    joint: fx.GraphModule, inputs: Any, before: Callable[..., fx.GraphModule] | None = None
) -> fx.GraphModule:
    """Marks what is to be worked out again in backward, or saved, in a graph of forward and backward together.

    Args:
        joint: The graph.
        inputs: Its inputs.
        before: A pass of somebody else, which comes first.
    """
    if before is not None:
        joint = before(joint, inputs)
    nodes = list(joint.graph.nodes)
    if any("recompute" in node.meta for node in nodes):  # the user's own checkpoints say what is saved
        return joint
    gradients = _gradients(nodes)
    for node in nodes:
        if node.op != "call_function" or node in gradients:
            continue
        policy = _policy(node)
        if policy is not None:
            node.meta["recompute"], node.meta["ac_graph_id"] = policy, _REGION
    return joint


def _policy(node: fx.Node) -> CheckpointPolicy | None:
    """Returns what to tell the partitioner of a forward node; None leaves the choice to it."""
    name = name_of(node)
    if name == "div" and _is_softmax(node):  # rather than the scores, whose error an exponential enlarges
        return CheckpointPolicy.MUST_SAVE
    again = CheckpointPolicy.MUST_RECOMPUTE
    if name == "mul" and any(_is_mask(each) or _is_small(each) for each in node.all_input_nodes):
        return again
    if name == "add" and len(node.all_input_nodes) == 2 and any(map(_is_small, node.all_input_nodes)):
        return again if any("recompute" in each.meta for each in node.all_input_nodes) else None
    if name in ("mul", "div", *_CASTS) and len(node.all_input_nodes) == 1:  # a dropout's scale, autocast
        marked = node.all_input_nodes[0].meta.get("recompute")
        return again if marked is again else None
    return None


def _is_softmax(node: fx.Node) -> bool:
    """Says whether a quotient is that of exponentials and their sum."""
    first, second = (*node.args, None, None)[:2]
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return False
    return name_of(first) == "exp" and name_of(second) == "sum" and second.args[0] is first


def _is_mask(node: fx.Node) -> bool:
    """Says whether a node is a mask, or zeros and ones made of one."""
    while True:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dtype is torch.bool:
            return True
        if name_of(node) not in _CASTS and not is_view(node):
            return False
        node = node.all_input_nodes[0]


def _is_small(node: fx.Node) -> bool:
    """Says whether a node is a vector that the graph is given, such as a weight or a bias."""
    value = node.meta.get("val")
    return node.op == "placeholder" and isinstance(value, Tensor) and value.dim() == 1


def _gradients(nodes: list[fx.Node]) -> set[fx.Node]:
    """Returns the nodes of the backward part."""
    found: set[fx.Node] = set()
    for node in nodes:
        given = node.op == "placeholder" and node.name.startswith("tangents")
        if given or any(each in found for each in node.all_input_nodes):
            found.add(node)
    return found
