"""The tables of hard inputs that every kernel backend is held to: activations and masks, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDE = (torch.float32, torch.bfloat16)
"""The types with 8 exponent bits: only they hold ranges that are too small or too large for float32 arithmetic."""

MASK_TYPES = (
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, *FLOAT_TYPES, torch.float64,
)  # fmt: skip

Make = Callable[[torch.dtype], Tensor]


@dataclass(frozen=True)
class HardInput:
    """An input that breaks a kernel which is only nearly right.

    Attributes:
        name: What is hard about it.
        make: Makes the tensor in a type. Its last dimension is the row that scaling groups follow.
        types: The types that can hold such values.
    """

    name: str
    make: Make
    types: tuple[torch.dtype, ...] = FLOAT_TYPES


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Returns float32 normal numbers, the same every time, without touching torch's own generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_bits(seed: int, shift: int, rows: int, row: int, dtype: torch.dtype) -> Tensor:
    """Returns elements of random bits, NaNs and infinities among them, of a spread that varies from row to row.

    A shift of 0 leaves any float32, one of 26 a few bits of it.
    """
    source, distance = np.random.default_rng(seed), np.uint64(shift)
    pattern = source.integers(0, 2**32, (rows, row), dtype=np.uint64) >> distance
    pattern += source.integers(0, 2**32, (rows, 1), dtype=np.uint64) >> distance << distance
    return torch.from_numpy((pattern & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)).to(dtype)


def _from(values: Callable[[], Tensor]) -> Make:
    return lambda dtype: values().to(dtype)


def _smallest(dtype: torch.dtype) -> float:
    """The smallest subnormal number of a type."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def _planted(value: float, index: int = 300, shape: tuple[int, int] = (3, 256)) -> Make:
    """Makes normal numbers with one `value` among them."""

    def make(dtype: torch.dtype) -> Tensor:
        values = normal(*shape)
        values.view(-1)[index] = value
        return values.to(dtype)

    return make


def _ties() -> Tensor:
    """Groups from 0 to the levels of each precision, and of the moments, in steps that end half way between codes."""
    steps = torch.arange(256.0)
    return torch.stack([(steps + 0.5 * (steps % 2)).clamp(max=levels) % (levels + 0.5) for levels in (1, 3, 15, 255)])


def _moment_ties() -> Tensor:
    """A group from 0 to 4095 in half steps of the 12-bit integers that moments are made of."""
    values = 7.5 + 16.0 * torch.arange(256.0)
    values[0], values[-1] = 0.0, 4095.0
    return values[None]


def _all_nan_group() -> Tensor:
    values = normal(3, 128)
    values[1] = math.nan
    return values


def _infinities_of_both_signs() -> Tensor:
    values = normal(4, 128)
    values[1, 3], values[1, 60], values[3, 0] = math.inf, -math.inf, -math.inf
    return values


def _near_limit(dtype: torch.dtype) -> Tensor:
    """Values of one sign up to the type's maximum: their range fits, sums of them do not."""
    share = torch.linspace(0.95, 1.0, 512, dtype=torch.float64)
    return (share * torch.finfo(dtype).max).to(dtype).view(2, 256)


def _range_overflow(dtype: torch.dtype) -> Tensor:
    values = normal(3, 256).to(dtype)
    values[1, 7], values[1, 9] = torch.finfo(dtype).max, torch.finfo(dtype).min
    return values


def _outlier() -> Tensor:
    values = normal(2, 256)
    values[0, 100] = 1e4
    return values


def _mixed_zeros() -> Tensor:
    values = torch.zeros(2, 256)
    values[0, ::3] = -0.0
    values[1] = -0.0
    return values


ROWS = (64 * 257, 768, 257, 256, 128, 79, 64, 50, 31, 8, 1)

