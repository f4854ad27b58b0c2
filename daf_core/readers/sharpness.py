"""How sharp an attention or a softmax is, and how many bits what its backward reads needs then.

An error of a score multiplies a probability by its exponential, and the error of a score grows with the deviation of
the scores. Measured at 4 bits (2 x 4 heads of 64, 128 keys): the gradient's error is 1.1 times that of attention
written out at a deviation of 1, 1.5 times at 3 and 3.6 times at 10. With twice the bits for query and key it is .7.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from daf_core.autograd.torch_private import Node, fields_of, packed_for
from daf_core.readers.losses import almost_equal_factors
from daf_core.readers.patterns import (
    LOG_SOFTMAX,
    MOST_NODES,
    PRODUCT,
    capped_scores,
    last_size,
    normalized,
    width_of_scores,
)
from daf_core.readers.places import Place
from daf_core.readers.table import (
    DIVISIONS,
    GLU,
    LOGSUMEXP,
    MOVES,
    NARROW,
    NORMS,
    SOFTMAXES,
    Kind,
    Reading,
    dim_from_end,
)
from daf_core.readers.waiting import Unpack

SHARP = 2.5
"""Deviation of the scores from which query and key take twice the bits."""

SHARP_FOR_BYTES = 5.0
"""The same for query and key in 8 bits, which then stay exact."""

_BENT = frozenset(("SinBackward0", "CosBackward0", "AtanBackward0", "AsinhBackward0", GLU))
"""Operators whose derivative changes within a unit of their argument, however large that is. At a deviation of 10 the
gradient of a sine had a cosine of .48 at 4 bits and an error of .07 at 8, at 30 of -.1 and .2."""

EXPONENTIALS = frozenset(("ExpBackward0", "Exp2Backward0"))
"""Operators whose gradient is multiplied by their result. Where its logarithms deviate by `SHARP` it takes twice the
bits, up to 8: most of it is small then beside the largest, to which codes are relative. Of decays whose logarithms
deviate by 80, as in a gated linear attention, the gradient of the gate had an error of .59 at 4 bits, .29 with 8 for
them."""

_CARRIES = (*MOVES, "Neg", "Stack", "Cat", "MeanBackward", "SumBackward", "MulBackward", "DivBackward")
"""What begins the names of nodes behind which a logsumexp, or a product, is still one term."""

_BENDS = ("LogBackward", "Pow", "Sqrt")
_MIXES = (*MOVES, "Neg", "Stack", "Cat", "AddBackward", "SubBackward", "LogsumexpBackward", "Clamp", *_BENDS)
"""What begins the names of nodes that compare a model's probabilities with others, mix them with others, or take powers
or logarithms of them: `_BENDS`, without which weights of probabilities compare nothing, as those of an attention."""

_WITH_OTHERS = ("SubBackward0", "StackBackward0")
"""Those of them that show a teacher where something has no node. To add a number is no comparison."""

_OF_PROBABILITIES: dict[str, tuple[str, ...]] = {
    LOG_SOFTMAX: ("result",),
    LOGSUMEXP: ("self",),
    **dict.fromkeys(SOFTMAXES, ("result",)),
    "LogSigmoidBackward0": ("self", "buffer"),
    "SoftplusBackward0": ("self",),
    "LogBackward0": (),
}
"""Nodes that make what is compared, and what each saves that its gradient's error would come from. What a logarithm
reads is exact in any case."""

WIDE = 30.0
"""Deviation of an argument from which it stays exact."""

SHORT = 16
"""Probabilities below which a softmax stays exact: so few share a scaling group with those of other rows, and no longer
sum to 1."""

SURE = 0.1
"""Mean probability of all but the largest of a row below which a softmax stays exact: its gradient is what is left of
terms that cancel. At .15 the error was .04 at 8 bits, at .004 .15 and at .00007 1.0, at 4 bits too."""

MOST_ROWS = 64
"""Of a softmax that are looked at."""

MOST_BELOW = 0.1
"""Of the largest, by which codes of numbers that are not negative may decode to less than 0."""

FEW = 64
"""Probabilities of a row below which the largest 8, which stay exact, would take more than the codes."""

PEAK = 0.25
"""Mean share of the largest in its row from which few probabilities that are compared stay exact: a step of 8 bits
beside the sum of all others is .003 at .25 and .08 at .87."""

MOST_RESULTS = 4096
"""Of an exponential that are looked at."""

GOLDEN = 0.6180339887498949
"""Multiples of it spread evenly between 0 and 1, however many there are."""

MOST_HEADS, MOST_QUERIES, MOST_KEYS = 16, 32, 256
"""Of each attention that are looked at."""

_HEADS_LATER = ("FlashAttentionBackward0", "EfficientAttentionBackward0", "CudnnAttentionBackward0")
"""Nodes whose heads are the dimension before the last; others have the positions there."""


def bits_for(bits: int | None, deviation: float) -> int | None:
    """Returns the bits for a query or key whose scores deviate so, where others get `bits`; None is exact."""
    if not bits or deviation < (SHARP_FOR_BYTES if bits == 8 else SHARP):
        return bits
    return None if bits == 8 else 2 * bits


def takes_same_bits(before: float, now: float) -> bool:
    """Says whether query and key take the same bits at two deviations, whatever others take."""
    return all((before < bound) is (now < bound) for bound in (SHARP, SHARP_FOR_BYTES))


def score_deviation(node: Node, query: Tensor, key: Tensor) -> float:
    """Returns the deviation of the scores of one query, in the sharpest of some heads.

    Args:
        node: The attention's autograd node.
        query: Of shape (..., heads, queries, width), or (..., queries, heads, width) for nodes of nested tensors.
        key: The same with keys, and perhaps fewer heads, of which each serves several.
    """
    if node.name() in _HEADS_LATER:
        query, key = query.transpose(-2, -3), key.transpose(-2, -3)
    groups = max(query.shape[-3] // key.shape[-3], 1)
    some_keys = key[..., :: -(-key.shape[-2] // MOST_KEYS), :].repeat_interleave(groups, -3)
    some_queries = query[..., :: -(-query.shape[-2] // MOST_QUERIES), :]
    queries, keys = (part.detach().flatten(0, -3)[:MOST_HEADS].float() for part in (some_queries, some_keys))
    if keys.shape[-2] < 2:
        return 0.0
    scale = query.shape[-1] ** -0.5 if node._saved_scale is None else node._saved_scale
    variances = (queries @ keys.mT * scale).var(-1).mean(-1)
    return float(variances.nan_to_num(0.0, 0.0).max().sqrt())


def of_argument(reading: Reading, node: Node, argument: Tensor) -> Reading:
    """Returns what a node needs of its argument: more bits where its derivative changes within a step of codes."""
    if node.name() not in _BENT or argument.is_meta:
        return reading
    return _of_values(reading, argument)


def of_new_values(reading: Reading, argument: Tensor) -> Reading:
    """Returns what a sine or the like needs of its argument now, given what it needed; the same of others."""
    if reading.reader not in _BENT or not reading.takes_approximations or argument.is_meta:
        return reading
    found = _of_values(reading, argument)
    same = found.takes_approximations and takes_same_bits(reading.deviation, found.deviation)
    return reading if same else found


def _of_values(reading: Reading, argument: Tensor) -> Reading:
    gate = argument.chunk(2, reading.dim)[1] if reading.reader == GLU else argument
    deviation = float(gate.detach().float().std(correction=0).nan_to_num(0.0, 0.0, 0.0))
    return Reading(Kind.EXACT, reading.reader) if deviation >= WIDE else replace(reading, deviation=deviation)


def of_result(reading: Reading, node: Node, result: Tensor, unpack: Unpack) -> Reading:
    """Returns what a node needs of its result: softmaxes that codes would spoil are exact, decays take more bits."""
    if needs_exact_softmax(node, result, unpack):
        return Reading(Kind.EXACT, reading.reader)
    return replace(reading, deviation=SHARP) if node.name() in EXPONENTIALS and _decays(result) else reading


def _decays(result: Tensor) -> bool:
    """Says whether the logarithms of an exponential's results deviate much, where they are no zeros."""
    if result.is_meta or not result.is_floating_point():
        return False
    logarithms = some_of(result.detach().reshape(-1), 0, MOST_RESULTS).float().log()
    found = logarithms[logarithms.isfinite()]
    return len(found) > 1 and float(found.std()) >= SHARP


