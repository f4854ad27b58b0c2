"""How sharp an attention is, and how many bits its query and key need then.

An error of a score multiplies a probability by its exponential, and the error of a score grows with the deviation of
the scores. Measured at 4 bits (2 x 4 heads of 64, 128 keys): the gradient's error is 1.1 times that of attention
written out at a deviation of 1, 1.5 times at 3 and 3.6 times at 10. With twice the bits for query and key it is .7.
"""

from __future__ import annotations

from torch import Tensor

from daf_core.autograd.torch_private import Node

SHARP = 2.5
"""Deviation of the scores from which query and key take twice the bits."""

SHARP_FOR_BYTES = 5.0
"""The same for query and key in 8 bits, which then stay exact."""

MOST_HEADS, MOST_QUERIES, MOST_KEYS = 16, 32, 256
"""Of each attention that are looked at."""

_HEADS_LATER = ("FlashAttentionBackward0", "EfficientAttentionBackward0", "CudnnAttentionBackward0")
"""Nodes whose heads are the dimension before the last; others have the positions there."""


def bits_for(bits: int | None, deviation: float) -> int | None:
    """Returns the bits for a query or a key, where others get `bits`; None is exact.

    Args:
        bits: 8, 4, 2, 1, 0 or None.
        deviation: That of the scores of one query.
    """
    if not bits or deviation < (SHARP_FOR_BYTES if bits == 8 else SHARP):
        return bits
    return None if bits == 8 else 2 * bits


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
