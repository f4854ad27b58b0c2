"""What several autograd nodes together tell of a reader: last layers of few results, and normalizations by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from daf_core.autograd.torch_private import Node, fields_of, is_leaf_node, node_number, packed_for
from daf_core.readers.table import (
    DIVISIONS,
    LOGSUMEXP,
    NORMS,
    POWERS,
    STATISTIC_SHARE,
    dim_from_end,
    fields_named,
    has_natural_exponent,
    reads_logits,
    results_of,
)
from daf_core.readers.waiting import Unpack

MOST_NODES = 64
"""Nodes from the loss to a last layer, at most."""

MOST_TO_SCORES = 5
"""Nodes from a softmax to the product that makes its scores, at most: a mask, a factor and views are between."""

MOST_LEADING = 64
"""Nodes that are looked at for them, at most."""

LEADING = 8
"""Operators before one with a pole that need exact values, too: before it takes the logarithm of one of them, a policy
with forbidden actions saves its probabilities, their product with a mask, two quotients by sums and a bound."""

FEW = 16
"""Terms of which a sum may be as small as one of them, as that of an ensemble's probabilities: more make a stop."""

_PICKS = ("Gather", "IndexBackward", "SelectBackward", "NllLoss")
"""What begins the names of nodes that may pick some values of each row."""

MOST_PICKED = 8
"""Values of a row, at most, that count as picked: as many of the largest logarithms stay exact."""

PRODUCT = "MulBackward0"
"""The node of a product, element by element."""

_PRODUCT_INPUTS = {"MmBackward0": "self", "AddmmBackward0": "mat1", "LinearBackward0": "input"}
_SCORES = {"BmmBackward0": "self", "BaddbmmBackward0": "batch1"}
_PROBABILITIES = ("Softmax", "SafeSoftmax")
_TERMS = {"BmmBackward0": {"self": -1, "mat2": -2}}
"""Nodes that sum products, and for what they save of each factor the dimension of their result that it lacks."""
_TANH = "TanhBackward0"
SQUARE = "PowBackward0"
MEANS = ("MeanBackward1", "SumBackward1")
_SPREADS = ("VarBackward0", "StdBackward0", *NORMS)
_RECIPROCALS = ("RsqrtBackward0", "ReciprocalBackward0")

LOG_SOFTMAX = "LogSoftmaxBackward0"

# Their gradient is without bound where a value that they read is small, or at an edge of the domain.
_POLES = {
    node
    for node, _ in fields_named("""
    Log0 Log20 Log100 Log1P0 Logit0 Xlogy0 Xlogy1 Xlogy2 SpecialXlog1Py0 SpecialXlog1Py1 SpecialXlog1Py2: self
    SpecialEntr0 SpecialNdtri0 Sqrt0 Rsqrt0 Reciprocal0 Acos0 Asin0 Acosh0 Atanh0 Erfinv0 Atan20 Hypot0: self
    Lgamma0 Digamma0 Polygamma0 Polygamma1 Mvlgamma0 BinaryCrossEntropy0 Cdist0 EuclideanDist0: self
    Logaddexp0 Logaddexp20 Logcumsumexp0 Prod0 Prod1 Cumprod0: self
""")
}

_STOPS = (
    *("Mm", "Addmm", "Bmm", "Baddbmm", "Linear", "Convolution", "Native", "Cudnn", "Fused", "Mean", "Sum", "Var"),
    *("ScaledDotProduct", "FlashAttention", "EfficientAttention", "Gelu", "Silu", "MvBackward", "DotBackward"),
)
"""What begins the names of nodes behind which no value is small because one before it is: they sum many, or are used as
activation functions alone."""


def product_input(node: Node) -> str | None:
    """Returns the name under which a matrix product saves its input; None where a node is no product."""
    return _PRODUCT_INPUTS.get(node.name())


def last_products(node: Node) -> Iterator[Node]:
    """Yields the matrix products between which and a node no other product is."""
    seen, pending = {node}, [node]
    for node in pending:
        if product_input(node) is not None:
            yield node
        elif len(pending) < MOST_NODES and not is_leaf_node(node):
            following = [each for each, _ in node.next_functions if each is not None and each not in seen]
            seen.update(following)
            pending += following


def normalized(node: Node) -> Iterator[tuple[Node, str]]:
    """Yields what nodes have saved of rows that a normalization by hand divides, with the node and its field.

    It is known by a mean of squares, a variance or a norm of each row, and by the division, or the product with a
    reciprocal, of which it is one number for each row.
    """
    name = node.name()
    if _is_mean_of_rows(node):
        for square, _ in node.next_functions:
            if square is not None and square.name() == SQUARE and square._saved_exponent == 2:
                yield square, "self"
            if square is not None and square.name() == PRODUCT and len({*square.next_functions}) == 1:
                yield from ((square, field) for field in fields_of(square))
    elif _divisor(node) is not None or (name in _SPREADS and _is_of_rows(node)):
        yield node, "self"
    elif name == PRODUCT:
        for (factor, _), field in zip(node.next_functions, ("other", "self"), strict=True):
            if factor is not None and factor.name() in _RECIPROCALS and last_size(factor) == 1:
                yield node, field


