"""Not stored at all: what follows from other activations that are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from daf_core.codecs.base import StoredActivation
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.sides import KeptSides
from daf_core.readers.table import Bounds

Unpack = Callable[[], Tensor]
"""Gives a small exact tensor."""


class ProductActivation(StoredActivation):
    """The result of a dropout: another activation times its mask.

    It is exact where the other one is; otherwise its error is the other one's, seen through the mask.
    `scale` is what the elements that a mask of bools keeps are multiplied with; None where the mask has that in it.
    """

    name: ClassVar[str] = "product"

    def __init__(self, factor: StoredActivation, mask: StoredActivation, scale: float | None = None) -> None:
        self.lossy = factor.lossy
        self._factor = factor
        self._mask = mask
        self._scale = scale

    @override
    def sampled(self, step: int) -> Tensor | None:
        factors = self._factor.sampled(step)
        if factors is None:
            return None
        if isinstance(self._mask, BitmaskActivation):  # it may have either value
            two = self._mask.values(factors.dtype if self._scale is None else torch.bool).to(factors.device)
            products = (factors.unsqueeze(-1) * two).flatten(1)
        elif (mask := self._mask.sampled(step)) is not None:
            products = factors * mask
        else:
            return None
        return products if self._scale is None else products * self._scale

    @override
    def decode_into(self, out: Tensor) -> None:
        self._factor.decode_into(out)
        mask = torch.empty_like(out, dtype=out.dtype if self._scale is None else torch.bool)
        self._mask.decode_into(mask)
        out.mul_(mask)
        if self._scale is not None:
            out.mul_(self._scale)


@dataclass(frozen=True)
class Normalization:
    """What a normalization does to its input."""

    shape: tuple[int, ...]  # shape in which its values are seen
    statistics: tuple[int, ...]  # that of the mean and of the reciprocal deviation, to be broadcast
    parameters: tuple[int, ...]  # that of weight and bias, to be broadcast
    mean: Unpack  # gives the mean
    scale: Unpack  # gives the reciprocal deviation
    weight: Unpack  # gives the weight
    bias: Unpack  # gives the bias


class NormalizedActivation(StoredActivation):
    """The result of a normalization of layers or batches, from its input and the exact statistics that it saves.

    Lossy even where the input is exact: the operator itself rounds in another order.
    """

    name: ClassVar[str] = "normalized"

    def __init__(self, source: StoredActivation, normalization: Normalization) -> None:
        self._source = source
        self._normalization = normalization

    @override
    def decode_into(self, out: Tensor) -> None:
        self._source.decode_into(out)
        found = self._normalization
        mean, scale = (part().view(found.statistics).float() for part in (found.mean, found.scale))
        weight, bias = (part().view(found.parameters).float() for part in (found.weight, found.bias))
        rows = out.view(found.shape)
        # In float32, as the operator: in 16 bits a difference may overflow. Each operation reads and writes all of a
        # tensor; a CPU takes five times as long for an `addcmul` whose factors are broadcast along rows.
        in_place = rows if rows.dtype is torch.float32 else None
        if found.statistics == found.parameters:  # those of batches: one factor and one term a channel
            factor = scale * weight
            torch.add(torch.mul(rows, factor, out=in_place), bias - mean * factor, out=rows)
        else:
            normalized = torch.sub(rows, mean, out=in_place).mul_(scale)
            torch.addcmul(bias, normalized, weight, out=rows)


class Argument(Protocol):
    """A tensor that an operator has saved, as it is stored now; see `Packed`."""

    @property
    def stored(self) -> StoredActivation:
        """What is stored of it."""
        ...

    def unpack(self) -> Tensor:
        """Returns the tensor."""
        ...


class ElementwiseActivation(StoredActivation):
    """The result of an operator that works element by element, from all of its arguments.

    It has the same bits where these have: they lie in memory as they did, and as many threads share the work. A kernel
    rounds elements at the ends of rows, and of a thread's share, in another way: 1 of 300,000 in a SiLU.

    Args:
        operator: Takes the arguments, and a tensor for the result as ``out``.
        arguments: Of shapes that are broadcast to that of the result.
        shape: That of the result.
    """

    name: ClassVar[str] = "elementwise"

    def __init__(self, operator: Callable[..., object], arguments: Sequence[Argument], shape: torch.Size) -> None:
        self._operator = operator
        self._arguments = arguments
        self._shape = shape
        self._threads = torch.get_num_threads()
        stored = [argument.stored for argument in arguments]
        self.lossy = any(each.lossy for each in stored)
        # Operators that follow one another when it is decoded.
        self.depth = 1 + max(each.depth if isinstance(each, ElementwiseActivation) else 0 for each in stored)

    @property
    @override
    def suits_rows(self) -> bool:
        return all(argument.stored.suits_rows for argument in self._arguments)

    @override
    def decode_into(self, out: Tensor) -> None:
        arguments = [argument.unpack() for argument in self._arguments]
        threads = torch.get_num_threads()
        same = self.lossy or threads == self._threads
        try:
            if not same:
                torch.set_num_threads(self._threads)
            self._operator(*arguments, out=out.view(self._shape))
        finally:
            if not same:
                torch.set_num_threads(threads)


class SumActivation(StoredActivation):
    """The sum of two activations, as of a residual connection; its error is theirs."""

    name: ClassVar[str] = "sum"

    def __init__(self, first: StoredActivation, second: StoredActivation, sums: int) -> None:
        self._first, self._second = first, second
        self.sums = sums  # sums that are computed to decode it: one of them may be a sum itself

    @override
    def decode_into(self, out: Tensor) -> None:
        self._first.decode_into(out)
        second = torch.empty_like(out)
        self._second.decode_into(second)
        out.add_(second)


class ScaledActivation(StoredActivation):
    """Another activation times an exact number for each row; its error is the other one's, in proportion.

    `factor` gives the numbers, `width` are the elements of a row.
    """

    name: ClassVar[str] = "scaled"

    def __init__(self, source: StoredActivation, factor: Unpack, width: int) -> None:
        self._source = source
        self._factor = factor
        self._width = width

    @property
    @override
    def suits_rows(self) -> bool:
        return self._source.suits_rows

    @override
    def decode_into(self, out: Tensor) -> None:
        self._source.decode_into(out)
        out.view(-1, self._width).mul_(self._factor().reshape(-1, 1))


class CastActivation(StoredActivation):
    """Another activation in another type, as autocast gives it to a linear layer: its error is the other one's."""

    name: ClassVar[str] = "cast"

    def __init__(self, source: StoredActivation, before: torch.dtype, dtype: torch.dtype) -> None:
        self.lossy = source.lossy
        self._source = source
        self._before = before  # type of the other one
        self._dtype = dtype

    @override
    def sampled(self, step: int) -> Tensor | None:
        values = self._source.sampled(step)
        return None if values is None else values.to(self._dtype)

    @override
    def decode_into(self, out: Tensor) -> None:
        values = torch.empty_like(out, dtype=self._before)
        self._source.decode_into(values)
        out.copy_(values)


class BoundedActivation(StoredActivation):
    """What follows from other activations, with each value on its side of bounds."""

    name: ClassVar[str] = "bounded"

    def __init__(self, recipe: StoredActivation, sides: KeptSides) -> None:
        self._recipe = recipe
        self._sides = sides

    @property
    @override
    def bounds(self) -> Bounds:
        return self._sides.bounds

    @property
    @override
    def suits_rows(self) -> bool:
        return self._recipe.suits_rows

    @override
    def decode_into(self, out: Tensor) -> None:
        self._recipe.decode_into(out)
        self._sides.keep(out)


RECIPES = (
    ProductActivation, NormalizedActivation, ElementwiseActivation, SumActivation, ScaledActivation, CastActivation,
    BoundedActivation,
)  # fmt: skip