def told_by(node: Node, unpack: Unpack) -> Iterator[tuple[Node, str, Reading]]:
    """Yields what a result tells of nodes before it: the node, the field, and what that needs now."""
    for reader, field in normalized(node):
        yield reader, field, Reading(Kind.NORMALIZED, reader.name(), dim=-1, varies=reader.name() != PRODUCT)
    if (tanh := capped_scores(node)) is not None:
        yield tanh, "result", Reading(Kind.APPROXIMATE, tanh.name(), deviation=SHARP)
    dim = -1
    for reader, field in itertools.chain(compared(node, unpack), _weighed_scores(node, unpack)):
        kind, name = Kind.APPROXIMATE, reader.name()
        if name in (LOG_SOFTMAX, *SOFTMAXES):  # they come first, and a mixture is summed along another dimension
            dim = dim_from_end(reader)
        if name in (LOG_SOFTMAX, LOGSUMEXP):
            yield reader, field, Reading(Kind.LOGARITHMS, name, dim=dim_from_end(reader), deviation=math.inf)
            continue
        if name in (PRODUCT, "ExpBackward0", *SOFTMAXES):
            kind = _kind_of_compared(packed_for(reader, field, unpack), dim)
        yield reader, field, Reading(kind, name, dim=dim, deviation=0.0 if kind is Kind.EXACT else math.inf)
    for each in _opposed_sums(node):
        yield each, "self", Reading(Kind.EXACT, each.name())
    for factor, field in almost_equal_factors(node):
        varies = factor.name() in (*DIVISIONS, *NORMS)
        yield factor, field, Reading(Kind.APPROXIMATE, factor.name(), deviation=math.inf, varies=varies)


