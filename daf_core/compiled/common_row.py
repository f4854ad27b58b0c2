"""What the rows of a tensor have in common, inside of compiled graphs: the means of its channels.

Trained models have keys and values with biases, and channels that are large in all tokens. The range of a scaling group
is that of these, and many gradients are those of what rows differ by. Outside of graphs rows may share multiples of a
vector (`daf_core.codecs.common_row`); whether they do is measured, which a graph cannot do when it is made. So here a
channel decides for itself, while the graph runs, by a sample of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from daf_core.compiled.sizes import hint

LEAST_ROWS = 64
"""Rows that have something in common at least: means of fewer take more than .25 bits an element."""

SOME_ROWS = 64
"""Rows that are looked at, about: the mean of so many is off by an eighth of what rows differ by."""

LEAST_SHARE = 0.2
"""Least share of a channel's mean square that is that of its mean, so that rows have the mean in common."""

LONGEST_HEAD = 128
"""Rows up to this length are taken for those of a head, which differ from one head to the next."""

Across = tuple[tuple[int, int], ...]
"""Dimensions that number rows, and how many apart those are that are looked at."""


def across_rows(sizes: Sequence[Any], order: Sequence[int]) -> Across:
    """Returns what numbers the rows of a tensor that may have something in common; () where there are too few.

    That is the dimension of most rows, those of tokens; and what comes before it in memory, if that are the rows of a
    batch and not heads. `order` are the dimensions by falling stride.
    """
    counts = [hint(sizes[dim]) for dim in order[:-1]]
    most = max(counts, default=0)
    if not most:
        return ()
    tokens = counts.index(most)
    first = tokens if hint(sizes[order[-1]]) <= LONGEST_HEAD and most >= LEAST_ROWS else 0
    rows = math.prod(counts[first : tokens + 1])
    if rows < LEAST_ROWS:
        return ()
    steps = [1] * (tokens - first) + [max(1, min(rows // SOME_ROWS, most))]
    return tuple(zip(order[first : tokens + 1], steps, strict=True))


def common_row(values: Tensor, across: Across) -> Tensor:
    """Returns the mean of each channel (bfloat16, 1 in the dimensions across), and 0 where rows differ by more.

    A few rows that are 1,000 times the others, as those of first tokens may be, are nothing that all have in common:
    one of eight would have a share of an eighth.
    """
    some, dims = values, [dim for dim, _ in across]
    for dim, step in across:
        if step > 1:
            some = some[(slice(None),) * dim + (slice(None, None, step),)]
    some = some.float()
    mean, squares = some.mean(dims, keepdim=True), (some * some).mean(dims, keepdim=True)
    return torch.where(mean * mean > squares * LEAST_SHARE, mean, 0.0).bfloat16()
