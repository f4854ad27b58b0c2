"""Vectors whose cosines or distances a forward graph works out by products of matrices.

Outside of graphs, `daf_core.readers.losses.almost_equal_factors` looks for them among autograd's nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import islice
from typing import cast

from torch import fx

from daf_core.autograd.torch_compile import reached
from daf_core.compiled.dimensions import viewed
from daf_core.compiled.readers import is_view, multiple_of, name_of, squares, tensors_of
from daf_core.compiled.sizes import elements_of, hint
from daf_core.readers.patterns import MOST_NODES

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_SIGNS = ("add", "sub", "rsub", "neg")
_SUMS = ("sum", "mean", "linalg_vector_norm")


def compared_rows(forward: fx.Graph, known: Set[fx.Node]) -> set[fx.Node]:
    """Returns the vectors, and what was normalized to them; `known` are the nodes that depend on what has a gradient.

    Of vectors that are almost equal the gradient is what little is between them: its errors were .04 at 8 bits and .6
    at 4. Terms of a distance, a ** 2 + b ** 2 - 2 * a @ b, may be parts of the factors, as torch's own function has it.
    """
    found: set[fx.Node] = set()
    for product in forward.nodes:
        if name_of(product) not in _PRODUCTS:
            continue
        factors = [*map(_unscaled, _arguments_of(product)[-2:])]
        parts = [part for each in factors for part in _parts_of(each)]
        if any(_squared(each) in parts for each in (*parts, *_added_to(product))):
            found.update(parts)
        elif _is_one(product):  # products of many matrices are attention, as a rule
            vectors = [each for factor in factors if (each := _normalized(factor)) is not None]
            weights = [each for each in vectors if each.op == "placeholder" and each in known]
            if len(vectors) == len(factors) and len(weights) != 1:  # of a layer of cosines
                found.update(factors, vectors)
    return found


def _is_one(product: fx.Node) -> bool:
    """Says whether a product is one of two matrices, such as that of an einsum."""
    values = product.meta["val"]
    return values.dim() == 2 or hint(values.shape[0]) == 1


def _arguments_of(product: fx.Node) -> Sequence[fx.Node]:
    return cast("Sequence[fx.Node]", product.args)  # one may be there twice


def _unscaled(node: fx.Node) -> fx.Node:
    """Returns of what a node is a view or a multiple, also by a tensor of one number, such as a temperature."""
    while (source := _multiplied(multiple_of(viewed(node))[0])) is not node:
        node = source
    return node


def _multiplied(node: fx.Node) -> fx.Node:
    """Returns what a node multiplies or divides by one number; the node where it does something else."""
    if name_of(node) not in ("mul", "div"):
        return node
    several = [each for each in tensors_of(node) if elements_of(each.meta["val"]) > 1]
    return several[0] if len(several) == 1 and len(tensors_of(node)) == 2 else node


def _parts_of(factor: fx.Node) -> Sequence[fx.Node]:
    return [*map(_unscaled, tensors_of(factor))] if name_of(factor) == "cat" else [factor]


def _added_to(product: fx.Node) -> Iterator[fx.Node]:
    """Yields the terms of sums that have a product among theirs."""

    def is_same(node: fx.Node) -> bool:
        return is_view(node) or multiple_of(node)[0] is not node

    behind = reached([product], lambda node: node.users if node is product or is_same(node) else ())
    sums = [*_arguments_of(product)[:-2], *(each for each in islice(behind, MOST_NODES) if name_of(each) in _SIGNS)]
    terms = reached(sums, lambda node: tensors_of(node) if name_of(node) in _SIGNS or is_same(node) else ())
    return islice(terms, MOST_NODES)  # of a chain of residuals each has all before it among its terms


def _squared(node: fx.Node) -> fx.Node | None:
    """Returns the vectors whose squares a node sums; None where it does something else."""
    if name_of(node := _unscaled(node)) not in _SUMS:
        return None
    source = _unscaled(tensors_of(node)[0])
    if name_of(node) == "linalg_vector_norm":
        return source
    return _unscaled(tensors_of(source)[0]) if squares(source) else None


def _normalized(node: fx.Node) -> fx.Node | None:
    """Returns the vectors that a node divides by their norms; None where it does something else."""
    if name_of(node) not in ("mul", "div") or len(tensors_of(node)) != 2:
        return None
    for vectors, norms in (tensors_of(node), reversed(tensors_of(node))):
        while name_of(norms) not in _SUMS and len(tensors_of(norms)) == 1:
            [norms] = tensors_of(norms)
        if _squared(norms) is (source := _unscaled(vectors)):
            return source
    return None