def _kind_of_compared(packed: Any, dim: int) -> Kind:
    """Returns as what something that is compared along a dimension is read: as probabilities, or as values.

    Differences are negative, too. Few probabilities are coded as values, or stay exact where one has most of their sum.
    """
    values = None if packed is None else _values_of(packed)
    if values is None or values.dim() < -dim or not _are_none_negative(values):
        return Kind.APPROXIMATE
    if values.shape[dim] >= FEW and values.dtype is torch.float32:
        return Kind.PROBABILITIES
    rows = some_of(values.movedim(dim, -1).reshape(-1, values.shape[dim]), 0, MOST_ROWS).float()
    shares = (rows.amax(-1) / rows.sum(-1)).nan_to_num(0.0)
    return Kind.EXACT if float(shares.mean()) > PEAK else Kind.APPROXIMATE


def _values_of(packed: Any) -> Tensor | None:
    """Returns the values of a floating-point tensor that was stored; None where there are none."""
    if packed.stored.values_gone:
        return None
    values = getattr(packed, "result", lambda: packed)().unpack()  # one that is packed in the background has to wait
    return None if values.is_meta or not values.is_floating_point() or not values.numel() else values


def _are_none_negative(values: Tensor) -> bool:
    least, most = values.aminmax()
    return float(least) > -MOST_BELOW * float(most)


def compared(product: Node, unpack: Unpack) -> Iterator[tuple[Node, str]]:
    """Yields what is saved where a product weighs how far a model's probabilities are from a teacher's.

    The gradient is then the difference of the two, whose error is the larger the closer they are: a student at a
    divergence of .005 had one of 1.3 at 4 bits, now .17. What is picked of them first, as a target's or by a mask, and
    what is compared with itself, as in an entropy, is another case. Nothing that is constant has a node.
    """
    if product.name() != PRODUCT:
        return
    pending, constant, teacher = [product], False, False
    for each in pending:
        with_constant = (None, 0) in each.next_functions
        scales = each.name() in (PRODUCT, "DivBackward0") and with_constant
        if len(pending) < MOST_NODES and (each is product or scales or each.name().startswith(_MIXES)):
            pending += [made for made, _ in each.next_functions if made is not None and made not in pending]
            constant |= with_constant and each.name() in _WITH_OTHERS
            teacher |= each.name() == "SubBackward0" and each.next_functions[0] == (None, 0)  # no number is there
    found = [each for each in pending if each.name() in _OF_PROBABILITIES and _has_rows_of(each, product)]
    if not any(each.name().startswith(_BENDS) for each in pending):
        found = [each for each in found if each.name() not in SOFTMAXES]
    if any(each.name() in (LOG_SOFTMAX, LOGSUMEXP) for each in found):
        compares = constant or _is_weighed(product, unpack)
    else:  # a gate may multiply any features that are constant, and a teacher weighs with no negative numbers
        compares = len(found) > 0 and (teacher or _is_weighed(product, unpack, signed=constant))
    if compares:
        yield from ((each, field) for each in found for field in _OF_PROBABILITIES[each.name()])
        yield from ((product, field) for field in fields_of(product))
        made = ("ExpBackward0", *SOFTMAXES)
        yield from ((each, "result") for each, _ in product.next_functions if each and each.name() in made)


def _is_weighed(product: Node, unpack: Unpack, signed: bool = True) -> bool:
    """Says whether a product is one with a constant that has codes: a mask has none, and a number is not saved.

    The constant has no negative numbers unless `signed`.
    """
    if (None, 0) not in product.next_functions:
        return False
    weights: Any = packed_for(product, "other" if product.next_functions[1][0] is None else "self", unpack)
    if weights is None or not weights.stored.lossy:
        return False
    values = None if signed else _values_of(weights)
    return signed or (values is not None and _are_none_negative(values))