def _is_mean_of_rows(node: Node) -> bool:
    """Says whether a node is the mean, or the sum, of each row along the last dimension."""
    return node.name() in MEANS and _is_last(node._saved_dim, len(node._saved_self_sym_sizes))


def _is_of_rows(node: Node) -> bool:
    """Says whether a variance, a deviation or a norm is that of each row along the last dimension."""
    made, dims = node._input_metadata[0], getattr(node, "_saved_dim", None)  # None of all elements, or of one row each
    if made.is_nested_tensor:
        return False
    return _is_last(dims, len(made.shape) + (not getattr(node, "_saved_keepdim", True)))


def _divisor(node: Node) -> Node | None:
    """Returns the root, deviation or norm of each row that a node divides by, or by no less; None where it does not."""
    divisor = node.next_functions[1][0] if node.name() == "DivBackward0" else None
    while divisor is not None and divisor.name() in ("AddBackward0", "ExpandBackward0", "ClampMinBackward0"):
        divisor = divisor.next_functions[0][0]
    if divisor is None or last_size(divisor) != 1:
        return None
    of_rows = divisor.name() in _SPREADS and _is_of_rows(divisor)
    return divisor if of_rows or divisor.name() == "SqrtBackward0" else None


def _is_last(dims: tuple[int, ...] | None, count: int) -> bool:
    """Says whether dimensions, None for all, are the last alone: torch shows one below zero as an unsigned number."""
    return dims is not None and len(dims) == 1 and dims[0] in (count - 1, (1 << 64) - 1)


def has_pole(node: Node, is_large: Callable[[str], bool]) -> bool:
    """Says whether a node's gradient is without bound where a value that it has read is small, or at an edge.

    For `is_large` see `reading_of`.
    """
    name = node.name()
    if name in _POLES or (name == LOGSUMEXP and not reads_logits(node)):
        return True
    if name in DIVISIONS:
        return is_large("other")
    return name in POWERS and not has_natural_exponent(node)


def stops_poles(node: Node) -> bool:
    """Says whether a node's result is no closer to a pole because one value before it is."""
    return node.name().startswith(_STOPS)


def is_large(node: Node, unpack: Unpack, field: str) -> bool:
    """Says whether what a node has saved of a name is no statistic of its result: relative to it, as batches differ.

    Counts never are large, such as those of the words of each row by which a loss is divided.
    """
    packed: Any = packed_for(node, field, unpack)
    results = results_of(node)
    if packed is None or results is None or packed.elements * STATISTIC_SHARE < results:
        return False
    return not (field == "other" and _are_counts(node, packed))


def _are_counts(node: Node, packed: Any) -> bool:
    """Says whether a node divides sums by how many of their terms a mask has kept."""
    total, divisor = (each for each, _ in node.next_functions)
    if divisor is not None or total is None or total.name() != "SumBackward1":
        return False
    if (stored := packed.stored).name != "raw" or not stored.is_unchanged:
        return False
    counts, terms = stored.unpack(), math.prod(total._saved_self_sym_sizes) / max(1, results_of(total) or 0)
    if counts.is_meta or counts.is_complex():
        return False
    return bool(((counts >= 1) & (counts <= terms) & (counts == counts.round())).all())


def narrow_products(newest: Node, unpack: Unpack) -> Iterator[tuple[Node, str]]:
    """Yields the last matrix products before a node that have few results, with the field of their input."""
    for node in last_products(newest):
        if (field := product_input(node)) is not None and _is_narrow(node, unpack):
            yield node, field


def is_done(node: Node, unpack: Unpack) -> bool:
    """Says whether nothing after a node can show that what it has read is needed as it is, or in more bits."""
    return _stops(node, unpack) and not _is_narrow(node, unpack)


def _is_narrow(node: Node, unpack: Unpack) -> bool:
    """Says whether a matrix product has far fewer results than inputs."""
    field = product_input(node)
    packed: Any = None if field is None else packed_for(node, field, unpack)
    results = results_of(node)
    return packed is not None and results is not None and packed.elements >= results * STATISTIC_SHARE


