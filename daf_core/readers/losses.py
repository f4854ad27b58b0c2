"""What losses tell of what they read: terms cancel in their gradient, or weigh far more in some rows than in others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from daf_core.autograd.torch_private import Node, fields_of, is_leaf_node, packed_for
from daf_core.readers.patterns import MEANS, MOST_NODES, PRODUCT, SQUARE, has_several, is_large
from daf_core.readers.table import LAYERS, MOVES, NORMS, STATISTIC_SHARE, results_of
from daf_core.readers.waiting import Unpack

MOST_TO_FACTOR = 5
"""Nodes from a product to what makes a factor of it, at most: a factor of that and views are between."""

MOST_TERMS = 12
"""Nodes that are looked at for the terms of a distance, at most: two squares and a product, with views and factors."""

_TOTALS = ("MeanBackward0", "SumBackward0")
_SIGNS = ("NegBackward", "AddBackward", "SubBackward", "RsubBackward")
_TERMS = (*MOVES, *_SIGNS, "MeanBackward", "SumBackward", "StackBackward", "CatBackward")
_FACTORS = ("MulBackward", "DivBackward")
_PRECISIONS = ("ExpBackward", "Softplus", "Clamp")
_MOVED = (*MOVES, *_FACTORS)
_BOUNDED = ("Sigmoid", "Softmax", "SafeSoftmax", "Tanh", "ExpBackward", "LogSigmoid", "LogSoftmax")
_MATRIX_PRODUCTS = ("MmBackward0", "BmmBackward0")
_ADDS_PRODUCT = ("AddmmBackward0", "BaddbmmBackward0")


def almost_equal_factors(node: Node) -> Iterator[tuple[Node, str]]:
    """Yields what cosines and distances that are written out have saved of vectors, with the node and its field.

    Of vectors that are almost parallel, or equal, the gradient is what little of one is at right angles to the other,
    or apart: the error of a cosine's was .67 at 4 bits, and is .12. Torch's own function is known by its name.
    """
    for product in _products_of_rows(node):
        factors = (each for each, _ in product.next_functions[-2:] if each is not None)
        found = [_normalizes(_unscaled(each), node) for each in factors]
        # A layer of cosines multiplies its input, normalized or not, by a weight.
        known = any(found) if product.name() == PRODUCT else all(found)
        for each in (product, *chain.from_iterable(found)) if known else ():
            yield from ((each, field) for field in fields_of(each))
    for each in _parts_of_distances(node):
        yield from ((each, field) for field in fields_of(each))


def _products_of_rows(node: Node) -> Iterator[Node]:
    """Yields the products of vectors that a node sums, or is itself: one of matrices, or one of each pair."""
    name = node.name()
    if name in (*MEANS, *_TOTALS):
        yield from (each for each, _ in node.next_functions if each is not None and each.name() == PRODUCT)
    elif name in (*_MATRIX_PRODUCTS, *_ADDS_PRODUCT) and not (made := node._input_metadata[0]).is_nested_tensor:
        # Products of many matrices are attention, as a rule; those of an einsum are one, or one of each pair.
        yield from [node] if len(made.shape) == 2 or made.shape[0] == 1 or tuple(made.shape[1:]) == (1, 1) else ()


def _normalizes(node: Node | None, total: Node) -> tuple[Node, ...]:
    """Returns a node that divides by a norm, as it is or where that is not too small, and that of the norm.

    The norm is one of features, no weights, along what `total` sums, if that sums some dimensions alone.
    """
    divisor = node.next_functions[1][0] if node is not None and node.name() == "DivBackward0" else None
    while divisor is not None and divisor.name() in ("AddBackward0", "ExpandBackward0", "ClampMinBackward0"):
        divisor = divisor.next_functions[0][0]
    if (
        node is None
        or divisor is None
        or divisor.name() not in NORMS
        or (results_of(divisor) or 0) >= (results_of(node) or 0)
    ):
        return ()
    values, norms = node._input_metadata[0].shape, divisor._input_metadata[0].shape
    if total.name() in MEANS and len(values) == len(norms):
        summed = {dim - (1 << 64) if dim >= 1 << 63 else dim for dim in total._saved_dim or ()}
        along = {dim for dim, (size, norm) in enumerate(zip(values, norms, strict=True)) if size != norm}
        if not along & {dim % len(values) for dim in summed}:
            return ()
    source = _made_by(node.next_functions[0][0], (*_MOVED, "AddBackward"))
    return () if source is None or is_leaf_node(source) else (node, divisor)


def _parts_of_distances(node: Node) -> Iterator[Node]:
    """Yields squares of rows, and their product that is taken from the sum of these: a ** 2 + b ** 2 - 2 * a @ b."""
    products, sums = [node] if node.name() in _ADDS_PRODUCT else [], node.next_functions[:1]
    if node.name() in ("SubBackward0", "AddBackward0"):
        sums = node.next_functions
    elif not products:
        return
    last = [made for each, _ in sums if (made := _made_by(each, _MOVED)) is not None]
    if not products and not any(each.name() in (*_MATRIX_PRODUCTS, *MEANS) for each in last):
        return  # most sums, of which a graph has many
    terms = [term for each, _ in sums if each is not None for term in _terms_of(each)]
    products += [each for each in terms if each.name() in _MATRIX_PRODUCTS]
    squares = [square for each in terms if products and (square := _square_of_rows(each)) is not None]
    of_squares = [_made_by(square.next_functions[0][0], _MOVED) for square in squares]
    for product in products:
        if any(_made_by(each, _MOVED) in of_squares for each, _ in product.next_functions[-2:] if each is not None):
            yield from (*squares, product)


def _terms_of(node: Node) -> Iterator[Node]:
    """Yields what has made the terms of a sum, without the numbers that it is multiplied by and views."""
    pending = [node]
    for each in pending:
        name, before = each.name(), [made for made, _ in each.next_functions if made is not None]
        scales = name.startswith(_FACTORS) and len(before) == 1
        if len(pending) < MOST_TERMS and (scales or name.startswith((*MOVES, *_SIGNS))):
            pending += before
        else:
            yield each


def _square_of_rows(node: Node) -> Node | None:
    """Returns what has squared what a node sums along some dimensions; None where nothing has."""
    first = node.next_functions[0][0] if node.name() == "SumBackward1" else None
    return first if first is not None and _is_square(first) else None


def _made_by(node: Node | None, moves: tuple[str, ...] = MOVES) -> Node | None:
    """Returns what has made the values that nodes whose names begin so may have moved."""
    for _ in range(MOST_TO_FACTOR):
        if node is None or not node.name().startswith(moves):
            break
        node = node.next_functions[0][0]
    return node


def _unscaled(node: Node | None) -> Node | None:
    """Returns what has made vectors, but for their sign, views and one number that multiplies all, as a temperature."""
    for _ in range(MOST_TO_FACTOR):
        if node is None or not node.name().startswith((*_MOVED, "NegBackward")):
            break
        several = [each for each, _ in node.next_functions if each is not None and has_several(each)]
        if len(several) != 1:  # as a quotient of vectors and their norms
            break
        [node] = several
    return node


def weighed_errors(total: Node, unpack: Unpack) -> Iterator[Node]:
    """Yields products of which a loss is the sum, one factor of which is large where the other is small.

    A squared error and the precision that a model predicts for it, or a weight of each error, are such factors: the
    gradient of the one is the other. With codes, whose error is that of the largest of a group, the gradient of a
    likelihood with predicted variances had an error of .24 at 8 bits and 2.2 at 4.
    """
    pending, weights, found = [total] if total.name() in _TOTALS else [], list[Node](), list[Node]()
    for node in pending:
        factors = [each for each, _ in node.next_functions if each is not None]
        scales = node.name().startswith(_FACTORS) and len(factors) == 1
        if (
            node.name() == PRODUCT
            and has_several(node)
            and any(_is_weighed_error(each, node, unpack) for each in factors)
        ):
            found.append(node)
        elif len(pending) < MOST_NODES and (scales or node.name().startswith(_TERMS)):
            weights += [node] * (node.name() == PRODUCT)
            pending += factors
    if found:  # to ask for what a worker is packing would wait for it
        yield from (*found, *(each for each in weights if _weighs_each(each, unpack)))


def _is_weighed_error(error: Node, product: Node, unpack: Unpack) -> bool:
    """Says whether a factor of a product is a squared error, and the other predicted, or a weight of each element."""
    if not _is_squared_error(error):
        return False
    others = [each for each, _ in product.next_functions if each is not None and each is not error]
    if not others:  # it may be a square of a square
        return (None, 0) in product.next_functions and _weighs_each(product, unpack)
    if (results_of(others[0]) or 0) * STATISTIC_SHARE >= (results_of(product) or 0):
        return True
    source = _made_by(others[0], (*_MOVED, *_SIGNS, *_PRECISIONS))
    return has_several(others[0]) and source is not None and source.name().startswith(LAYERS)


def _weighs_each(product: Node, unpack: Unpack) -> bool:
    """Says whether the constant of a product is a weight of each element, and no number, a few of them or a mask."""
    field = "other" if product.next_functions[1][0] is None else "self"
    weights: Any = packed_for(product, field, unpack)
    return weights is not None and is_large(product, unpack, field) and weights.stored.lossy


def _is_squared_error(node: Node) -> bool:
    """Says whether a node squares what has no bound, or sums or moves that: what a sure model lacks of 1 has one."""
    for _ in range(MOST_TO_FACTOR):
        before = [each for each, _ in node.next_functions if each is not None]
        if _is_square(node) and before:
            return not any(each.name().startswith(_BOUNDED) for each in _terms_of(before[0]))
        if len(before) != 1 or not node.name().startswith((*_MOVED, *MEANS)):
            return False
        node = before[0]
    return False


def _is_square(node: Node) -> bool:
    """Says whether a node squares what it reads, as a power or as a product with itself."""
    if node.name() == SQUARE:
        return node._saved_exponent == 2
    return node.name() == PRODUCT and len({*node.next_functions}) == 1
