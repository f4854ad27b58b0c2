"""What the rows of a tensor have in common, inside of compiled graphs: the means of its channels.

Trained models have keys and values with biases, and channels that are large in all tokens. The range of a scaling group
is that of these, and many gradients are those of what rows differ by. Outside of graphs rows may share multiples of a
vector (`daf_core.codecs.common_row`); whether they do is measured, which a graph cannot do when it is made. So here
each scaling group decides for itself, while the graph runs, whether its codes are of what is left without the means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from daf_core.compiled.sizes import hint, is_known

LEAST_ROWS = 64
"""Rows that have something in common at least, and that are looked at: the mean of so many is off by an eighth of what
rows differ by."""

DEAREST = 1 / 16
"""Largest part of the codes' bits that means take: those of 64 rows a fourth of a bit, beside 4."""

LEAST_SHARE = 0.5
"""Least share of a channel's mean square that is that of its mean, so that rows have the mean in common."""

LONGEST_HEAD = 128
"""Rows up to this length are taken for those of a head, which differ from one head to the next."""

Across = tuple[int, ...]
"""Dimensions that number rows."""


def across_rows(sizes: Sequence[Any], order: Sequence[int]) -> Across:
    """Returns what numbers the rows of a tensor that may have something in common; () where there are too few.

    That is the dimension of most rows; and what comes before it in memory, unless these may be heads. `order` are the
    dimensions by falling stride.
    """
    counts = [hint(sizes[dim]) for dim in order[:-1]]
    most = max(counts, default=0)
    if not most:
        return ()
    tokens = counts.index(most)
    first = tokens if hint(sizes[order[-1]]) <= LONGEST_HEAD and most >= LEAST_ROWS else 0
    rows = math.prod(counts[first : tokens + 1])
    return tuple(order[first : tokens + 1]) if rows >= LEAST_ROWS else ()


def bits_of_means(sizes: Sequence[Any], across: Across) -> float:
    """Returns the bits an element that the means of its channels take; none where rows have nothing in common."""
    return 16 / math.prod(hint(sizes[dim]) for dim in across) if across else 0.0


def common_row(values: Tensor, across: Across) -> Tensor:
    """Returns the mean of each channel (bfloat16, 1 in the dimensions across), and 0 where rows differ by more.

    It is that of `LEAST_ROWS` rows, in the middle of equal parts: first tokens may be unlike all others.
    """
    some, parts = values, round(LEAST_ROWS ** (1 / len(across)))
    for dim in across:
        size: Any = values.shape[dim]
        if not is_known(size) or size > parts:
            middles = (2 * torch.arange(parts, device=values.device) + 1) * size // (2 * parts)
            some = some.index_select(dim, middles)
    some = some.float()
    mean, squares = some.mean(across, keepdim=True), (some * some).mean(across, keepdim=True)
    return rounded(torch.where(mean * mean > squares * LEAST_SHARE, mean, 0.0))


def rounded(values: Tensor) -> Tensor:
    """Returns float32 numbers in bfloat16, as they come back from memory also where they are read at once.

    Inductor takes a cast to fewer bits and back for none where both are in one loop. Codes were then worked out beside
    other numbers than decode them: at 8 bits the mean of a group was off by a fourth of a step, and the gradient of a
    small convolution by .07 in place of .008.
    """
    bits = values.view(torch.int32)
    found = ((bits + 0x8000) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), found, values).bfloat16()