def capped_scores(node: Node) -> Node | None:
    """Returns the tanh that bounds the scores whose probabilities a node returns; None where there is none.

    Their gradient is large where scores are, and there it is multiplied by what a result of almost 1 differs from it.
    """
    if not node.name().startswith(_PROBABILITIES):
        return None
    for _ in range(MOST_TO_SCORES):
        node = next((each for each, _ in node.next_functions if each is not None), None)
        if node is None or is_leaf_node(node) or product_input(node) is not None or node.name() in _SCORES:
            return None
        if node.name() == _TANH:
            return node
    return None


def last_size(node: Node) -> int | None:
    """Returns the size of the last dimension of what a node has made; None where it has none."""
    made = node._input_metadata[0]
    return None if made.is_nested_tensor or not len(made.shape) else made.shape[-1]


def width_of_scores(probabilities: Node, unpack: Unpack) -> int | None:
    """Returns the width of the heads whose scores a softmax is of; None where it is of something else."""
    node = probabilities
    for _ in range(MOST_TO_SCORES):
        node = next((each for each, _ in node.next_functions if each is not None), None)
        if node is None or is_leaf_node(node):
            return None
        if (field := _SCORES.get(node.name())) is not None:
            packed: Any = packed_for(node, field, unpack)
            shape = node._input_metadata[0].shape
            return None if packed is None else packed.elements // max(1, math.prod(shape[:-1]))
    return None


def nodes_since(newest: Node, number: int) -> Iterator[Node]:
    """Yields the nodes from a number on that lead to the newest one, which is the first of them, each once."""
    seen, pending = set[int](), [newest]
    while pending:
        node = pending.pop()
        if node is None or is_leaf_node(node) or (own := node_number(node)) < number or own in seen:
            continue
        seen.add(own)
        yield node
        pending += [following for following, _ in node.next_functions]


def poles(newest: Node, oldest: int, unpack: Unpack) -> Iterator[Node]:
    """Yields nodes with poles that lead to the newest one and have larger numbers than the oldest, whatever they save.

    Where a node saves large values it is found when these are seen. Others save small ones alone, as the logarithm of
    one probability a row.
    """
    for node in nodes_since(newest, oldest + 1):
        if has_several(node) and has_pole(node, partial(is_large, node, unpack)):
            yield node


def has_several(node: Node) -> bool:
    """Says whether a node has made several numbers; a single one, as a loss, is a factor of all gradients before it."""
    return (results_of(node) or 0) > 1


def led_by(node: Node, unpack: Unpack, beginning: bool = False) -> Iterator[object]:
    """Yields what the last operators before a node have saved; with `beginning`, the node is one of them.

    Logarithms of probabilities end that where a few of each row are picked, or their exponentials are summed: whatever
    factor a row then gets, its gradient keeps its relative error.
    """
    pending: list[tuple[Node, int, int | None]] = [(node, 0, None)]
    for step, (node, saved, picked) in enumerate(pending):
        found = []
        if step or beginning:
            if is_leaf_node(node) or _stops(node, unpack) or _is_one_factor(node, picked):
                continue
            picked = results_of(node) if node.name().startswith(_PICKS) else picked
            found = [packed for name in fields_of(node) if (packed := packed_for(node, name, unpack)) is not None]
            yield from found
        saved += bool(found)
        if saved < LEADING and len(pending) < MOST_LEADING:
            pending += [(following, saved, picked) for following, _ in node.next_functions if following is not None]


def _is_one_factor(node: Node, picked: int | None) -> bool:
    """Says whether each row of what a node reads gets one factor, given how many of its results were picked."""
    if node.name() == LOG_SOFTMAX and picked is not None and (results := results_of(node) or 0) > 1:
        return picked * node._input_metadata[0].shape[dim_from_end(node)] <= MOST_PICKED * results
    return node.name() == LOGSUMEXP and reads_logits(node)


def _stops(node: Node, unpack: Unpack) -> bool:
    """Says whether no value before a node has to be small where its result is."""
    return stops_poles(node) and not _picks(node) and not _sums_few(node, unpack)


def _sums_few(node: Node, unpack: Unpack) -> bool:
    """Says whether a node sums so few terms, or products, that the result is as small as they are."""
    if node.name() in MEANS:
        return math.prod(node._saved_self_sym_sizes) <= FEW * max(1, results_of(node) or 0)
    for field, dim in _TERMS.get(node.name(), {}).items():
        packed: Any = packed_for(node, field, unpack)
        if packed is not None:
            made = node._input_metadata[0].shape
            return packed.elements * made[dim] <= FEW * math.prod(made)
    return False


def _picks(node: Node) -> bool:
    """Says whether a node sums what a factor without a gradient may pick, as one probability of each row."""
    if not node.name().startswith("SumBackward"):
        return False
    product = node.next_functions[0][0]
    return product is not None and product.name() == PRODUCT and (None, 0) in product.next_functions
