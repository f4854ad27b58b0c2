"""What a forward graph works out before a logarithm, a root or the like: the gradient there is large where it is small.

Outside of graphs, `daf_core.readers.patterns.led_by` finds the same among autograd's nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any, cast

import torch
from torch import Tensor, fx

from daf_core.autograd.torch_compile import reached
from daf_core.compiled.dimensions import viewed
from daf_core.compiled.readers import (
    EXPONENTIALS,
    is_above_one,
    is_bounded,
    is_square,
    is_view,
    name_of,
    squares,
    tensors_of,
)
from daf_core.compiled.sizes import elements_of, hint
from daf_core.readers.patterns import FEW, MOST_LEADING, MOST_NODES
from daf_core.readers.table import STATISTIC_SHARE, is_natural

_POLES = frozenset(
    (
        *("log", "log2", "log10", "log1p", "logit", "xlogy", "special_xlog1py", "special_entr", "sqrt", "rsqrt"),
        *("reciprocal", "acos", "asin", "acosh", "atanh", "erfinv", "atan2", "hypot", "lgamma", "digamma", "polygamma"),
        *("prod", "cumprod", "logaddexp", "logaddexp2"),
    )
)
"""Operators whose gradient is without bound where what they read is small, or at an edge of their domain."""
_ENDS = ("detach", "alias")
"""Operators behind which there is no gradient: what is saved is such a copy, too."""
_SUMS, _PRODUCTS = ("sum", "mean"), ("bmm", "baddbmm")
_BOUNDED = ("sigmoid", "_softmax", "tanh", "exp", "_log_softmax")
_TERMS, _FACTORS = ("neg", "add", "sub", "rsub", "stack", "cat", *_SUMS), ("mul", "div")
_LINEAR = (*_TERMS, *_FACTORS)
_STOPS = (
    *("mm", "addmm", "addbmm", "mv", "addmv", "dot", "linear", "convolution", "var", "std", "embedding", "_grouped_mm"),
    *("native_", "_native", "batch_norm", "_fused", "_scaled_dot_product", "_softmax_backward", "gelu", "silu"),
)
"""What begins the names of operators behind which no value is small because one before it is."""


def before_poles(forward: fx.Graph, known: Set[fx.Node]) -> set[fx.Node]:
    """Returns the nodes whose results have to be exact where they are saved, and what they are worked out again of.

    Of those that are `known`, which depend on what has a gradient.
    """
    poles = [node for node in forward.nodes if node in known and _has_pole(node)]
    leading = [each for node in poles for each in _leading(node)]
    for product in _weighed_errors(forward, known):
        leading += [product, *_leading(product, stops=True)]
    return {viewed(each) for each in leading if each in known}


def with_gradient(forward: fx.Graph, backward: fx.Graph) -> set[fx.Node]:
    """Returns the forward nodes that depend on what backward makes a gradient of: a teacher's probabilities do not."""
    given, gradients = forward.find_nodes(op="placeholder"), cast("list[Any]", backward.output_node().args[0])
    if len(given) == len(gradients):  # there may be more, such as sizes
        given = [each for each, gradient in zip(given, gradients, strict=True) if gradient is not None]
    return set(reached(given, lambda node: [each for each in node.users if name_of(each) not in _ENDS]))


def _has_pole(node: fx.Node) -> bool:
    """Says whether a node's gradient, of several numbers, is without bound where what it reads is small, or at an edge.

    Not that of a sigmoid or softplus that is written out, nor where a row has one divisor, which stays exact.
    """
    values, name, arguments = node.meta.get("val"), name_of(node), [*node.args, None]
    if not isinstance(values, Tensor) or elements_of(values) < 2:
        return False
    if name == "pow":
        return not is_natural(arguments[1])
    if name == "div":
        divisor = arguments[1]
        sizes = divisor.meta.get("val") if isinstance(divisor, fx.Node) else None
        if not isinstance(divisor, fx.Node) or not isinstance(sizes, Tensor) or is_above_one(divisor):
            return False
        return elements_of(sizes) * STATISTIC_SHARE >= elements_of(values) and not _is_of_softmax(divisor)
    if name not in _POLES or is_bounded(node):
        return False
    return not any(is_above_one(each) or _is_of_softmax(each) for each in tensors_of(node))


