"""How a saved tensor lies in memory, and the smallest tensor that holds all its values once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Rows along any dimension of flat values."""

    outer: int  # product of the dimensions before it
    length: int
    inner: int  # product of the dimensions after it
    dim: int  # the dimension, counted from the end

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of values that are rows along the second dimension."""
        return self.outer, self.length, self.inner


@dataclass(frozen=True, eq=False)  # one for each shape, from `geometry_of`
class Geometry:
    """Shape and strides of a saved tensor, and of its *compact* form: what is stored.

    The compact form has the tensor's dimensions in order of falling stride, without those of one element and those of
    stride 0 (broadcast). Where it is dense, or its elements overlap, it is the flat run of memory that it spans.
    """

    shape: tuple[int, ...]  # shape of the saved tensor
    strides: tuple[int, ...]  # its strides, in elements
    span: int  # elements from its first to its last one in memory
    compact_shape: tuple[int, ...]  # shape of the compact form
    compact_strides: tuple[int, ...]  # its strides
    row: int  # elements in a row: the length of the innermost dimension in memory
    memory_shape: tuple[int, ...]  # its dimensions in order of falling stride, as those of the compact form

    @cached_property
    def has_holes(self) -> bool:
        """Whether memory between its first element and its last one is none of its own."""
        return self.compact_strides != (1,)

    @cached_property
    def row_major(self) -> bool:
        """Whether the tensor is contiguous."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    def rows_along(self, dim: int, in_any_order: bool = False) -> Rows | None:
        """Returns the rows along a dimension, counted from the end; None where they do not lie one after the other.

        `in_any_order` takes them of the compact form, too: the tensor's other dimensions may be in another order, and
        there may be memory of others between its elements.
        """
        shape, strides = self.shape, self.strides
        if self.row_major and shape:
            return Rows(math.prod(shape[:dim]), shape[dim], math.prod(shape[dim:][1:]), dim)
        if not in_any_order or not shape or shape[dim] < 2 or self._overlaps:
            return None
        place = sum(1 for size, stride in zip(shape, strides, strict=True) if size > 1 and stride > strides[dim])
        sizes = self.memory_shape
        return Rows(math.prod(sizes[:place]), sizes[place], math.prod(sizes[place + 1 :]), dim)

    @cached_property
    def _overlaps(self) -> bool:
        """Whether several of its elements are the same in memory, as those of an expanded tensor."""
        steps = sorted((stride, size) for size, stride in zip(self.shape, self.strides, strict=True) if size > 1)
        return not steps or steps[0][0] < 1 or any(after < size * step for (step, size), (after, _) in pairwise(steps))

    def compact(self, tensor: Tensor) -> Tensor:
        """Returns the compact form of a detached tensor of this geometry, a view."""
        return tensor.view(-1) if self._is_flat else tensor.as_strided(self.compact_shape, self.compact_strides)

    def allocate(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns an uninitialized tensor of this geometry and its compact form, in the same memory."""
        if self._is_flat:
            tensor = torch.empty(self.shape, dtype=dtype, device=device)
            return tensor, tensor.view(-1)
        memory = torch.empty(self.span, dtype=dtype, device=device)
        return (
            memory.as_strided(self.shape, self.strides),
            memory.as_strided(self.compact_shape, self.compact_strides),
        )

    @cached_property
    def _is_flat(self) -> bool:
        """Whether the compact form is the contiguous tensor itself, flat: `view` takes half as long as `as_strided`."""
        expected = tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        return self.strides == expected and self.compact_shape == (math.prod(self.shape),)


@lru_cache(maxsize=4096)
def geometry_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> Geometry:
    """Returns the geometry of tensors of this shape and these strides; cached, since shapes repeat every step."""
    dims = [(stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1 and stride > 0]
    dims.sort(reverse=True)
    sizes, steps = tuple(size for _, size in dims), tuple(stride for stride, _ in dims)
    span = 1 + sum((size - 1) * stride for stride, size in dims)
    row = sizes[-1] if sizes else 1
    if _has_holes(sizes, steps):
        return Geometry(shape, strides, span, sizes, steps, row, sizes)
    return Geometry(shape, strides, span, (span,), (1,), row, sizes)


def _has_holes(sizes: tuple[int, ...], steps: tuple[int, ...]) -> bool:
    """Says whether elements lie apart without overlapping: such a run of memory holds values that are not saved."""
    covered, holes = 1, False
    for size, step in zip(reversed(sizes), reversed(steps), strict=True):
        if step < covered:
            return False
        holes = holes or step > covered
        covered = (size - 1) * step + covered
    return holes
