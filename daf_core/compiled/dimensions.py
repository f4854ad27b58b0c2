"""Where a dimension of one tensor of a graph is in another, which views and copies have made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from daf_core.compiled.readers import (
    CASTS,
    dim_normalized,
    dim_of_softmax,
    is_pointwise,
    is_view,
    name_of,
    tensors_of,
)
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

    It is the last one of what a linear layer gives, of which views, copies and multiples have made the tensor. Keys are
    copied channel by channel, with the tokens of each side by side.
    """
    path = [node]
    while len(tensors_of(node)) == 1 and (is_view(node) or is_pointwise(node)):
        [node] = tensors_of(node)
        if not isinstance(node.meta.get("val"), Tensor):
            break
        path.append(node)
    if name_of(path[-1]) not in ("mm", "addmm"):  # of others, as convolutions, any dimension may be
        return None
    return _followed(path[::-1], -1)


def normalized_in(node: fx.Node) -> int | None:
    """Returns the dimension of a tensor that a LayerNorm or the like normalizes, perhaps of a view or a copy of it.

    A row that spreads less than others has a larger gradient, and does not share a group with them.
    """
    pending = [[node]]
    for path in pending:  # which grows meanwhile
        for user in path[0].users:
            dim = dim_normalized(user)
            if dim is not None and user.args[0] is path[0]:
                return _followed(path, dim)
            if _is_seen_otherwise(user) and isinstance(user.meta.get("val"), Tensor) and len(path) < LONGEST_PATH:
                pending.append([user, *path])
    return None


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
    return _followed(path[::-1], dim, whole=True)


def _followed(path: Sequence[fx.Node], dim: int, whole: bool = False) -> int | None:
    """Returns where a dimension of the first of some nodes is in the last. One of two neighbors is made of the other.

    Or where the innermost part of it is, if views have cut it; None then if it has to be `whole`.
    """
    values = [each.meta["val"] for each in path]
    stride, size = values[0].stride(dim), hint(values[0].shape[dim])
    for one, other, here, there in zip(path, path[1:], values, values[1:], strict=False):
        place = _of_stride(here, stride)
        if place is None or (whole and hint(here.shape[place]) != size):
            return None
        made = other if one in tensors_of(other) else one
        if is_view(made) and name_of(made) not in _COPIES:
            continue
        if here.dim() != there.dim():
            return None
        stride = there.stride(place)
    last = _of_stride(values[-1], stride)
    return None if last is None or (whole and hint(values[-1].shape[last]) != size) else last


def _of_stride(values: Tensor, stride: Any) -> int | None:
    found = [dim for dim in range(values.dim()) if hint(values.stride(dim)) == hint(stride)]
    return next((dim for dim in found if hint(values.shape[dim]) > 1), None)
