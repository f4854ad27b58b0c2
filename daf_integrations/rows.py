"""A small part of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

SHARE = 1 / 8
"""Part of a batch that an audit uses: with a forward and two backward passes on it every 100 steps, audits take 0.2% of
the time of training."""

LEAST_LENGTH = 16
"""Tokens that are left of a text at the least."""


def few_rows(batch: Any, share: float = SHARE) -> Any:
    """Returns the first rows of a batch, with as many elements as `share` of it; at least one row.

    Where one row is more than the share, and all tensors of two dimensions or more have the same first two, as token
    ids, masks and labels of one length have, its texts are cut.

    Args:
        batch: Tensors in mappings, lists and tuples of any depth; the rows are the first dimension that most of them
            have. Others stay whole, as do values of other types.
        share: Part of the batch, between 0 and 1.
    """
    tensors = list(_tensors(batch))
    if not tensors:
        return batch
    size = Counter(tensor.shape[0] for tensor in tensors).most_common(1)[0][0]
    rows = max(int(size * share), 1)
    length = _common_length(tensors, size) if size * share < 1 else None
    kept = None if length is None else min(max(int(length * size * share), LEAST_LENGTH), length)

    def cut(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != size:
            return tensor
        return tensor[:rows] if kept is None or tensor.dim() < 2 else tensor[:rows, :kept]

    return _map(batch, cut)


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
