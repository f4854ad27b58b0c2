"""Where a dimension of one tensor of a graph is in another, which views and copies have made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, fx

from daf_core.compiled.groups import Together
from daf_core.compiled.readers import (
    CASTS,
    is_pointwise,
    is_view,
    name_of,
    tensors_of,
)
from daf_core.compiled.rows import dim_of_softmax, normalized_by
from daf_core.compiled.sizes import elements_of, hint

LONGEST_PATH = 6
"""Views and copies between a tensor and the normalization that reads it, at most."""

_COPIES = ("clone", "contiguous", "constant_pad_nd", "flip", "roll")
"""Operators that move values to memory of their own."""


def viewed(node: fx.Node) -> fx.Node:
    """Returns what a node is a view of, or a cast, such as autocast's."""
    while _is_seen_otherwise(node):
        [node] = tensors_of(node)
    return node


def _is_seen_otherwise(node: fx.Node) -> bool:
    return (is_view(node) or name_of(node) in CASTS) and len(tensors_of(node)) == 1


def channels_of(node: fx.Node) -> int | None:
    """Returns the dimension of a tensor that numbers channels; None where that is not known.

    It is the last one of what a linear layer gives, of which views, copies and multiples have made the tensor; the
    innermost part of it, if views have cut it. Keys are copied channel by channel, the tokens of each side by side.
    """
    path = [node]
    while len(tensors_of(node)) == 1 and (is_view(node) or is_pointwise(node)):
        [node] = tensors_of(node)
        if not isinstance(node.meta.get("val"), Tensor):
            break
        path.append(node)
    if name_of(path[-1]) not in ("mm", "addmm"):  # of others, as convolutions, any dimension may be
        return None
    found, values = _followed(path[::-1], {1: 0}), path[0].meta["val"]
    return min(found, key=lambda dim: hint(values.stride(dim)), default=None)


def normalized_in(node: fx.Node) -> Together:
    """Returns what a LayerNorm or the like takes together of a tensor, perhaps of a view or a copy of it.

    What spreads less than others has a larger gradient, and does not share a group with them.
    """
    pending = [[node]]
    for path in pending:  # which grows meanwhile
        for user in path[0].users:
            dims = normalized_by(user)
            if dims and user.args[0] is path[0]:
                return tuple(sorted(_followed(path, dims).items()))
            if _is_seen_otherwise(user) and isinstance(user.meta.get("val"), Tensor) and len(path) < LONGEST_PATH:
                pending.append([user, *path])
    return ()


def probabilities_of(node: fx.Node) -> int | None:
    """Returns the dimension along which a tensor sums to 1, where views, casts and copies have made it of a softmax.

    None where that is not known, or some are left out, such as that of an attention's sink.
    """
    path = [node]
    while dim_of_softmax(node) is None:
        if not _is_seen_otherwise(node):
            return None
        before = tensors_of(node)[0].meta.get("val")
        if not isinstance(before, Tensor) or elements_of(before) != elements_of(node.meta["val"]):
            return None
        [node] = tensors_of(node)
        path.append(node)
    dim = dim_of_softmax(node)
    assert dim is not None
    found = _followed(path[::-1], {dim: 0})
    return next(iter(found)) if [*found.values()] == [0] else None


def _followed(path: Sequence[fx.Node], dims: Mapping[int, int]) -> dict[int, int]:
    """Returns which dimensions of the last of some nodes are those of the first, and how many elements of each.

    0 stands for all of them. One of two neighbors is made of the other. Empty where that is not known.
    """
    values: list[Tensor] = [each.meta["val"] for each in path]
    for one, other, here, there in zip(path, path[1:], values, values[1:], strict=False):
        made = other if one in tensors_of(other) else one
        if is_view(made) and name_of(made) not in _COPIES:
            dims = _seen_in(there, _runs(here, dims))
        elif here.dim() != there.dim():
            return {}
    return dict(dims)


def _runs(values: Tensor, dims: Mapping[int, int]) -> list[tuple[int, int]]:
    """Returns the strides of dimensions in memory, each with what it is at the end of the elements."""
    found = sorted((hint(values.stride(dim)), piece or hint(values.shape[dim])) for dim, piece in dims.items())
    runs: list[tuple[int, int]] = []
    for stride, size in found:
        if size > 1 and runs and runs[-1][1] == stride:
            runs[-1] = runs[-1][0], stride * size
        elif size > 1 and stride:
            runs.append((stride, stride * size))
    return runs


def _seen_in(values: Tensor, runs: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Returns which dimensions of a tensor lie in runs of memory, and how many elements of each; 0 for all."""
    found: dict[int, int] = {}
    for dim in range(values.dim()):
        stride, size = hint(values.stride(dim)), hint(values.shape[dim])
        for first, end in runs:
            if size > 1 and first <= stride < end and stride % first == 0:
                piece = end // stride
                found[dim] = piece if piece < size and size % piece == 0 else 0
    return found
