"""A few rows of a batch that differ in how much of each counts, so that laws of losses say different weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf_core.batch.loss_reduction import Law, WeightedMean, ignoring
from daf_core.batch.rows import IGNORED, INTEGERS, by_rows, named_tensors, rows_of, take, tensors_in
from daf_core.batch.samples import length_of_texts, short_texts

MOST_ROWS = 4  # rows that are tried

LENGTH = 16
"""Tokens of each that are tried: the logits of 4 rows take 13 MB with a vocabulary of 50,000. Micro-batches are for
those who have no room."""

ENDS = 6  # of these the ones that are padding in some rows and not in others

MOST_CLASSES = 1000
"""Classes that a batch may have: what looks like more of them may be numbers of samples, new in every batch."""

MOST_ALIKE = 2
"""Values of a tensor of which two rows are tried together: of zeros and ones a loss may compare the ones alone."""

LEAST_PADDING = 4  # tokens that a text is padded by at the least: other texts end with a few that are the same
LEAST_RATIO = 1.5  # of the weights of two rows: where rows differ by little, rounding hides how laws differ

VOID = 255  # the label of pixels that segmentations leave out

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # types of weights
MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, *INTEGERS, *FLOATS)

Class = tuple[int, int]
"""A class of rows: the number of the tensor that has one for each row, and its value there."""


class Alike(NamedTuple):
    """Two rows that have the same value in a tensor."""

    name: str
    value: float
    rows: list[int]


def unlike_rows(
    batch: Any,
    size: int,
    weighing: Collection[str],
    known: Collection[Class] = (),
    length: int | None = LENGTH,
    first: Sequence[int] = (),
    last: Sequence[int] = (),
) -> tuple[Any, list[int]]:
    """Returns copies of a few of the `size` rows of a batch, with up to `length` tokens each, and which these are.

    They are those of `first`, rows with the most labels, such with classes that are not known yet, and those of `last`.
    Some labels of two rows are ignored where labels are ignored in the batch. Of the tensors named `weighing` one row
    counts half. Lengths become shorter as texts do, those that may be classes only if they are named. No other label is
    changed: which values a loss bears, only its own batches tell.
    """
    labels = ignoring(batch, size)
    order = _unlike_first(batch, size, known)
    if labels:
        counted = by_rows(labels[0] != IGNORED)
        keys: list[tuple[bool, int]] = list(zip(counted[:, 0].tolist(), counted.sum(1).tolist(), strict=True))
        order.sort(key=keys.__getitem__, reverse=True)
    order = list(dict.fromkeys([*first, *order]))
    order = [*[row for row in order if row not in last][: MOST_ROWS - len(last)], *last]
    rows = order if labels else sorted(order)  # packed sequences need the longest first
    whole = take(batch, rows, size)
    sample = whole if length is None else short_texts(whole, length, [*_first_place(whole), *_ends(whole)])
    before, after = length_of_texts(whole) or 0, length_of_texts(sample) or 0
    # By their names: what is left of longer texts may have no label that is ignored.
    ignored = {name for name, tensor in named_tensors(batch) if any(tensor is each for each in labels)}
    lengths = {name for name, tensor in named_tensors(whole) if _is_length(tensor, whole)}
    for name, tensor in named_tensors(sample):
        if name in ignored:
            _ignore_some(tensor)
        elif name in weighing and (_is_mask(tensor) or _is_weight(tensor)):
            _halve_one(tensor)
        elif before > after and (name in lengths or (name in weighing and _may_be_length(tensor, after, before))):
            tensor.mul_(after).add_(before - 1).floor_divide_(before)
    return sample, rows


def weighing(batch: Any, known: Collection[str] = ()) -> set[str]:
    """Returns the names, but for known ones, of what may weigh rows or places in them, and not all rows the same.

    That is a one or a zero for each place, a number that is not negative for each row or place, the tokens of texts if
    some are padded, or the labels of pixels if some are `VOID`.
    """
    size, found = rows_of(batch), set[str]()
    for name, tensor in named_tensors(batch):
        if tensor.shape[0] != size or name in known:
            continue
        weights = _weights_in(tensor)
        if weights is None:
            differ = _are_padded(tensor)
        else:
            sums = by_rows(weights).sum(1)
            differ = bool((sums != sums[0]).any())
        found |= {name} if differ else set()
    return found


def laws_of(names: Collection[str], batch: Any) -> frozenset[Law]:
    """Returns the laws by which tensors of these names may weigh rows: the places of masks count that are 1, or 0."""
    found = set[Law]()
    for name, tensor in named_tensors(batch):
        if name not in names:
            continue
        if _has_void(tensor):
            found.add(WeightedMean(name, VOID))
            continue
        ignored = [_token_of_padding(tensor)] if _are_texts(tensor) else [None, 1] if _is_mask(tensor) else [None]
        shifts = [False, True] if tensor.dim() > 1 and tensor.shape[1] > 1 else [False]
        found |= {WeightedMean(name, *each) for each in product(ignored, shifts)}
    return frozenset(found)


def classes(batch: Any) -> set[Class]:
    """Returns the classes in a batch, if they are few: a loss may weigh each of them in its own way."""
    found = {(place, value) for place, values in enumerate(_row_labels(batch)) for value in values}
    return found if len(found) <= MOST_CLASSES else set()


def alike_rows(batch: Any, known: Collection[tuple[str, float]] = ()) -> Alike | None:
    """Returns two rows of one class, query or the like, which a loss may compare; None where all of them are known.

    `known` has names and values. Of the rows with a value two are taken that differ in most other tensors of one number
    for each row: rankings compare texts of one query that do not have the same grade.
    """
    size = rows_of(batch)
    whole = [(name, tensor) for name, tensor in named_tensors(batch) if size == tensor.shape[0] == tensor.numel()]
    values: dict[str, list[float]] = {name: each.flatten().tolist() for name, each in whole if not each.is_complex()}
    for name, own in values.items():
        tried = [value for other, value in known if other == name]
        for value, count in Counter(own).most_common() if len(tried) < MOST_ALIKE else ():
            if count > 1 and value != IGNORED and value not in tried:
                first, *others = (row for row, each in enumerate(own) if each == value)
                differing = [sum(each[row] != each[first] for each in values.values()) for row in others]
                return Alike(name, value, [first, others[differing.index(max(differing))]])
    return None


def row_without(batch: Any, known: Collection[str] = ()) -> tuple[str, int] | None:
    """Returns a row in which nothing counts, and the name of the tensor that says so; None where all are known.

    That is a row without a label, or with zeros alone in a mask or in weights that have others: a part of such rows
    weighs nothing by some laws, and a loss may have terms in it.
    """
    size = rows_of(batch)
    for name, tensor in named_tensors(batch):
        if tensor.shape[0] != size or name in known:
            continue
        ignores = tensor.dtype in INTEGERS and bool((tensor == IGNORED).any())
        counted = tensor != IGNORED if ignores else _weights_in(tensor) if tensor.dim() > 1 else None
        counts: list[bool] = [] if counted is None else by_rows(counted).any(1).tolist()
        if {*counts} == {False, True}:
            return name, counts.index(False)
    return None


def _weights_in(tensor: Tensor) -> Tensor | None:
    """Returns what of a tensor may weigh rows by its sum; None where nothing may."""
    if _is_mask(tensor) or _is_weight(tensor) or _is_count(tensor):
        return tensor
    return tensor == VOID if _has_void(tensor) else None


def _is_mask(tensor: Tensor) -> bool:
    if tensor.dtype not in MASKS or (tensor.dim() == 1 and tensor.dtype is not torch.bool):
        return False
    # Most of what is none shows it in its first row.
    return all(bool(((rows == 0) | (rows == 1)).all()) for rows in (tensor[:1], tensor))


def _has_void(tensor: Tensor) -> bool:
    integers = tensor.dtype in (*INTEGERS, torch.uint8)
    return integers and tensor.dim() > 2 and bool((tensor == VOID).any())


def _is_weight(tensor: Tensor) -> bool:
    return tensor.dtype in FLOATS and tensor.dim() <= 2 and bool((tensor >= 0).all())


def _is_count(tensor: Tensor) -> bool:
    return tensor.dtype in INTEGERS and tensor.dim() == 1 and bool((tensor >= 0).all())


def _may_be_length(tensor: Tensor, shortest: int, longest: int) -> bool:
    return _is_count(tensor) and bool((tensor <= longest).all()) and bool((tensor > shortest).any())


def _is_length(tensor: Tensor, batch: Any) -> bool:
    """Whether a tensor says how long each text of a batch is, or how many ones each row of a mask has."""
    if not _is_count(tensor):
        return False
    others = (each for each in tensors_in(batch) if each.dim() == 2 and each.shape[0] == tensor.shape[0])
    counts = (each.sum(1) if _is_mask(each) else _without_padding(each) for each in others if each.dtype in MASKS)
    return any(bool((each == tensor).all()) for each in counts)


def _are_texts(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.dtype in INTEGERS and not (tensor == IGNORED).any() and not _is_mask(tensor)


def _are_padded(tensor: Tensor) -> bool:
    if not _are_texts(tensor):
        return False
    least, most = _padding(tensor).aminmax()
    return bool(most - least >= LEAST_PADDING)


def _padding(ids: Tensor) -> Tensor:
    """Returns how many tokens at the beginning or end of each row are the same, as those of padding are."""
    return torch.maximum(_same_first(ids), _same_first(ids.flip(1)))


def _same_first(ids: Tensor) -> Tensor:
    return (ids == ids[:, :1]).cumprod(1).sum(1)


def _token_of_padding(ids: Tensor) -> int:
    row = ids[_padding(ids).argmax()][None]
    return int(row[0, 0] if _same_first(row) >= _same_first(row.flip(1)) else row[0, -1])


def _without_padding(ids: Tensor) -> Tensor:
    """Returns how many tokens of each row are no padding."""
    return (ids != _token_of_padding(ids)).sum(1)


def _first_place(batch: Any) -> list[int]:
    """Returns the first place of texts where labels are ignored, but one of a row there is not: laws differ by it."""
    labels = ignoring(batch, rows_of(batch) or 0)
    return [0] if labels and labels[0].dim() > 1 and bool((labels[0][:, 0] != IGNORED).any()) else []


def _ends(batch: Any) -> list[int]:
    """Returns a few places of texts that are padding in some of the rows, and not in others."""
    if (ids := _padded_texts(batch)) is None:
        return []
    counted = (ids != _token_of_padding(ids)).sum(0)
    mixed = ((counted > 0) & (counted < len(ids))).nonzero().flatten().tolist()
    return mixed[:: max(len(mixed) // ENDS, 1)][:ENDS]


def _padded_texts(batch: Any) -> Tensor | None:
    """Returns the first tensor of a batch that holds texts of which some are padded."""
    size = rows_of(batch)
    return next((each for each in tensors_in(batch) if each.shape[0] == size and _are_padded(each)), None)


def _row_labels(batch: Any) -> list[list[int]]:
    """Returns the integers that a batch has one of for each row, as classes are."""
    size = rows_of(batch)
    whole = [tensor for tensor in tensors_in(batch) if tensor.dim() == 1 and tensor.shape[0] == size]
    return [tensor.tolist() for tensor in whole if not tensor.is_floating_point() and not tensor.is_complex()]


def _unlike_first(batch: Any, size: int, known: Collection[Class]) -> list[int]:
    """Returns the numbers of the rows, those first that none before them is like.

    Rows are unlike by their integers, but for known ones, and as the text with the most or the least padding.
    """
    traits = [set[Class]() for _ in range(size)]
    for place, values in enumerate(_row_labels(batch)):
        for row, value in enumerate(values):
            traits[row] |= {(place, value)} if (place, value) not in known else set()
    if (ids := _padded_texts(batch)) is not None:
        padding = _padding(ids)
        traits[int(padding.argmax())].add((-1, 0))
        traits[int(padding.argmin())].add((-1, 1))
    order: list[int] = []
    seen = set[Class]()
    for _ in range(min(MOST_ROWS, size)):
        unlike = max((row for row in range(size) if row not in order), key=lambda row: len(traits[row] - seen))
        order.append(unlike)
        seen |= traits[unlike]
    return list(dict.fromkeys([*order, *range(size)]))


def _ignore_some(labels: Tensor) -> None:
    """Leaves the first row a label at its first place and one more, and the second row none at its first place.

    The laws of labels then say different weights than that of rows, and different ones from each other.
    """
    rows = by_rows(labels)
    places = (rows[0] != IGNORED).nonzero().flatten().tolist()
    kept = places[:2] if places[:1] == [0] and rows.shape[1] > 1 else places[:1]
    if rows.shape[1] == 1:  # of two labels one has to stay
        kept = [] if bool((rows[1:] != IGNORED).any()) else kept
    rows[0, [place for place in places if place not in kept]] = IGNORED
    if bool((rows[1, 1:] != IGNORED).any()):
        rows[1, 0] = IGNORED
    labels.copy_(rows.view(labels.shape))  # where they lie in another order the rows are a copy


def _halve_one(weights: Tensor) -> None:
    """Leaves one row half of its sum: the one with the largest, or the least where rows would be the same then."""
    rows = by_rows(weights)
    sums = rows.sum(1, dtype=torch.float64)
    for row in (sums.argmax(), sums.where(sums > 0, sums.max()).argmin()):
        halved = _halved(rows, int(row))
        found = halved.sum(1, dtype=torch.float64)
        if found.max() >= LEAST_RATIO * found.min():
            weights.copy_(halved.view(weights.shape))
            return


def _halved(rows: Tensor, row: int) -> Tensor:
    """Returns a copy with half of a row; one of a mask that has no ones, as of padding, is half made of them."""
    halved = rows.clone()
    if not _is_mask(rows):
        halved[row] /= 2
    elif len(places := rows[row].nonzero().flatten()):
        halved[row, places[max(len(places) // 2, 1) :]] = 0
    else:
        halved[row, rows.shape[1] // 2 :] = 1
    return halved
