"""How far decoded values are from the original: bounds that follow from the numeric contract.

``u = 2**-24`` is the unit roundoff of float32: every operation is exact up to a factor 1 + d, abs(d) <= u. A group has
``n`` values x, the minimum m, the true range R and the computed one R (1 + d).

Steps: ``t = (x - m) * (levels / spread)`` takes four roundings (both differences, the quotient, the product), so it
is the true position of x up to ``4 u levels``; 4.1 stands for 4, which covers the products of roundings.

- Nearest: a code differs from t by 1/2 at most, unless 1 or 2 bits are clipped.
- Stochastic: t is first rounded to 2**-14 steps, which is off by 2**-15 at most, and then goes up or down to the next
  integer: it differs by less than 1, and not at all on average.

Moments: a value's integer of 12 bits is off by ``1/2 + 4.1 u 4095 < 0.502`` steps of R / 4095: call that distance q.
The mean of n such numbers is off by q at most, and so is their deviation: it is a norm of the centered values, and the
norm of the difference is below its largest part. What follows only rounds:

- The header's mean takes three roundings of a number up to R and one of the sum: ``3 u R + u M``, M = max(abs(x)).
- The header's deviation takes six, ``6 u``, and is then cut to 8 fraction bits: 2**-9 of itself, or, where it is
  subnormal, half of 2**(DEVIATION_SHIFT - 149), which is 2**-135.

Decoding ``y = c * slope + offset``: without rounding it would give the header's moments exactly. slope is off by
``4 u`` of itself, which changes the deviation by as much of itself, and offset with it, so that the mean stays. Let A
be the decoded range: the smallest code of a group is 0, so no product exceeds A and no sum A + M. The product with
the mean code and the difference in offset, and the product and the sum in y, take four roundings of such numbers, and
the quotient in the mean code another of A: ``5 u (A + M)`` for each value, hence for mean and deviation.

The output type rounds each value by its own unit roundoff, or half its smallest subnormal. All this holds where the
spread is 0 or has moments; a smaller spread is decoded as the minimum, which is off by less than that spread.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from daf_kernels import PRECISIONS, PlaneLayout, Seed
from daf_kernels.layout import CLIP, DEVIATION_SHIFT, LARGEST_SPREAD
from daf_kernels.reference import codec as reference
from tests.kernels.hard_inputs import FLOAT_TYPES, HARD_INPUTS, Make, each, normal
from tests.kernels.harness import CPU, SEED, decode, encode, groups_of, layout_of

U = 2.0**-24
STEP_SLACK = 4.1 * U
NO_STEPS = 4095 / torch.finfo(torch.float32).max
"""The spread from which 4095 / spread is finite: below it there are neither steps nor moments."""


def raw_codes(content: Tensor, layout: PlaneLayout, planes: int) -> Tensor:
    """Returns the codes of all elements as integers from 0 to 2**precision - 1."""
    codes = torch.zeros(layout.blocks * 256, dtype=torch.int64)
    for plane in range(planes):
        start = layout.plane_start(plane)
        codes |= reference._unpack(content[start : start + layout.plane_pages(plane)].view(-1), plane, layout.blocks)
    return codes[: layout.elements] >> (8 - PRECISIONS[planes - 1])


def has_range(group: Tensor) -> bool:
    """Whether a group's range is one that is encoded, and no value is infinite or a NaN."""
    return bool(group.isfinite().all()) and bool(group.max() - group.min() < LARGEST_SPREAD)


@pytest.mark.parametrize("planes", [1, 2, 3, 4], ids="planes{}".format)
@pytest.mark.parametrize("seed", [pytest.param(None, id="nearest"), pytest.param(SEED, id="stochastic")])
@pytest.mark.parametrize(("make", "dtype"), each(HARD_INPUTS))
def test_codes_are_the_nearest_or_the_next(make: Make, dtype: torch.dtype, seed: Seed | None, planes: int) -> None:
    """``abs(x - (minimum + code * step))`` is within half a step, or a whole one if stochastic, and the slack above.

    Codes of 1 and 2 bits may be the nearest in a narrower range instead.
    """
    values = make(dtype)
    layout, levels = layout_of(values), 2 ** PRECISIONS[planes - 1] - 1
    codes = raw_codes(encode(CPU, values, planes, seed)[0].content, layout, planes)
    allowed = (0.5 if seed is None else 1.0 + 2.0**-15) + STEP_SLACK * levels
    for group, code in zip(groups_of(values, layout), codes.split(layout.group), strict=True):
        if not has_range(group) or group.max() - group.min() <= NO_STEPS:
            assert not code.any(), "a group without steps has the code 0"
            continue
        step = (group.max() - group.min()) / levels
        close = ((group - (group.min() + code * step)).abs() <= allowed * step).all()
        assert close or (seed is None and planes <= 2 and are_clipped(group.double(), code, levels))
        assert code.max() <= levels


def are_clipped(group: Tensor, code: Tensor, levels: int) -> bool:
    """Says whether the codes are the nearest between `CLIP` deviations on either side of the mean.

    Mean and deviation are off by q of the 4095 steps of the range, and 16 bits below; see `test_clipping` for when.
    """
    deviation = group.std(correction=0)
    low, step = group.mean() - CLIP * deviation, 2 * CLIP * deviation / levels
    slack = (1 + 2 * CLIP) * 0.502 * (group.max() - group.min()) / 4095 + 2.0**-20 * group.abs().max()
    inside = group.clamp(low, low + levels * step)
    return bool(((inside - (low + code * step)).abs() <= step / 2 + slack).all())