def _has_rows_of(node: Node, other: Node) -> bool:
    """Says whether what two nodes have made has rows of the same size, as where nothing of them was picked.

    Of a logsumexp it is what it sums.
    """
    node = node.next_functions[0][0] if node.name() == LOGSUMEXP else node
    if (size := last_size(node)) is None or size != last_size(other):
        return False
    return len(other._input_metadata[0].shape) >= min(2, len(node._input_metadata[0].shape))


def _weighed_scores(node: Node, unpack: Unpack) -> Iterator[tuple[Node, str]]:
    """Yields what is saved where scores are weighed with a teacher's probabilities, and their logsumexp is taken away.

    It is a divergence, as `compared` knows it, that takes no logarithms of the probabilities.
    """
    terms = [*_terms(node)]
    sums, products = ([each for each in terms if each[0].name() == name] for name in (LOGSUMEXP, PRODUCT))
    for (total, sign), (product, other) in itertools.product(sums, products):
        if sign != other and _has_rows_of(total, product) and _is_weighed(product, unpack):
            yield total, "self"
            yield from ((product, field) for field in fields_of(product))


def _opposed_sums(node: Node) -> Iterator[Node]:
    """Yields logsumexps of which a node adds some and takes others away, as where a part of all classes is right.

    The gradient is the difference of their probabilities. With codes its error was 2.6 at 8 bits where a model is sure.
    """
    found = [(each, sign) for each, sign in _terms(node) if each.name() == LOGSUMEXP]
    if len({sign for _, sign in found}) == 2:
        yield from {each for each, _ in found}


def _terms(node: Node) -> Iterator[tuple[Node, int]]:
    """Yields the nodes that have made the terms of a sum or difference, and whether it adds or takes away each."""
    if node.name() not in ("SubBackward0", "AddBackward0"):
        return
    signs = (1, -1 if node.name() == "SubBackward0" else 1)
    pending = [(each, sign) for (each, _), sign in zip(node.next_functions, signs, strict=True) if each is not None]
    for each, sign in pending:
        if len(pending) < MOST_NODES and each.name().startswith(_CARRIES):
            now = -sign if each.name() == "NegBackward0" else sign
            pending += [(following, now) for following, _ in each.next_functions if following is not None]
        yield each, sign


class Looks:
    """Counts the passes of softmaxes that have codes, of arguments of sines and the like, and of exponentials.

    While a model trains, probabilities may become sure, arguments large, and exponentials small.
    """

    EVERY = 17
    """Passes after which one is looked at again. An odd number, as passes of two kinds may take turns."""

    def __init__(self) -> None:
        self._passes: dict[Place, int] = {}

    def are_due(self, place: Place, reading: Reading) -> bool:
        """Says whether what is saved at a place is to be looked at now, and counts that."""
        due = self.will_be_due(place, reading)
        self.count(place, reading)
        return due

    def will_be_due(self, place: Place, reading: Reading) -> bool:
        """As `are_due`, without counting."""
        return may_change(reading) and (self._passes.get(place, 0) + 1) % self.EVERY == 0

    def count(self, place: Place, reading: Reading) -> None:
        """Counts a pass of what may change."""
        if may_change(reading):
            self._passes[place] = self._passes.get(place, 0) + 1


def may_change(reading: Reading) -> bool:
    """Says whether more bits may be needed of what is read so, as values change while a model trains."""
    looked_at = reading.reader in SOFTMAXES or reading.reader in _BENT or reading.reader in EXPONENTIALS
    return reading.takes_approximations and looked_at


def needs_exact_softmax(node: Node, result: Tensor, unpack: Unpack) -> bool:
    """Says whether a node is a softmax whose gradient codes of its result would spoil."""
    if node.name() not in SOFTMAXES:
        return False
    width = width_of_scores(node, unpack)
    return (width is not None and width < NARROW) or _is_sure(result, dim_from_end(node))


def _is_sure(probabilities: Tensor, dim: int) -> bool:
    """Says whether a softmax has too few probabilities along a dimension, or rows too sure, for codes of its result."""
    length = probabilities.shape[dim]
    if length < SHORT:
        return True
    rows = some_of(probabilities.detach().movedim(dim, -1).reshape(-1, length), 0, MOST_ROWS)
    return len(rows) > 0 and float(1 - rows.float().amax(-1).mean()) < SURE


def some_of(values: Tensor, dim: int, most: int) -> Tensor:
    """Returns at most so many parts along a dimension, the first among them.

    They are not at equal distances, which may be a multiple of the number of heads or of queries: the first row of a
    causal mask is sure.
    """
    count = values.shape[dim]
    if count <= most:
        return values
    numbers = torch.arange(most, device=values.device, dtype=torch.float32)
    return values.index_select(dim, (numbers * GOLDEN % 1 * count).long())
