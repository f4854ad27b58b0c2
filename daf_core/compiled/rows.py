"""Operators of a compiled forward graph that take values together: softmaxes and normalizations."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, fx

from daf_core.compiled.readers import name_of, tensors_of
from daf_core.compiled.sizes import is_known


def is_softmax(node: fx.Node) -> bool:
    """Says whether a node gives the result of a softmax, or a constant in its place, where that is masked."""
    if name_of(node) == "where" and len(node.args) == 3:
        results = [each for each in node.args[1:] if isinstance(each, fx.Node)]
        return any(map(is_softmax, results)) and all(is_softmax(each) or _is_constant(each) for each in results)
    return dim_of_softmax(node) is not None


def dim_of_softmax(node: fx.Node) -> int | None:
    """Returns the dimension along which a node sums to 1, from 0, or to 0; None where it gives no result of a softmax.

    It may be one operator, or the quotient of exponentials and their sum; or 0 may be in place of rows as a whole.
    """
    arguments: list[Any] = [*node.args, None, None]
    name, first, second, dim = name_of(node), arguments[0], arguments[1], None
    if name in ("_softmax", "_safe_softmax"):
        dim = second
    elif name == "where" and len(node.args) == 3:
        return _dim_of_whole_rows(node)
    elif name == "div" and isinstance(first, fx.Node) and isinstance(second, fx.Node):
        summed, dims, keeps = cast("list[Any]", [*second.args, None, None, False])[:3]
        if name_of(first) == "exp" and name_of(second) == "sum" and summed is first and keeps and len(dims or ()) == 1:
            dim = dims[0]
    return None if dim is None else dim % max(1, node.meta["val"].dim())


def _dim_of_whole_rows(where: fx.Node) -> int | None:
    """Returns the dimension of a softmax's probabilities of which whole rows are 0 where masked; None elsewhere."""
    mask, *results = cast("list[Any]", where.args)
    found = [each for each in results if not _is_zero(each)]
    dim = dim_of_softmax(found[0]) if len(found) == 1 and isinstance(found[0], fx.Node) else None
    if dim is None:
        return None
    values: Tensor = where.meta["val"]
    sizes = (1,) * values.dim() + tuple(mask.meta["val"].shape)
    alike = found[0].meta["val"].dim() == values.dim()
    return dim if alike and sizes[len(sizes) - values.dim() + dim] == 1 else None


def _is_zero(value: Any) -> bool:
    """Says whether an argument is the number 0, or a tensor of nothing else."""
    if not isinstance(value, fx.Node):
        return value == 0
    arguments = cast("list[Any]", value.args)
    place = {"full": 1, "full_like": 1, "scalar_tensor": 0}.get(name_of(value))
    return name_of(value) in ("zeros", "zeros_like") or (place is not None and arguments[place] == 0)


def normalized_by(node: fx.Node) -> dict[int, int]:
    """Returns along which dimensions of its first argument a node works out what a normalization divides by.

    By number, with how many elements of each it takes together: 0 for all. Empty for other nodes.
    """
    arguments: list[Any] = [*node.args, None, None, None]
    name, value, dims = name_of(node), arguments[0], arguments[1]
    values = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(values, Tensor):
        return {}
    if name in ("native_layer_norm", "_fused_rms_norm"):
        dims = [*range(-len(dims), 0)]
    elif name == "native_group_norm":
        channels: Any = values.shape[1]
        inner = dict.fromkeys(range(2, values.dim()), 0)
        return {1: channels // cast("int", node.args[6]), **inner} if is_known(channels) else {}
    elif "batch_norm" in name and "backward" not in name:
        dims = [dim for dim in range(values.dim()) if dim != 1]
    elif name == "linalg_vector_norm":
        dims = arguments[2]
    elif (name == "pow" and dims == 2) or (name == "mul" and dims is value):  # of whose mean the root is the divisor
        means: list[list[Any]] = [[*user.args, None] for user in node.users if name_of(user) in ("mean", "sum")]
        dims = means[0][1] if means else None
        if isinstance(dims, list | tuple) and len(dims) > 1:  # more often a loss, or a penalty
            return {}
    elif name not in ("var_mean", "var"):
        return {}
    return {dim % values.dim(): 0 for dim in dims} if isinstance(dims, list | tuple) and values.dim() else {}


def _is_constant(node: fx.Node) -> bool:
    return node.op == "call_function" and not tensors_of(node)
