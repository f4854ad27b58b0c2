"""Rows of a batch: tensors in mappings, lists and tuples of any depth, whose first dimension counts the rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from daf_core.errors import MicroBatchError

INTEGERS = (torch.int64, torch.int32)  # types of tokens, classes and lengths
IGNORED = -100  # the label of a token that a loss leaves out

_BOUNDS = re.compile(r"(^|\.)cu_?seq", re.IGNORECASE)
"""Names of tensors that say where texts begin which lie one after the other in a row, as FlashAttention takes them."""


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


def by_rows(tensor: Tensor) -> Tensor:
    """Returns a tensor of two dimensions, in whose rows is what the first dimension of another one counts."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]


def has_rows(batch: Any) -> bool:
    """Whether there is anything in a batch that has rows."""
    return next(tensors_in(batch), None) is not None


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass, also of one with slots, or an object's attributes; {} where it has none."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
    return {**vars(value)} if hasattr(value, "__dict__") else {}


def text_bounds(batch: Any) -> list[Tensor]:
    """Returns the tensors that say where each of several texts in one row begins and the last one ends, if any do."""
    return [tensor for name, tensor in named_tensors(batch) if _BOUNDS.search(name) and tensor.dim() == 1]


def rows_of(batch: Any) -> int | None:
    """Returns the number of rows, which is the first dimension that most tensors have; None without tensors.

    Texts that lie one after the other, with their bounds beside them, are one row.
    """
    if text_bounds(batch):
        return 1
    sizes = Counter(tensor.shape[0] for tensor in tensors_in(batch))
    return sizes.most_common(1)[0][0] if sizes else None


def split(batch: Any, parts: int) -> list[Any]:
    """Cuts a batch into at most `parts` contiguous pieces whose numbers of rows differ by one at the most.

    Lists and tuples with a value for each row, such as texts, are cut as tensors are; all else goes to every piece.
    Tensors of pieces are views, and mappings keep their type. A batch without rows is one piece.

    Raises:
        MicroBatchError: `parts` is below 1.
    """
    rows = rows_of(batch)
    bounds = bounds_of(rows or 0, parts)
    return [take(batch, slice(*bound), rows) for bound in bounds] if rows else [batch]


def bounds_of(rows: int, parts: int) -> list[tuple[int, int]]:
    """Returns the first row of each piece that `split` makes, and the row after its last."""
    if parts < 1:
        raise MicroBatchError(f"parts={parts} is not allowed; a batch is cut into 1 part or more")
    count = max(min(parts, rows), 1)
    return [(rows * part // count, rows * (part + 1) // count) for part in range(count)]


def take(batch: Any, rows: slice | list[int], size: int | None = None) -> Any:
    """Returns some rows of a batch: views of tensors for a slice, copies for a list.

    `size` is the number of rows that the batch has, `rows_of` it if left out.
    """
    size = rows_of(batch) if size is None else size

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[rows] if value.dim() and value.shape[0] == size else value
        if not _one_each(value, size):
            return value
        return type(value)(value[rows] if isinstance(rows, slice) else (value[row] for row in rows))

    return map_values(batch, cut)


def _one_each(value: Any, size: int | None) -> bool:
    """Whether a list or tuple holds one value for each row, rather than tensors that hold them all."""
    if not isinstance(value, list | tuple) or hasattr(value, "_fields") or len(value) != size:
        return False
    return all(tensor.shape[0] != size for tensor in tensors_in(value))


def map_values(value: Any, change: Callable[[Any], Any]) -> Any:
    """Changes a value, or what is inside of a container that stays the same; containers are made anew."""
    changed = change(value)
    return changed if changed is not value else _rebuilt(value, partial(map_values, change=change))


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
