"""What losses tell of what they read: terms cancel in their gradient, or weigh far more in some rows than in others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from daf_core.autograd.torch_private import Node, fields_of, is_leaf_node, packed_for
from daf_core.readers.patterns import MEANS, MOST_NODES, PRODUCT, SQUARE, has_several, is_large
from daf_core.readers.table import MOVES, NORMS, reads_logits, results_of
from daf_core.readers.waiting import Unpack

MOST_TO_FACTOR = 5
"""Nodes from a product to what makes a factor of it, at most: a factor of that and views are between."""

_TOTALS = ("MeanBackward0", "SumBackward0")
_TERMS = (*MOVES, "Neg", "Add", "Sub", "Mean", "Sum", "Stack", "Cat")
_FACTORS = ("MulBackward", "DivBackward")
_EXP = "ExpBackward0"
_BATCHED = "BmmBackward0"
_MATRIX_PRODUCTS = ("MmBackward0", _BATCHED)
_ADDS_PRODUCT = ("AddmmBackward0", "BaddbmmBackward0")


def almost_equal_factors(node: Node) -> Iterator[tuple[Node, str]]:
    """Yields what cosines and distances that are written out have saved of vectors, with the node and its field.

    Of vectors that are almost parallel, or equal, the gradient is what little of one is at right angles to the other,
    or apart: the error of a cosine's was .67 at 4 bits, and is .12. Torch's own function is known by its name.
    """
    for product in _products_of_rows(node):
        found = [_normalizes(_made_by(each)) for each, _ in product.next_functions if each is not None]
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
    elif name == "MmBackward0" or (name == _BATCHED and tuple(node._input_metadata[0].shape[1:]) == (1, 1)):
        yield node


def _normalizes(node: Node) -> tuple[Node, ...]:
    """Returns a node that divides by a norm, as it is or where that is not too small, and that of the norm."""
    divisor = node.next_functions[1][0] if node.name() == "DivBackward0" else None
    while divisor is not None and divisor.name() in ("AddBackward0", "ExpandBackward0", "ClampMinBackward0"):
        divisor = divisor.next_functions[0][0]
    if divisor is None or divisor.name() not in NORMS or (results_of(divisor) or 0) >= (results_of(node) or 0):
        return ()
    values = node.next_functions[0][0]
    return () if values is None or is_leaf_node(values) else (node, divisor)


def _parts_of_distances(node: Node) -> Iterator[Node]:
    """Yields squares of rows, and the product of matrices that is taken from their sum: a ** 2 + b ** 2 - 2 * a @ b."""
    products, sums = [node] if node.name() in _ADDS_PRODUCT else [], node.next_functions[:1]
    if node.name() in ("SubBackward0", "AddBackward0"):
        sums = node.next_functions
    elif not products:
        return
    terms = [term for each, _ in sums if each is not None for term in _terms_of(each)]
    products += [each for each in terms if each.name() in _MATRIX_PRODUCTS]
    squares = [square for each in terms if (square := _square_of_rows(each)) is not None]
    if products and squares:
        yield from (*squares, *products)


def _terms_of(node: Node) -> Iterator[Node]:
    """Yields what has made the terms of a sum, without the numbers that it is multiplied by and views."""
    pending = [node]
    for each in pending:
        name, before = each.name(), [made for made, _ in each.next_functions if made is not None]
        moves = name.startswith((*MOVES, "Neg", "Add", "Sub")) and name not in _ADDS_PRODUCT
        if len(pending) < MOST_NODES and (moves or (name.startswith(_FACTORS) and len(before) == 1)):
            pending += before
        else:
            yield each


def _square_of_rows(node: Node) -> Node | None:
    """Returns what has squared what a node sums along some dimensions; None where nothing has."""
    first = node.next_functions[0][0] if node.name() == "SumBackward1" else None
    return first if first is not None and _is_square(first) else None


def _made_by(node: Node) -> Node:
    """Returns what has made the values that a node may have moved."""
    for _ in range(MOST_TO_FACTOR):
        before = node.next_functions[0][0] if node.name().startswith(MOVES) else None
        if before is None:
            break
        node = before
    return node


def weighed_errors(total: Node, unpack: Unpack) -> Iterator[Node]:
    """Yields products of which a loss is the sum, one factor of which is large where the other is small.

    A squared error and the precision that a model predicts for it, or a weight for each error, are such factors: the
    gradient of the one is the other. With codes, whose error is that of the largest of a group, the gradient of a
    likelihood with predicted variances had an error of .24 at 8 bits and 2.2 at 4.
    """
    pending, weights, found = [total] if total.name() in _TOTALS else [], list[Node](), list[Node]()
    for node in pending:
        factors = [each for each, _ in node.next_functions if each is not None]
        scales = node.name().startswith(_FACTORS) and len(factors) == 1
        weighs = node.name() == PRODUCT and has_several(node) and not (scales and _is_scaled(node, unpack))
        if weighs and any(map(_is_precision_or_error, factors)):
            found.append(node)
        elif len(pending) < MOST_NODES and (scales or node.name().startswith(_TERMS)):
            weights += [node] * weighs
            pending += factors
        elif _is_square(node):
            pending += [each for each in {*factors} if each.name() == PRODUCT]
    yield from found and (*found, *weights)


def _is_scaled(product: Node, unpack: Unpack) -> bool:
    """Says whether the constant of a product is a number, a few of them or a mask, and no weight of each element."""
    field = "other" if product.next_functions[1][0] is None else "self"
    weights: Any = packed_for(product, field, unpack)
    return weights is None or not weights.stored.lossy or not is_large(product, unpack, field)


def _is_square(node: Node) -> bool:
    """Says whether a node squares what it reads, as a power or as a product with itself."""
    if node.name() == SQUARE:
        return node._saved_exponent == 2
    return node.name() == PRODUCT and len({*node.next_functions}) == 1


def _is_precision_or_error(node: Node) -> bool:
    """Says whether a node squares something, or takes the exponential of what a layer has made; or multiplies that."""
    for _ in range(MOST_TO_FACTOR):
        name, before = node.name(), [each for each, _ in node.next_functions if each is not None]
        if _is_square(node):
            return True
        if name == _EXP:
            return has_several(node) and reads_logits(node)
        if len(before) != 1 or not name.startswith((*MOVES, *_FACTORS)):
            return False
        node = before[0]
    return False
