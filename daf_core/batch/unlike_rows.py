"""A few rows of a batch that differ in how much of each counts, so that laws of losses say different weights."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import Any

import torch
from torch import Tensor

from daf_core.batch.loss_reduction import Law, WeightedMean, ignoring
from daf_core.batch.rows import IGNORED, named_tensors, rows_of, take, tensors_in
from daf_core.batch.samples import length_of_texts, short_texts

MOST_ROWS = 4  # rows that are tried

LENGTH = 16
"""Tokens of each that are tried: the logits of 4 rows take 13 MB with a vocabulary of 50,000. Micro-batches are for
those who have no room."""

TAIL = 6  # of these the last ones of the texts, where shorter ones are padded

MOST_CLASSES = 1000
"""Classes that a batch may have: what looks like more of them may be numbers of samples, new in every batch."""

LEAST_PADDING = 4  # tokens that a text is padded by at the least: other texts end with a few that are the same

INTEGERS = (torch.int64, torch.int32)  # types of tokens, classes and lengths
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # types of weights


def unlike_rows(batch: Any, size: int, weighing: set[str]) -> tuple[Any, int]:
    """Returns copies of a few of the `size` rows of a batch, and how many they are.

    They are the rows with the most labels, or of different classes. Some labels of two rows are ignored where labels
    are ignored in the batch. Of the tensors named `weighing` one row counts half, and lengths become shorter as texts
    do. No other label is changed: which values a loss bears, only its own batches tell.
    """
    labels = ignoring(batch, size)
    order = _unlike_first(batch, size)
    if labels:
        counted = (labels[0] != IGNORED).reshape(size, -1)
        keys: list[tuple[bool, int]] = list(zip(counted[:, 0].tolist(), counted.sum(1).tolist(), strict=True))
        order.sort(key=keys.__getitem__, reverse=True)
    # Packed sequences need the longest first.
    rows = order[:MOST_ROWS] if labels else sorted(order[:MOST_ROWS])
    whole = take(batch, rows, size)
    sample = short_texts(whole, LENGTH, TAIL)
    before, after = length_of_texts(whole) or 0, length_of_texts(sample) or 0
    # By their names: what is left of longer texts may have no label that is ignored.
    ignored = {name for name, tensor in named_tensors(batch) if any(tensor is each for each in labels)}
    for name, tensor in named_tensors(sample):
        if name in ignored:
            _ignore_some(tensor)
        elif name in weighing and (_is_mask(tensor) or _is_weight(tensor)):
            _halve_one(tensor)
        elif name in weighing and _is_length(tensor, before) and bool((tensor > after).any()):
            tensor.mul_(after).add_(before - 1).floor_divide_(before)
    return sample, len(rows)


def weighing(batch: Any, known: Collection[str] = ()) -> set[str]:
    """Returns the names, but for known ones, of what may weigh rows or places in them, and not all rows the same.

    That is a one or a zero for each place, a number that is not negative for each row or place, a length, or the tokens
    of texts if some are padded.
    """
    size, length = rows_of(batch), length_of_texts(batch) or 0
    found: set[str] = set()
    for name, tensor in named_tensors(batch):
        if tensor.shape[0] != size or name in known:
            continue
        if _is_mask(tensor) or _is_weight(tensor) or _is_length(tensor, length):
            sums = _sums(tensor)
            found |= {name} if bool((sums != sums[0]).any()) else set()
        elif _are_texts(tensor) and int(_padding(tensor).max() - _padding(tensor).min()) >= LEAST_PADDING:
            found.add(name)
    return found


def laws_of(names: Collection[str], batch: Any) -> frozenset[Law]:
    """Returns the laws by which tensors of these names may weigh rows: the places of masks count that are 1, or 0."""
    found = set[Law]()
    for name, tensor in named_tensors(batch):
        if name not in names:
            continue
        ignored = [_token_of_padding(tensor)] if _are_texts(tensor) else [None, 1] if _is_mask(tensor) else [None]
        shifts = [False, True] if tensor.dim() > 1 and tensor.shape[1] > 1 else [False]
        found |= {WeightedMean(name, *each) for each in product(ignored, shifts)}
    return frozenset(found)


def classes(batch: Any) -> set[int]:
    """Returns the classes in a batch, if they are few: a loss may weigh each of them in its own way."""
    found = set().union(*_row_labels(batch))
    return found if len(found) <= MOST_CLASSES else set()


def _is_mask(tensor: Tensor) -> bool:
    if tensor.dim() == 1:
        return tensor.dtype is torch.bool
    # Most of what is none shows it in its first row.
    return all(bool(((rows == 0) | (rows == 1)).all()) for rows in (tensor[:1], tensor))


def _is_weight(tensor: Tensor) -> bool:
    return tensor.dtype in FLOATS and tensor.dim() <= 2 and bool((tensor >= 0).all())


def _is_length(tensor: Tensor, longest: int) -> bool:
    if tensor.dim() > 1 or tensor.dtype not in INTEGERS:
        return False
    return bool(((tensor >= 1) & (tensor <= longest)).all())


def _sums(tensor: Tensor) -> Tensor:
    """Returns the sum of each row."""
    return _flat(tensor).sum(1)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]


def _row_labels(batch: Any) -> list[list[int]]:
    """Returns the integers that a batch has one of for each row, as classes are."""
    size = rows_of(batch)
    whole = [tensor for tensor in tensors_in(batch) if tensor.dim() == 1 and tensor.shape[0] == size]
    return [tensor.tolist() for tensor in whole if not tensor.is_floating_point() and not tensor.is_complex()]


def _unlike_first(batch: Any, size: int) -> list[int]:
    """Returns the numbers of the rows, those first that none before them is like.

    These are the text with the most padding and the one with the least, and rows with other integers than those before.
    Where rows have several integers, those of the fewest values come first: one may say whether a row counts.
    """
    texts = (tensor for tensor in tensors_in(batch) if tensor.shape[0] == size and _are_texts(tensor))
    padding = [_padding(tensor) for tensor in texts][:1]
    order = [int(row) for each in padding for row in (each.argmax(), each.argmin())]
    for labels in sorted(_row_labels(batch), key=lambda labels: len(set(labels))):
        order += [labels.index(value) for value in dict.fromkeys(labels)]
    return list(dict.fromkeys([*order, *range(size)]))


def _are_texts(tensor: Tensor) -> bool:
    labels = bool((tensor == IGNORED).any())
    return tensor.dim() == 2 and tensor.dtype in INTEGERS and not labels and not _is_mask(tensor)


def _padding(ids: Tensor) -> Tensor:
    """Returns how many tokens at the beginning or end of each row are the same, as those of padding are."""
    runs = ((each == each[:, :1]).cumprod(1).sum(1) for each in (ids, ids.flip(1)))
    return torch.maximum(*runs)


def _token_of_padding(ids: Tensor) -> int:
    row = ids[_padding(ids).argmax()]
    return int(row[0] if (row == row[0]).cumprod(0).sum() >= (row.flip(0) == row[-1]).cumprod(0).sum() else row[-1])


def _ignore_some(labels: Tensor) -> None:
    """Leaves the first row a label at its first place and one more, and the second row none at its first place.

    The laws of labels then say different weights than that of rows, and different ones from each other.
    """
    rows = labels.reshape(labels.shape[0], -1)
    places = (rows[0] != IGNORED).nonzero().flatten().tolist()
    kept = places[:2] if places[:1] == [0] and rows.shape[1] > 1 else places[:1]
    if rows.shape[1] == 1:  # of two labels one has to stay
        kept = [] if bool((rows[1:] != IGNORED).any()) else kept
    rows[0, [place for place in places if place not in kept]] = IGNORED
    if bool((rows[1, 1:] != IGNORED).any()):
        rows[1, 0] = IGNORED
    labels.copy_(rows.view(labels.shape))  # where they lie in another order the rows are a copy


def _halve_one(weights: Tensor) -> None:
    """Leaves the row of the largest sum half of it: where rows differ by little, rounding hides how laws differ.

    Where a mask has no ones, as one of padding may not, half of the first row is made of them.
    """
    rows = _flat(weights)
    row = int(rows.sum(1).argmax())
    if not _is_mask(weights):
        rows[row] /= 2
    elif len(places := rows[row].nonzero().flatten()):
        rows[row, places[max(len(places) // 2, 1) :]] = 0
    else:
        rows[0, rows.shape[1] // 2 :] = 1
    weights.copy_(rows.view(weights.shape))