def _is_of_softmax(node: fx.Node) -> bool:
    """Says whether a node sums exponentials of which the largest is 1, as softmax and log-softmax do."""
    node = viewed(node)
    if name_of(node) != "sum" or name_of(exponential := viewed(tensors_of(node)[0])) not in EXPONENTIALS:
        return False
    argument = viewed(tensors_of(exponential)[0])
    return name_of(argument) == "sub" and any(name_of(viewed(each)) == "amax" for each in tensors_of(argument)[1:])


def _leading(pole: fx.Node, stops: bool = False) -> Iterator[fx.Node]:
    """Yields what the operators before a node have made, back to those that sum many, whose results are among it if so.

    A graph saves these where it works out again what is made of them.
    """
    pending = [pole]
    for node in pending:  # which grows meanwhile
        for source in () if node is not pole and _stops(node) else tensors_of(node):
            values = source.meta.get("val")
            known = source in pending or len(pending) > MOST_LEADING
            if (
                known
                or (_stops(source) and not stops)
                or (isinstance(values, Tensor) and not values.is_floating_point())
            ):
                continue
            pending.append(source)
            yield source


def _weighed_errors(forward: fx.Graph, known: Set[fx.Node]) -> Iterator[fx.Node]:
    """As `daf_core.readers.losses.weighed_errors`, and products of errors and predicted deviations that are squared."""
    pending = [node for node in forward.nodes if name_of(node) in _SUMS and elements_of(node.meta["val"]) == 1]
    for node in pending:  # which grows meanwhile
        name, factors = name_of(node), [each for each in tensors_of(node) if each in known]
        if name == "mul" and any(_weighs(node, each) for each in factors if _is_squared_error(each, known)):
            yield node
        elif len(pending) < MOST_NODES:
            if is_view(node) or name in _TERMS or (name in _FACTORS and len(factors) == 1):
                pending += [each for each in factors if each not in pending]
            elif is_square(node):
                pending += [each for each in factors if name_of(each) == "mul" and each not in pending]
            elif name == "mul" and any(squares(user) for user in node.users) and any(map(_is_predicted, factors)):
                yield node


def _weighs(product: fx.Node, error: fx.Node) -> bool:
    """Says whether the other factor of a product is predicted, or a weight of each element: no number and no mask."""
    for other in tensors_of(product):
        values, masks = other.meta.get("val"), [each.meta.get("val") for each in (other, *tensors_of(viewed(other)))]
        is_mask = any(isinstance(mask, Tensor) and mask.dtype is torch.bool for mask in masks)
        if other is error or is_mask or not isinstance(values, Tensor):
            continue
        if elements_of(values) * STATISTIC_SHARE >= elements_of(product.meta["val"]):
            return True
        if _is_predicted(other):
            return True
    return False


def _is_predicted(node: fx.Node) -> bool:
    """Says whether a node is the exponential, or a softplus, of what a layer has made, or a multiple of it."""
    names: list[str] = []
    for _ in range(MOST_NODES):
        node = viewed(node)
        names.append(name_of(node))
        if len(sources := tensors_of(node)) != 1 or names[-1].startswith(_STOPS):
            break
        [node] = sources
    *bends, last = names
    return last.startswith(_STOPS) and not {"exp", "softplus"}.isdisjoint(bends)


def _is_squared_error(node: fx.Node, known: Set[fx.Node]) -> bool:
    """Says whether a node squares what has no bound, or sums or moves that: what a sure model lacks of 1 has one."""
    for _ in range(MOST_NODES):
        node = viewed(node)
        sources = tensors_of(node)
        if squares(node):
            made = reached(sources, lambda each: tensors_of(each) if name_of(each) in _LINEAR or is_view(each) else ())
            return not any(name_of(each) in _BOUNDED for each in made if each in known)
        if len(sources) != 1 or name_of(node) not in (*_SUMS, *_FACTORS):
            return False
        [node] = sources
    return False


def _stops(node: fx.Node) -> bool:
    name = name_of(node)
    if name in _SUMS:
        [values] = tensors_of(node)[:1]
        return elements_of(values.meta["val"]) > FEW * elements_of(node.meta["val"])
    if name in _PRODUCTS:
        return hint(tensors_of(node)[-1].meta["val"].shape[-2]) > FEW
    return name.startswith(_STOPS)
