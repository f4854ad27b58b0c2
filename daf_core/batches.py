"""Rows of a batch: tensors in mappings, lists and tuples of any depth, whose first dimension counts the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from functools import partial
from typing import Any

from torch import Tensor

from daf_core.errors import MicroBatchError

SHARE = 1 / 8
"""Part of a batch that an audit uses: with a forward and two backward passes on it every 100 steps, audits take 0.2% of
the time of training."""

LEAST_ROWS = 2
"""Batch normalization and contrastive losses have no use for a single row."""

IGNORED = -100
"""The label of a token that a loss leaves out."""

LEAST_LENGTH = 16
"""Tokens that are left of a text at the least."""


def named_tensors(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a batch that have a dimension, with the key or index that leads to each, as in ``x.0``."""
    if isinstance(batch, Tensor):
        yield from [(name, batch)] if batch.dim() else []
    elif isinstance(batch, Mapping | list | tuple):
        for key, value in batch.items() if isinstance(batch, Mapping) else enumerate(batch):
            yield from named_tensors(value, f"{name}.{key}" if name else str(key))


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yields the tensors of a batch that have a dimension."""
    return (tensor for _, tensor in named_tensors(batch))


def has_rows(batch: Any) -> bool:
    """Says whether there is anything in a batch that has rows."""
    return next(tensors_in(batch), None) is not None


def rows_of(batch: Any) -> int | None:
    """Returns the number of rows, which is the first dimension that most tensors have; None without tensors."""
    sizes = Counter(tensor.shape[0] for tensor in tensors_in(batch))
    return sizes.most_common(1)[0][0] if sizes else None


def split(batch: Any, parts: int) -> list[Any]:
    """Cuts a batch into contiguous pieces whose numbers of rows differ by one at the most.

    Lists and tuples with a value for each row, such as texts, are cut as tensors are; all else goes to every piece.
    Tensors of pieces are views, and mappings keep their type.

    Args:
        batch: Tensors in mappings, lists and tuples of any depth.
        parts: How many pieces; there are fewer where rows are.

    Returns:
        The pieces in order; the batch alone if it has no rows.

    Raises:
        MicroBatchError: `parts` is below 1.
    """
    rows = rows_of(batch)
    bounds = bounds_of(rows or 0, parts)
    return [take(batch, slice(*bound), rows) for bound in bounds] if rows else [batch]


def bounds_of(rows: int, parts: int) -> list[tuple[int, int]]:
    """Returns the first row of each piece that `split` makes, and the row after its last.

    Raises:
        MicroBatchError: `parts` is below 1.
    """
    if parts < 1:
        raise MicroBatchError(f"parts={parts} is not allowed; a batch is cut into 1 part or more")
    count = max(min(parts, rows), 1)
    return [(rows * part // count, rows * (part + 1) // count) for part in range(count)]


def take(batch: Any, rows: slice | list[int], size: int | None = None) -> Any:
    """Returns some rows of a batch: views of tensors for a slice, copies for a list.

    Args:
        batch: Tensors in mappings, lists and tuples of any depth.
        rows: Which rows.
        size: How many the batch has; `rows_of` it, if left out.
    """
    size = rows_of(batch) if size is None else size

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[rows] if value.dim() and value.shape[0] == size else value
        if not _one_each(value, size):
            return value
        return type(value)(value[rows] if isinstance(rows, slice) else (value[row] for row in rows))

    return _map(batch, cut)


def few_rows(batch: Any, share: float = SHARE) -> Any:
    """Returns the first rows of a batch, with as many elements as `share` of it; at least `LEAST_ROWS`.

    Where these are more than the share, and all tensors of two dimensions or more have the same first two, as token
    ids, masks and labels of one length have, texts are cut to where most labels count.

    Args:
        batch: Tensors in mappings, lists and tuples of any depth; the rows are the first dimension that most of them
            have. Others stay whole, as do values of other types.
        share: Part of the batch, between 0 and 1.
    """
    size = rows_of(batch)
    if size is None:
        return batch
    rows = min(max(int(size * share), LEAST_ROWS), size)
    length = _common_length(list(tensors_in(batch)), size) if size * share < rows else None
    kept = _tensor_rows(batch, rows, size)
    return kept if length is None else short_texts(kept, int(length * size * share / rows))


def short_texts(batch: Any, length: int) -> Any:
    """Returns a batch of texts cut to where most labels count; any other batch as it is.

    Args:
        batch: Tensors in mappings, lists and tuples of any depth.
        length: Tokens that are kept of each row; at least `LEAST_LENGTH`.
    """
    tensors, size = list(tensors_in(batch)), rows_of(batch)
    whole = None if size is None else _common_length(tensors, size)
    kept = max(length, LEAST_LENGTH)
    if size is None or whole is None or whole <= kept:
        return batch
    start = _start(tensors, size, kept)

    def cut(value: Any) -> Any:
        per_token = isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == size
        return value[:, start : start + kept] if per_token else value

    return _map(batch, cut)


def _tensor_rows(batch: Any, rows: int, size: int) -> Any:
    def cut(value: Any) -> Any:
        return value[:rows] if isinstance(value, Tensor) and value.dim() and value.shape[0] == size else value

    return _map(batch, cut)


def _one_each(value: Any, size: int | None) -> bool:
    """Says whether a list or tuple holds one value for each row, rather than tensors that hold them all."""
    if not isinstance(value, list | tuple) or hasattr(value, "_fields") or len(value) != size:
        return False
    return all(tensor.shape[0] != size for tensor in tensors_in(value))


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


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Changes a value, or what is inside of one that stays the same."""
    changed = change(value)
    return changed if changed is not value else _rebuilt(value, partial(_map, change=change))


def _rebuilt(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a container of the same type, with each value changed."""
    if isinstance(batch, MutableMapping):  # made by copying: those of tokenizers have constructors of their own
        new = copy(batch)
        for key, value in batch.items():
            new[key] = change(value)
        return new
    if isinstance(batch, Mapping):
        return {key: change(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(change(value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(change(value) for value in batch)
    return batch
