"""A small part of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

SHARE = 1 / 8
"""Part of a batch that an audit uses: with a forward and two backward passes on it every 100 steps, audits take 0.2% of
the time of training."""

LEAST_ROWS = 2
"""Batch normalization and contrastive losses have no use for a single row."""

IGNORED = -100
"""The label of a token that a loss leaves out."""

LEAST_LENGTH = 16
"""Tokens that are left of a text at the least."""


def few_rows(batch: Any, share: float = SHARE) -> Any:
    """Returns the first rows of a batch, with as many elements as `share` of it; at least `LEAST_ROWS`.

    Where these are more than the share, and all tensors of two dimensions or more have the same first two, as token
    ids, masks and labels of one length have, texts are cut to where most labels count.

    Args:
        batch: Tensors in mappings, lists and tuples of any depth; the rows are the first dimension that most of them
            have. Others stay whole, as do values of other types.
        share: Part of the batch, between 0 and 1.
    """
    tensors = list(_tensors(batch))
    if not tensors:
        return batch
    size = Counter(tensor.shape[0] for tensor in tensors).most_common(1)[0][0]
    rows = min(max(int(size * share), LEAST_ROWS), size)
    length = _common_length(tensors, size) if size * share < rows else None
    kept = 0 if length is None else min(max(int(length * size * share / rows), LEAST_LENGTH), length)
    start = _start(tensors, rows, kept) if kept else 0

    def cut(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != size:
            return tensor
        return tensor[:rows] if not kept or tensor.dim() < 2 else tensor[:rows, start : start + kept]

    return _map(batch, cut)


def has_rows(batch: Any) -> bool:
    """Says whether there is anything in a batch that `few_rows` can cut."""
    return next(_tensors(batch), None) is not None


def _start(tensors: list[Tensor], rows: int, kept: int) -> int:
    """Returns where the `kept` tokens begin in which the fewest labels are ignored: those of a prompt are."""
    for tensor in tensors:
        if tensor.dim() > 1 and bool((tensor == IGNORED).any()):
            counted = (tensor[:rows] != IGNORED).sum(0).cumsum(0)
            inside = counted[kept - 1 :].clone()
            inside[1:] -= counted[:-kept]
            return int(inside.argmax())
    return 0


def _common_length(tensors: list[Tensor], size: int) -> int | None:
    """Returns the second dimension of a batch of texts; None for anything else."""
    shapes = {tensor.shape for tensor in tensors if tensor.shape[0] == size and tensor.dim() > 1}
    texts = len(shapes) == 1 and not any(tensor.is_floating_point() for tensor in tensors if tensor.dim() > 1)
    shape = shapes.pop() if texts else ()
    return shape[1] if len(shape) == 2 else None


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yields the tensors of a batch that have a dimension."""
    if isinstance(batch, Tensor):
        yield from [batch] if batch.dim() else []
    elif isinstance(batch, Mapping | list | tuple):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(value)


def _map(batch: Any, cut: Any) -> Any:
    if isinstance(batch, Tensor):
        return cut(batch)
    if isinstance(batch, Mapping):
        return {key: _map(value, cut) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(value, cut) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_map(value, cut) for value in batch)
    return batch
