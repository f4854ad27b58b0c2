"""A part of a batch, copied, for what is measured beside training."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from daf_core.batch.rows import (
    IGNORED,
    INTEGERS,
    attributes_of,
    has_rows,
    map_values,
    named_tensors,
    rows_of,
    tensors_in,
    text_bounds,
)
from daf_core.errors import TraceError

SHARE = 1 / 8
"""Part of a batch that an audit uses: with a forward and two backward passes on it every 100 steps, audits take 0.2% of
the time of training."""

LEAST_ROWS = 2  # Batch normalization and contrastive losses have no use for a single row
LEAST_LENGTH = 16  # tokens that are left of a text at the least

_LONGEST = re.compile(r"^max_?(len|seq)", re.IGNORECASE)
"""Names of the length of the longest of several texts in one row."""

_PLACE = re.compile(r"(^|[._])(start|end|answer|span|pos)", re.IGNORECASE)
"""Names of the place in a text where something is, as an answer; other integers may be the numbers of samples."""

_NESTED = 4  # objects inside of objects of a batch that are copied


def few_rows(batch: Any, share: float = SHARE) -> Any:
    """Returns copies of the first rows of a batch, with as many elements as `share` of it; at least `LEAST_ROWS`.

    Where these are more than the share, and all tensors of two dimensions or more have the same first two, as token
    ids, masks and labels of one length have, texts are cut to where most labels count. Of several texts that lie in one
    row as many are left. Tensors without rows stay whole, as do values of other types.
    """
    size = rows_of(batch)
    if size is None:
        return copied(batch)
    if bounds := text_bounds(batch):
        return copied(_few_texts(batch, bounds, share))
    rows = min(max(int(size * share), LEAST_ROWS), size)
    length = length_of_texts(batch) if size * share < rows else None

    def cut(value: Any) -> Any:
        return value[:rows] if isinstance(value, Tensor) and value.dim() and value.shape[0] == size else value

    kept = map_values(batch, cut)
    return copied(kept if length is None else short_texts(kept, int(length * size * share / rows)))


def short_texts(batch: Any, length: int, beside: Sequence[int] = ()) -> Any:
    """Returns a batch of texts cut to the `length` tokens, at least `LEAST_LENGTH`, where most labels count.

    Among these are the ones at the places `beside`, unless rows hold several texts. Any other batch stays as it is, and
    so does one whose rows each have a place in their text, as that of an answer, if it may be cut off.
    """
    tensors, size, whole = list(tensors_in(batch)), rows_of(batch), length_of_texts(batch)
    kept = max(length, LEAST_LENGTH)
    if whole is None or whole <= kept:
        return batch
    if any(_PLACE.search(name) and _are_places(tensor, kept, whole) for name, tensor in named_tensors(batch)):
        return batch
    starts = _text_starts(batch)
    beside = () if starts else beside
    start = _start(tensors, kept - len(beside), starts)
    first = [*range(start, min(start + kept - len(beside), whole))]
    places = list(dict.fromkeys([*first, *beside, *range(first[-1] + 1, whole), *range(start)]))
    places = sorted(places[:kept] if not starts else first)

    def cut(value: Any) -> Any:
        per_token = isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == size
        return value[:, places] if per_token else value

    return map_values(batch, cut)


def length_of_texts(batch: Any) -> int | None:
    """Returns the number of tokens that all rows of a batch of texts have, padding included; None for anything else.

    All tensors of two dimensions or more have the same two, and no numbers with a fraction.
    """
    size = rows_of(batch)
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim() > 1]
    shapes = {tensor.shape for tensor in tensors if tensor.shape[0] == size}
    texts = len(shapes) == 1 and not any(tensor.is_floating_point() for tensor in tensors)
    shape = shapes.pop() if texts else ()
    return shape[1] if len(shape) == 2 else None


def copied(batch: Any) -> Any:
    """Returns a batch with copies of its tensors, which no graph leads to, and of what holds them."""
    return map_values(batch, _copied)


def _copied(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Iterator):
        raise TraceError(f"a batch with a {type(value).__name__} is used up by the first that reads it; make it a list")
    if isinstance(value, dict | list | tuple | type | nn.Module | Dataset) or depth == _NESTED:
        return value
    attributes = attributes_of(value)
    inside = {name: map_values(each, lambda part: _copied(part, depth + 1)) for name, each in attributes.items()}
    if not any(new is not attributes[name] and has_rows(new) for name, new in inside.items()):
        return value
    new = copy.copy(value)
    for name, each in inside.items():
        object.__setattr__(new, name, each)  # also where an object is frozen
    return new


def _few_texts(batch: Any, bounds: list[Tensor], share: float) -> Any:
    """Returns the first of several texts in one row that make up `share` of it, of a longer one its beginning."""
    places = bounds[0].tolist()
    if any(each.tolist() != places for each in bounds):  # queries and keys are of different texts
        return batch
    kept = max(int(places[-1] * share), LEAST_LENGTH)
    start = _start(list(tensors_in(batch)), kept, places[:-1])
    end = max((place for place in places if place <= start + kept), default=start)
    inside = [place - start for place in places if start <= place <= end]
    if end == start:
        inside = [0, min(kept, places[-1] - start)]
    tokens = slice(start, start + inside[-1])

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and any(value is each for each in bounds):
            return value.new_tensor(inside)
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == places[-1]:
            return value[tokens]
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, places[-1]):
            return value[:, tokens]
        return value

    longest = max(after - before for before, after in pairwise(inside))
    return map_values(batch, partial(_with_longest, longest, cut))


def _with_longest(longest: int, cut: Callable[[Any], Any], value: Any) -> Any:
    """Cuts a value; in a mapping, the length of the longest text becomes another."""
    if not isinstance(value, MutableMapping) or not any(isinstance(key, str) and _LONGEST.match(key) for key in value):
        return cut(value)
    new = map_values(value, cut)
    for key, old in value.items():
        if _LONGEST.match(key):
            new[key] = old.new_tensor(longest) if isinstance(old, Tensor) else longest
    return new


def _are_places(tensor: Tensor, kept: int, whole: int) -> bool:
    """Says whether there is an integer for each row that may be a place in a text, and is none in one that is cut."""
    if tensor.dim() != 1 or tensor.dtype not in INTEGERS or not tensor.numel():
        return False
    return kept <= int(tensor.max()) < whole and int(tensor.min()) >= 0


def _start(tensors: list[Tensor], kept: int, starts: list[int]) -> int:
    """Returns where the `kept` tokens begin in which the fewest labels are ignored: those of a prompt are.

    They begin at one of `starts`, or anywhere if there are none.
    """
    for tensor in tensors:
        if tensor.dim() > 1 and bool((tensor == IGNORED).any()):
            counted = nn.functional.pad((tensor != IGNORED).sum(0).cumsum(0), (1, 0))
            length = len(counted) - 1
            places = torch.tensor(starts or range(length - kept + 1), device=tensor.device)
            inside = counted[(places + kept).clamp(max=length)] - counted[places]
            return int(places[inside.argmax()])
    return 0


def _text_starts(batch: Any) -> list[int]:
    """Returns where texts begin in rows that hold several each, by their positions; [] where rows hold one."""
    for name, tensor in named_tensors(batch):
        if name.rpartition(".")[2] == "position_ids" and tensor.dim() == 2:
            starts = (tensor == tensor.min()).all(0).nonzero().flatten().tolist()
            return starts if len(starts) > 1 else []
    return []