@pytest.mark.parametrize("planes", [4, 2], ids="planes{}".format)
@pytest.mark.parametrize("seed", [pytest.param(None, id="nearest"), pytest.param(SEED, id="stochastic")])
@pytest.mark.parametrize(("make", "dtype"), each(HARD_INPUTS))
def test_groups_keep_their_moments(make: Make, dtype: torch.dtype, seed: Seed | None, planes: int) -> None:
    """Each group keeps its mean at every precision, and its deviation as long as one plane is left."""
    values = make(dtype)
    layout, memory = layout_of(values), encode(CPU, values, planes, seed)[0]
    for left in range(planes + 1):
        decoded = decode(CPU, memory, values, left)
        for group, found in zip(groups_of(values, layout), groups_of(decoded, layout), strict=True):
            check_moments(group, found, torch.finfo(dtype), left)


def check_moments(group: Tensor, found: Tensor, info: torch.finfo, left: int) -> None:
    """Holds the moments of one decoded group to the bounds above."""
    spread, moment = group.max() - group.min(), 0.502 * (group.max() - group.min()) / 4095
    if not has_range(group):
        assert found.isnan().all()
    elif spread <= NO_STEPS:
        assert torch.equal(found, group.min().expand_as(found))
    elif found.abs().max() >= info.max:
        assert group.abs().max() > info.max / 64, "only what is near the type's limit is bounded by it"
    else:
        largest = max(group.abs().max(), found.abs().max())
        rounding = 5 * U * (found.max() - found.min() + largest) + (largest + info.tiny) * info.eps / 2
        assert (found.mean() - group.mean()).abs() <= moment + 3 * U * spread + U * largest + rounding
        deviation = group.std(correction=0) if left else torch.tensor(0.0)
        header = (deviation + moment) * (2.0**-9 + 10.1 * U) + 2.0 ** (DEVIATION_SHIFT - 150)
        assert (found.std(correction=0) - deviation).abs() <= moment + header + rounding


@pytest.mark.parametrize("value", [0.7, -3e4, 1e-40, -0.0])
@pytest.mark.parametrize("planes", [0, 1, 4])
def test_constants_are_exact(value: float, planes: int) -> None:
    values = torch.full((3, 100), value)
    assert torch.equal(decode(CPU, encode(CPU, values, 4)[0], values, planes), values)


@pytest.mark.parametrize("planes", [1, 2, 3, 4], ids="planes{}".format)
def test_stochastic_rounding_is_unbiased(planes: int) -> None:
    """The mean code over many seeds is the true position of the value.

    One code is a coin between two integers: its deviation is 1/2 at most, that of a mean of ``draws`` codes
    ``0.5 / sqrt(draws)``. Five times that, for each of 256 values, fails by chance once in 7000 choices of the seeds,
    which are fixed. The mean of all values has a 16th of that deviation. Rounding to 2**-14 steps may shift each by
    2**-15, and the arithmetic by the slack above.
    """
    draws, levels = 400, 2 ** PRECISIONS[planes - 1] - 1
    values = normal(256)
    layout = layout_of(values)
    position = (values.double() - values.min()) * levels / (values.double().max() - values.min())
    codes = torch.stack(
        [raw_codes(encode(CPU, values, planes, (7, 0, draw, 3))[0].content, layout, planes) for draw in range(draws)]
    )
    error, slack = codes.double().mean(0) - position, 2.0**-15 + STEP_SLACK * levels
    assert error.abs().max() <= 5 * 0.5 / draws**0.5 + slack
    assert error.mean().abs() <= 5 * 0.5 / (256 * draws) ** 0.5 + slack


def test_random_numbers_of_elements_do_not_follow_each_other() -> None:
    """Equal values in a tensor are rounded independently: their mean code is unbiased, too.

    Deviation of a mean of 65536 coins of 1/2: 2**-9; five times that is the bound.
    """
    values = torch.full((256, 256), 0.5)
    values[:, 0], values[:, 1] = 0.0, 1.0
    layout = layout_of(values)
    codes = raw_codes(encode(CPU, values, 1, SEED)[0].content, layout, 1).view(256, 256)[:, 2:].double()
    assert (codes.mean() - 0.5).abs() <= 5 * 2.0**-9
    assert (codes.mean(0) - 0.5).abs().max() <= 5 * 0.5 / 16
    assert (codes.mean(1) - 0.5).abs().max() <= 5 * 0.5 / 16


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
def test_finite_values_stay_finite(dtype: torch.dtype) -> None:
    """An infinity that was not stored would end a step that gradient scalers ought to take."""
    limit = torch.finfo(dtype).max
    low = -limit if dtype is torch.float16 else limit * 0.95  # the others take no group with a range of 2**124
    values = torch.full((2, 256), low, dtype=dtype)
    values[0, :20], values[1, 5] = limit, limit
    memory, usable = encode(CPU, values, 4)
    decoded = [decode(CPU, memory, values, left) for left in range(5)]
    assert usable
    assert all(found.isfinite().all() for found in decoded)
    assert any((found.abs() == limit).any() for found in decoded)  # else the line never left the range
