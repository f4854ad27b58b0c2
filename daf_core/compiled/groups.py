"""How a tensor of a compiled graph is cut into scaling groups: the order of its values, and their pieces."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf_core.codecs.scaling_groups import LEAST_MAP, OWN_ROW
from daf_core.compiled.common_row import Across, across_rows
from daf_core.compiled.sizes import hint, is_known
from daf_kernels.layout import MAX_GROUP, SHARED_ROW, group_size

PARTS = 8
"""Groups have a multiple of so many elements, so that codes of any number of bits fill whole bytes."""

LEAST_GROUP = 64
"""Elements in the smallest scaling group that is looked for where rows have no divisor that fits."""

Together = tuple[tuple[int, int], ...]
"""The dimensions along which a normalization takes values together, by number, and how many of each at a time: 0 for
all of them. Of three dimensions, those of a batch normalization are (0, 0) and (2, 0)."""


@dataclass(frozen=True)
class Shape:
    """How a tensor is seen as rows of groups, and back.

    Codes of rows that lie far apart share bytes: a loop along a row then reads and writes whole vectors, and decoding
    needs no memory of its own where a loop reads what is decoded.
    """

    order: tuple[int, ...]  # its dimensions in the order in which they are read, once they are cut
    group: int  # elements in a group
    # The place in `order` of the dimension that is cut into parts; None where groups themselves are.
    split: int | None = None
    inner: int = 0  # the place in `order` where rows of whole groups begin
    # The place in `order` where rows begin that are filled up with their last value to whole groups; None where all
    # groups are whole.
    filled: int | None = None
    across: Across = ()  # what numbers rows that may have something in common
    cuts: Together = ()  # its dimensions that are seen as two, the second of so many elements
    memory: tuple[int, ...] | None = None  # its dimensions by falling stride; None where what comes back lies so

    def rows(self, values: Tensor, parts: int) -> Tensor:
        """Returns the values in that order, of shape (outer, parts, rows, groups in a row, group).

        Where groups themselves are cut, of shape (groups, group).
        """
        sizes = self._ordered(values.shape)
        for dim, piece in reversed(self.cuts):
            values = values.unflatten(dim, (-1, piece))
        values = values.permute(self.order)
        if self.split is not None:
            return values.reshape(
                math.prod(sizes[: self.split]),
                parts,
                sizes[self.split] // parts * math.prod(sizes[self.split + 1 : self.inner]),
                math.prod(sizes[self.inner :]) // self.group,
                self.group,
            )
        if self.filled is not None:
            rows, row, groups = self._filled(sizes)
            values = values.reshape(rows, row)
            values = torch.cat([values, values[:, -1:].expand(rows, groups * self.group - row)], 1)
            return values.reshape(rows * groups, self.group)
        return values.reshape(-1, self.group)

    def back(self, rows: Tensor, sizes: Sequence[Any]) -> Tensor:
        """Returns a tensor of the sizes and the order of memory that `rows` was given."""
        ordered = self._ordered(sizes)
        if self.filled is not None:
            count, row, groups = self._filled(ordered)
            rows = rows.reshape(count, groups * self.group)[:, :row]
        values = rows.reshape(ordered).permute(_inverse(self.order))
        if self.cuts:
            values = values.reshape(sizes)
        if self.memory is None:
            return values
        return values.permute(self.memory).contiguous().permute(_inverse(self.memory))

    def elements(self, sizes: Sequence[Any]) -> int:
        """Returns how many elements have codes, those that fill up rows among them, or how many while it is traced."""
        if self.filled is None:
            return hint(math.prod(sizes))
        rows, _, groups = self._filled(self._ordered(sizes))
        return hint(rows * groups) * self.group

    def _ordered(self, sizes: Sequence[Any]) -> list[Any]:
        """Returns sizes as cut, and in the order in which the dimensions are read."""
        cut = [*sizes]
        for dim, piece in reversed(self.cuts):
            cut[dim : dim + 1] = sizes[dim] // piece, piece
        return [cut[dim] for dim in self.order]

    def _filled(self, ordered: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Returns how many rows there are that are filled up, their elements and their groups."""
        row = math.prod(ordered[self.filled :])
        return math.prod(ordered[: self.filled]), row, (row + self.group - 1) // self.group

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        """Puts whole numbers of the shape that `rows` returns into as few uint8."""
        parts = 8 // bits
        if self.split is None:
            codes = codes.reshape(-1, parts, self.group // parts)
        return reduce(torch.add, (codes[:, part] * float(1 << bits * part) for part in range(parts))).to(torch.uint8)

    def unpack(self, packed: Tensor, bits: int) -> Tensor:
        """Returns the numbers that `pack` was given, float32."""
        parts, values = 8 // bits, packed.float()
        place = torch.arange(parts, device=packed.device, dtype=torch.float32)
        below = torch.exp2(place * -bits).view(1, parts, *[1] * (packed.dim() - 1))
        left = torch.floor(values.unsqueeze(1) * below)
        codes = left - torch.floor(left * 2.0**-bits) * float(1 << bits)
        return codes if self.split is not None else codes.reshape(-1, self.group)


def shape_of(values: Tensor, own_rows: bool = False, channels: int | None = None, together: Together = ()) -> Shape:
    """Returns how a tensor is cut into groups: those of `group_size`, where eight codes of them fill whole bytes.

    With `own_rows`, rows of `OWN_ROW` elements or more do not share groups. `channels` is the dimension that numbers
    channels, if that is known. Where a normalization reads what is `together`, groups lie within that. The tensor has
    no holes in memory; its sizes may be symbols.
    """
    normalized = together[0][0] if len(together) == 1 and not together[0][1] else None
    if together and (normalized is None or not _fills_groups(values.shape[normalized])):
        found = _shape_of_normalized(values, channels, dict(together))
        if found is not None:
            return found
    own_rows |= normalized is not None
    memory = _in_memory(values, {})
    dims = sorted(memory, key=lambda dim: dim.of == normalized)
    order, sizes = tuple(dim.of for dim in dims), [dim.size for dim in dims]
    known, row = math.prod(sizes[_fixed(sizes) :]), sizes[-1] if sizes else 1
    group = group_size(row) if is_known(row) else MAX_GROUP
    if own_rows and is_known(row) and OWN_ROW <= row <= SHARED_ROW:
        group = row
    if known % group or group % PARTS:
        group = _divisor(known) or MAX_GROUP
    across = across_rows(values.shape, order)
    if channels is not None and channels != order[-1]:  # the tokens of a channel lie side by side
        # What they share is in the headers of groups, where these are theirs alone.
        across = () if is_known(row) and row % group == 0 else order[-1:]
    return _cut_into(group, dims, 0, memory, across)


def _fills_groups(row: Any) -> bool:
    """Says whether the groups of long rows are whole without more ado, as far as that is known."""
    return bool(not is_known(row) or (row >= OWN_ROW and row % PARTS == 0))


class _Dim(NamedTuple):
    """A dimension of a tensor, or the outer or inner part of one."""

    of: int  # the dimension
    place: int  # that of it, or of its part, among all of them
    stride: int
    size: Any
    together: bool  # whether a normalization takes its values together


def _in_memory(values: Tensor, together: Mapping[int, int]) -> list[_Dim]:
    """Returns the dimensions of a tensor by falling stride; of what is together by pieces, two for one."""
    dims: list[_Dim] = []
    for dim, size in enumerate(values.shape):
        stride, piece = hint(values.stride(dim)), together.get(dim)
        if piece:
            dims.append(_Dim(dim, len(dims), stride * piece, size // piece, together=False))
            size = piece
        dims.append(_Dim(dim, len(dims), stride, size, together=piece is not None))
    return sorted(dims, key=lambda each: (each.stride, hint(each.size), each.place), reverse=True)


def _shape_of_normalized(values: Tensor, channels: int | None, together: Mapping[int, int]) -> Shape | None:
    """Returns how groups lie within what a normalization takes together; None where that is too little for one."""
    cuts = tuple(pair for pair in sorted(together.items()) if pair[1])
    if not all(is_known(values.shape[dim]) for dim, _ in cuts):
        return None
    memory = _in_memory(values, together)
    order = _whole(memory)
    across = across_rows(values.shape, order) if channels in (None, order[-1]) else ()
    if not together.keys().isdisjoint(across):  # what they share is in the headers of groups
        across = ()
    apart = [place for place, dim in enumerate(memory) if not dim.together and hint(dim.size) > 1]
    begin = apart[-1] + 1 if apart else 0
    run = _elements(memory[begin:])
    if is_known(run) and run >= LEAST_MAP:
        return _cut_into(_group_within(run), memory, begin, memory, across, cuts)
    outer, rows = [dim for dim in memory if not dim.together], [dim for dim in memory if dim.together]
    if hint(_elements(outer)) == 1:
        return None
    return _cut_into(_group_within(_elements(rows)), [*outer, *rows], len(outer), memory, across, cuts)


def _cut_into(
    group: int, dims: Sequence[_Dim], rows: int, memory: Sequence[_Dim], across: Across, cuts: Together = ()
) -> Shape:
    """Returns how groups lie in dimensions, within the rows that begin at a place among these."""
    order, sizes = tuple(dim.place for dim in dims), [dim.size for dim in dims]
    fixed = _fixed(sizes)
    fills = (rows > 0 and fixed > rows) or math.prod(sizes[max(fixed, rows) :]) % group > 0
    # What is left of rows that were filled up has holes between.
    comes_back = [*dims] == [*memory] and not (fills and rows)
    lies = None if comes_back else _whole(memory)
    if fills:
        return Shape(order, group, filled=rows, across=across, cuts=cuts, memory=lies)
    inner = max(place for place in range(fixed, len(sizes)) if math.prod(sizes[place:]) % group == 0)
    splits = (place for place in range(inner) if is_known(sizes[place]) and sizes[place] % PARTS == 0)
    return Shape(order, group, next(splits, None), inner, across=across, cuts=cuts, memory=lies)


def _group_within(row: Any) -> int:
    """Returns the elements of a group where rows of so many are cut into the fewest of them, filled up if need be."""
    elements = hint(row)
    piece = math.ceil(elements / math.ceil(elements / MAX_GROUP))
    return (_divisor(row) if is_known(row) else None) or math.ceil(piece / PARTS) * PARTS


def _divisor(elements: int) -> int | None:
    """Returns the largest group into which so many elements can be cut; None where there is none."""
    return next((size for size in range(MAX_GROUP, LEAST_GROUP - 1, -PARTS) if elements % size == 0), None)


def _fixed(sizes: Sequence[Any]) -> int:
    """Returns the place from which on sizes are the same whatever the symbols are."""
    return next((place for place in range(len(sizes), 0, -1) if not is_known(sizes[place - 1])), 0)


def _whole(dims: Iterable[_Dim]) -> tuple[int, ...]:
    """Returns the dimensions in their order, of which some may be cut."""
    return tuple(dict.fromkeys(dim.of for dim in dims))


def _elements(dims: Iterable[_Dim]) -> Any:
    return math.prod(dim.size for dim in dims)


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
