"""What the input of a linear layer was made of: adapters drop and cast what they are given, each for itself."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor

from daf_core.autograd.nodes import CAST, DROPOUTS, VIEWS
from daf_core.autograd.sites import ModuleScopes
from daf_core.autograd.torch_private import Node, node_number, skip_nodes
from daf_core.readers.places import LINEAR, input_of, inputs_of_modules, runs


class Origin(NamedTuple):
    """What the input of a linear layer was made of by casts, a dropout or both."""

    tensor: Tensor  # others may be made of it, too
    dtype: torch.dtype  # type in which the dropout takes it; that in which the last cast does where there is none
    dropout: Node  # None where there is none


def origin_of(node: Node, scopes: ModuleScopes, frame: FrameType | None) -> Origin | None:
    """Returns what an unchanged tensor, the result of `node`, was made of, if a linear layer is running in `frame`.

    None where that is gone, or where something in between was changed, or may have been.
    """
    made, latest = skip_nodes(node, VIEWS), scopes.dropout
    if made is None or runs(LINEAR, frame) is None:
        return None
    before = skip_nodes(made.next_functions[0][0], VIEWS) if made.name() == CAST else made
    if latest is not None and before is not None and before.name() in DROPOUTS and node_number(before) == latest.number:
        if before is not made and all(each._version for each in dropped_before(node, frame)):
            return None
        argument = latest.argument()
        return _origin(before, None if argument is None or argument._version else argument, latest.dtype, before, frame)
    given = _input_like(made, frame) if made.name() == CAST else None
    return None if given is None else _origin(made, given, given.dtype, None, frame)


def _origin(
    node: Node, given: Tensor | None, dtype: torch.dtype, dropout: Node, frame: FrameType | None
) -> Origin | None:
    """Returns what a tensor, of a type, that the operator of `node` was given was made of, or the tensor itself."""
    cast = skip_nodes(node.next_functions[0][0], VIEWS)
    source = _input_like(cast, frame) if cast is not None and cast.name() == CAST else None
    found = source if source is not None else given if given is not None else _input_like(node, frame)
    return None if found is None else Origin(found, dtype, dropout)


def _input_like(node: Node, frame: FrameType | None) -> Tensor | None:
    """Returns the input of one of the innermost modules that is what the operator of a node was given, unchanged."""
    edges = list(_edges(node))
    for value in inputs_of_modules(frame):
        # What was changed is not asked for its node, which may be made anew then, in another order.
        if type(value) is not Tensor or value._version or not value.is_contiguous() or value.grad_fn is None:
            continue
        if (value.grad_fn, value.output_nr) in edges:
            return value
    return None


def _edges(node: Node) -> Iterator[tuple[Node, int]]:
    """Yields which result of which node an operator was given first, and of which this is a view."""
    edge = node.next_functions[0]
    yield edge
    while edge[0] is not None and edge[0].name() in VIEWS:
        edge = edge[0].next_functions[0]
        yield edge


def dropped_before(node: Node, frame: FrameType | None) -> list[Tensor]:
    """Returns what a dropout has given to the cast that has made what `node` has, as autocast's in a linear layer.

    Nobody saves it, but the layer has it. To ask any other tensor for its node may make that anew, in another order.
    """
    made = skip_nodes(node, VIEWS)
    source: Node = made.next_functions[0][0] if made is not None and made.name() == CAST else None
    if source is None or source.name() not in DROPOUTS:
        return []
    value = input_of(LINEAR, frame)
    return [value] if type(value) is Tensor and value.grad_fn is source else []
