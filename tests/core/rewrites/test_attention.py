"""Attention that keeps a mask instead of probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from daf_core.rewrites import attention
from daf_core.rewrites.attention import dropped_attention

SHAPE = (2, 3, 33, 24)


def run(function: Any, **options: Any) -> list[Tensor]:
    """Returns result, gradients and the next random number."""
    torch.manual_seed(0)
    inputs = [torch.randn(SHAPE, requires_grad=True) for _ in range(3)]
    weights = torch.randn(SHAPE)
    result = function(*inputs, **{"dropout_p": 0.1, **options})
    (result * weights).sum().backward()
    return [result.detach(), *(tensor.grad for tensor in inputs), torch.rand(1)]


def masks() -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    seen = torch.rand(2, 1, 33, 33, generator=generator) > 0.3
    seen[0, 0, 5] = False
    return {
        "none": None,
        "padding": torch.rand(2, 1, 1, 33, generator=generator) > 0.3,
        "a query that sees nothing": seen,
        "added": torch.randn(1, 1, 33, 33, generator=generator),
    }


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("chunk", [1, 2 * 4 * 33 * 33, 1 << 24])
def test_equals_torch(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CHUNK_BYTES", chunk)
    options: dict[str, Any] = {"attn_mask": masks()[name]}
    exact = run(functional.scaled_dot_product_attention, **options)
    for found, wanted in zip(run(dropped_attention, **options), exact, strict=True):
        assert (found - wanted).norm() <= 2e-6 * wanted.norm()


@pytest.mark.parametrize("queries", [128, 8])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"scale": 0.3}, {"is_causal": True, "dropout_p": 0.5}])
def test_options_equal_torch(options: dict[str, Any], queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERIES", queries)
    exact = run(functional.scaled_dot_product_attention, **options)
    for found, wanted in zip(run(dropped_attention, **options), exact, strict=True):
        assert (found - wanted).norm() <= 2e-6 * wanted.norm()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(33, 20), (20, 33)])
def test_queries_and_keys_of_unlike_lengths(
    lengths: tuple[int, int], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "QUERIES", 8)
    results: list[list[Tensor]] = []
    for function in (functional.scaled_dot_product_attention, dropped_attention):
        torch.manual_seed(0)
        inputs = [torch.randn(2, 3, lengths[place > 0], 24, requires_grad=True) for place in range(3)]
        result = function(*inputs, dropout_p=0.1, is_causal=causal)
        assert result is not None
        (result * torch.randn(result.shape)).sum().backward()
        results.append([result.detach(), *(tensor.grad for tensor in inputs), torch.rand(1)])
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).norm() <= 2e-6 * wanted.norm()


@pytest.mark.parametrize("dropout", [0.0, 1.0])
def test_without_a_choice_torch_computes_it(dropout: float) -> None:
    inputs = [torch.randn(SHAPE, requires_grad=True) for _ in range(3)]
    assert dropped_attention(*inputs, dropout_p=dropout) is None


def test_other_types_are_left_to_torch() -> None:
    inputs = [torch.randn(SHAPE, requires_grad=True) for _ in range(3)]
    assert dropped_attention(*inputs, dropout_p=0.1) is not None
    assert dropped_attention(*(tensor.bfloat16() for tensor in inputs), dropout_p=0.1) is None
    assert dropped_attention(*(tensor.detach() for tensor in inputs), dropout_p=0.1) is None
    assert dropped_attention(*(tensor[0] for tensor in inputs), dropout_p=0.1) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert dropped_attention(*inputs, dropout_p=0.1) is None
    mask = torch.zeros(33, 33, requires_grad=True)
    assert dropped_attention(*inputs, dropout_p=0.1, attn_mask=mask) is None
