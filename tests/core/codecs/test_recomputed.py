"""What is computed again from other activations."""

from __future__ import annotations

import pytest
import torch

from daf_core.codecs.raw import RawActivation
from daf_core.codecs.recomputed import Normalization, NormalizedActivation
from tests.core.harness import normal

ROWS, WIDTH = 32, 96
SIXTEEN_BITS = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("offset", [0.0, 300.0])
@pytest.mark.parametrize(
    ("dtype", "parameters"),
    [(torch.float32, torch.float32), *((dtype, each) for dtype in SIXTEEN_BITS for each in (dtype, torch.float32))],
    ids=str,
)
def test_normalizations_are_computed_in_float32(dtype: torch.dtype, parameters: torch.dtype, offset: float) -> None:
    """Whatever the types of values, statistics, which have 16 bits on a CPU, and parameters: it is rounded once."""
    values = (offset + 3 * normal(ROWS, WIDTH)).to(dtype)
    weight, bias = normal(WIDTH, seed=1).to(parameters), normal(WIDTH, seed=2).to(parameters)
    _, mean, scale = torch.native_layer_norm(values, (WIDTH,), weight, bias, 1e-5)
    parts = [lambda each=each: each for each in (mean, scale, weight, bias)]
    normalization = Normalization((-1, WIDTH), (-1, 1), (WIDTH,), *parts)
    found = torch.empty_like(values).view(-1)
    NormalizedActivation(RawActivation(values.view(-1), None), normalization).decode_into(found)
    exact = (values.double() - mean.double()) * scale.double() * weight.double() + bias.double()
    bound = torch.finfo(dtype).eps * exact.abs() + 2e-6 * (1 + offset)
    assert ((found.view(ROWS, WIDTH) - exact).abs() <= bound).all()
