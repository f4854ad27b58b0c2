"""Probabilities sum to 1 when they are decoded, however many they are: their softmax's gradient needs that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from daf_core.codecs.base import EncodeContext
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.scaling_groups import Grouping, probabilities_of
from daf_core.codecs.tensor_layout import geometry_of
from daf_core.memory.pager import Pager
from daf_core.memory.pages.pool import PagePool
from daf_kernels import load_backend
from tests.core.codecs.test_normalized_rows import errors_of_weight
from tests.core.harness import assert_empty, engine_for, normal

CPU = torch.device("cpu")
MASKED = 5
"""A row in which everything is masked."""


def probabilities(length: int, dim: int = -1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns 960 rows of probabilities, some of them sharp, and one of zeros."""
    scores = normal(960, length) * torch.logspace(-1, 1, 960).unsqueeze(1)
    found = scores.softmax(-1).index_fill(0, torch.tensor([MASKED]), 0.0).view(40, 24, length)
    return found.movedim(-1, dim).contiguous().to(dtype)


def grouping(values: Tensor, dim: int = -1) -> Grouping:
    return probabilities_of(geometry_of(tuple(values.shape), values.stride()), dim)


def stored(values: Tensor, dim: int, precision: int) -> tuple[PlanesActivation, Pager]:
    pager = Pager(PagePool(CPU))
    ctx = EncodeContext(values.view(-1), pager, load_backend(CPU), grouping(values, dim), precision=precision)
    activation = PlanesActivation.write(ctx)
    assert activation is not None
    return activation, pager


@pytest.mark.parametrize("precision", [8, 4, 1, 0])
@pytest.mark.parametrize(("length", "dim"), [(16, -1), (31, -1), (40, -1), (257, -1), (300, -1), (31, -2), (64, -3)])
def test_sums_are_kept(length: int, dim: int, precision: int) -> None:
    """The mean of a row of its own, of 40 or 300, is that of values rounded to 1/4095 of their range."""
    values = probabilities(length, dim)
    activation, pager = stored(values, dim, precision)
    found = torch.empty_like(values)
    activation.decode_into(found.view(-1))
    off = (found.sum(dim) - values.sum(dim)).abs().max()
    assert off < (5e-3 if activation.beside is None else 1e-5)
    assert pager.held_bytes == activation.held_bytes
    del activation
    assert pager.settle() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_as_exact_as_their_type(dtype: torch.dtype) -> None:
    values = probabilities(257, -1, dtype)
    found = torch.empty_like(values)
    stored(values, -1, 4)[0].decode_into(found.view(-1))
    assert (found.float().sum(-1) - values.float().sum(-1)).abs().max() < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("length", [32, 64, 77, 256, 300, 577])
def test_nothing_is_kept_beside_codes_where_groups_keep_the_sums(length: int) -> None:
    """As means of rows, or of equal pieces of rows; 577 is a prime, and groups run through rows."""
    assert (stored(probabilities(length), -1, 4)[0].beside is None) is (length != 577)
    assert stored(probabilities(length, -2), -2, 4)[0].beside is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [31, 40, 64, 257, 300])
def test_keys_that_no_query_sees_stay_unseen(length: int, dtype: torch.dtype) -> None:
    """As those of padding. Others still sum to 1, or to 0 for a query that sees nothing."""
    scores = normal(40, 24, length)
    for row in range(0, 40, 2):
        scores[row, :, length - row // 3 - 1 :] = -torch.inf
    scores[3].masked_fill_(torch.ones(24, length, dtype=torch.bool).triu(1), -torch.inf)
    values = scores.softmax(-1).index_fill(1, torch.tensor([MASKED]), 0.0).to(dtype)
    activation, pager = stored(values, -1, 4)
    found = torch.empty_like(values)
    activation.decode_into(found.view(-1))
    assert torch.equal(found.amax(1) == 0, values.amax(1) == 0)
    assert (found.float().sum(-1) - values.float().sum(-1)).abs().max() < 16 * torch.finfo(dtype).eps
    assert activation.beside is not None
    assert pager.held_bytes == activation.held_bytes
    del activation
    assert pager.settle() == 0


class Attention(nn.Module):
    """An attention to keys and values that have much in common."""

    def __init__(self, shared: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))
        with torch.no_grad():
            for each in (self.key, self.value):
                each.bias.normal_(std=shared)

    def forward(self, inputs: Tensor) -> Tensor:
        scores = self.query(inputs) @ self.key(inputs).transpose(1, 2)
        return torch.softmax(scores / 8, -1) @ self.value(inputs)


@pytest.mark.parametrize("tokens", [24, 31, 257])
def test_what_values_have_in_common_cancels(tokens: int) -> None:
    """Where sums were not kept, errors were 2.4, 2.6 and .7."""
    model = Attention(5.0)
    errors = errors_of_weight(model, model.query.weight, normal(8, tokens, 64), 4)
    assert 0 < min(errors) <= max(errors) < 0.3


class Padded(Attention):
    """An attention to tokens of which some are padding."""

    def forward(self, inputs: Tensor) -> Tensor:
        masked = (inputs == 0).all(-1)
        scores = self.query(inputs) @ self.key(inputs).transpose(1, 2)
        found = torch.softmax(scores.masked_fill(masked.unsqueeze(1), -torch.inf), -1) @ self.value(inputs)
        return found.masked_fill(masked.unsqueeze(-1), 0.0)


@pytest.mark.parametrize("tokens", [48, 77])
def test_padding_gets_no_gradient(tokens: int) -> None:
    model, inputs = Padded(0.5), normal(8, tokens, 64)
    for row in range(1, 8):
        inputs[row, tokens - 2 * row :] = 0.0
    inputs.requires_grad_()
    engine = engine_for(model, 4)
    for _ in range(3):
        with engine.compress():
            loss = model(inputs).square().mean()
        (gradient,) = torch.autograd.grad(loss, inputs)
        assert torch.equal((gradient == 0).all(-1), (inputs == 0).all(-1))
        assert engine.finish_step().stored_as["planes"] > 0
    del loss
    assert_empty(engine)