HARD_INPUTS = (
    HardInput("normal", _from(lambda: normal(8, 256))),
    HardInput("one element", _from(lambda: normal(1))),
    HardInput("no dimension", _from(lambda: normal(1).view(()))),
    HardInput("odd tail of a block", _from(lambda: normal(5003))),
    HardInput("odd tail of a group", _from(lambda: normal(3, 257))),
    HardInput("last group of one element", _from(lambda: normal(1, 513, seed=1).view(513, 1))),
    HardInput("all zero", _from(lambda: torch.zeros(3, 256))),
    HardInput("constant", _from(lambda: torch.full((3, 256), 0.7))),
    HardInput("negative and positive zero", _from(_mixed_zeros)),
    HardInput("far from zero", _from(lambda: 1e4 + 1e-2 * normal(4, 256))),
    HardInput("far below zero", _from(lambda: -3e4 + 8.0 * normal(4, 256))),
    HardInput("subnormals", lambda dtype: (normal(2, 256) * 40).round().to(dtype) * _smallest(dtype)),
    HardInput("smallest step", lambda dtype: (normal(2, 256) > 0).to(dtype) * _smallest(dtype)),
    HardInput("range without moments", _from(lambda: normal(2, 256) * 1e-36), WIDE),
    HardInput("range with and without moments", _from(lambda: normal(8, 128) * 1.2e-35 / 5.3), WIDE),
    HardInput("range with subnormal deviation", _from(lambda: (torch.arange(256.0) == 9)[None] * 2e-35), WIDE),
    HardInput("near the type's limit", _near_limit),
    HardInput("range overflow", _range_overflow, WIDE),
    HardInput("range of the whole type", _range_overflow, (torch.float16,)),
    HardInput("one nan", _planted(math.nan)),
    HardInput("one infinity", _planted(math.inf)),
    HardInput("one negative infinity", _planted(-math.inf)),
    HardInput("nan in the tail", _planted(math.nan, 512, (3, 171))),
    HardInput("group of nan", _from(_all_nan_group)),
    HardInput("infinities of both signs", _from(_infinities_of_both_signs)),
    HardInput("two values", _from(lambda: (normal(2, 256) > 0.3) * 3.7 - 1.1)),
    HardInput("heavy outlier", _from(_outlier)),
    HardInput("ties", _from(_ties)),
    HardInput("moment ties", _from(_moment_ties), (torch.float32,)),
    HardInput("transposed", lambda dtype: normal(96, 41).to(dtype).T),
    HardInput("permuted", lambda dtype: normal(4, 6, 80, 5).to(dtype).permute(2, 0, 3, 1)),
    HardInput("every other column", lambda dtype: normal(40, 128).to(dtype)[:, ::2]),
    HardInput("columns cut out", lambda dtype: normal(40, 128).to(dtype)[:, 10:90]),
    HardInput("rows cut out", lambda dtype: normal(9, 7, 64).to(dtype)[1::2, 2:5]),
    HardInput("one column", lambda dtype: normal(700, 3).to(dtype)[:, 1]),
    *(HardInput(f"rows of {row}", _from(lambda row=row: normal(-(-1200 // row), row))) for row in ROWS),
)


@dataclass(frozen=True)
class HardMask:
    """A tensor of two values, compared bit by bit.

    Attributes:
        name: What is hard about it.
        make: Makes the tensor in a type.
        types: The types that can hold such values.
    """

    name: str
    make: Make
    types: tuple[torch.dtype, ...] = MASK_TYPES


def flags(*shape: int) -> Tensor:
    """Returns a bool tensor whose flags follow no pattern of 8, 32 or 256."""
    return normal(*shape, seed=5) > 0.2


def _of(zero: float, one: float, *shape: int) -> Make:
    return lambda dtype: torch.where(flags(*shape), torch.tensor(one, dtype=dtype), torch.tensor(zero, dtype=dtype))


def nan_payloads(*shape: int) -> Tensor:
    """Returns NaNs of two bit patterns."""
    zero, one = torch.tensor(0x7FC00000, dtype=torch.int32), torch.tensor(0x7FC00001, dtype=torch.int32)
    return torch.where(flags(*shape), one, zero).view(torch.float32)


def _late_one(dtype: torch.dtype) -> Tensor:
    values = torch.zeros(3000, dtype=dtype)
    values[2990] = 1
    return values


HARD_MASKS = (
    HardMask("zeros and ones", _of(0, 1, 9, 130)),
    HardMask("one element", _of(0, 1, 1)),
    HardMask("no dimension", lambda dtype: torch.ones((), dtype=dtype)),
    HardMask("one block", _of(0, 1, 256)),
    HardMask("one more than a block", _of(0, 1, 257)),
    HardMask("all zero", lambda dtype: torch.zeros(300, dtype=dtype)),
    HardMask("all one", lambda dtype: torch.ones(300, dtype=dtype)),
    HardMask("second value past the first block", _late_one),
    HardMask("extremes of the sign", _of(-1, 1, 600), MASK_TYPES[1:2] + MASK_TYPES[3:]),
    HardMask("dropout", _of(0.0, 1 / 0.9, 40, 64), FLOAT_TYPES),
    HardMask("attention", _of(0.0, -math.inf, 3, 33, 33), FLOAT_TYPES),
    HardMask("negative and positive zero", _of(0.0, -0.0, 500), (*FLOAT_TYPES, torch.float64)),
    HardMask("nan payloads", lambda _: nan_payloads(700), (torch.float32,)),
    HardMask("transposed", lambda dtype: _of(0, 1, 70, 37)(dtype).T),
    HardMask("every third column", lambda dtype: _of(0, 1, 70, 37)(dtype)[:, ::3]),
    HardMask("constant head of a tensor with holes", lambda dtype: torch.stack([_late_one(dtype)] * 2, 1)[:, 0]),
)


def each(table: tuple[HardInput, ...] | tuple[HardMask, ...]) -> list[object]:
    """Returns every input of a table in every type it exists in, as a parameter with a readable id."""
    return [
        pytest.param(row.make, dtype, id=f"{row.name}-{str(dtype).removeprefix('torch.')}")
        for row in table
        for dtype in row.types
    ]
