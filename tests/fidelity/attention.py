"""Attention with logits that are flat and sharp: fused, and written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.harness import normal
from tests.fidelity.measure import Case, Problem

BATCH, HEADS, TOKENS, HEAD_DIM = 2, 4, 128, 64
DEVIATIONS = (1, 3, 6, 10)
"""Of the logits before the softmax."""

Attention = Callable[..., Tensor]

BLOCKED = normal(TOKENS, TOKENS, seed=7) < -0.5
BLOCKED.fill_diagonal_(False)
PADDED = torch.arange(TOKENS) < torch.tensor([[[[96]]], [[[64]]]])

OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": ~BLOCKED},
    "padding": {"attn_mask": PADDED},
    "mask of -inf": {"attn_mask": torch.zeros(TOKENS, TOKENS).masked_fill(BLOCKED, -math.inf)},
    "mask of -1e4": {"attn_mask": torch.zeros(TOKENS, TOKENS).masked_fill(BLOCKED, -1e4)},
    "mask of the least number": {
        "attn_mask": torch.zeros(TOKENS, TOKENS).masked_fill(BLOCKED, torch.finfo(torch.float32).min)
    },
    "bias": {"attn_mask": normal(HEADS, TOKENS, TOKENS, seed=8)},
    "dropout": {"dropout_p": 0.1},
    "grouped": {"enable_gqa": True},
    "scale": {"scale": 0.2},
}
"""Of a fused attention; the last two are for it alone."""


def cases() -> Iterator[Case]:
    """Yields attention of each kind, and modules with it."""
    for deviation in DEVIATIONS:
        for name, options in OPTIONS.items():
            make = partial(_problem, F.scaled_dot_product_attention, deviation, options)
            yield Case(_title("fused", deviation, name), make, "fused")
            if not {"enable_gqa", "scale"} & options.keys():
                yield Case(
                    _title("written out", deviation, name),
                    partial(_problem, _written_out, deviation, options),
                    "written out",
                )
        yield Case(f"of two lengths, deviation {deviation}", partial(_of_two_lengths, deviation))
        yield Case(f"with a common mean, deviation {deviation}", partial(_with_a_common_mean, deviation))
    for training in (True, False):
        yield Case(f"nn.MultiheadAttention, training {training}", partial(_of_module, training))


def _title(kind: str, deviation: int, name: str) -> str:
    return f"{kind}, deviation {deviation}{', ' if name else ''}{name}"


def _inputs(deviation: int, heads: int = HEADS) -> list[Tensor]:
    """Returns query, key and value, whose logits have such a deviation."""
    root = deviation**0.5
    query = normal(BATCH, HEADS, TOKENS, HEAD_DIM) * root
    key = normal(BATCH, heads, TOKENS, HEAD_DIM, seed=1) * root
    value = normal(BATCH, heads, TOKENS, HEAD_DIM, seed=2)
    return [tensor.requires_grad_() for tensor in (query, key, value)]


def _problem(attention: Attention, deviation: int, options: dict[str, Any]) -> Problem:
    inputs = _inputs(deviation, 2 if "enable_gqa" in options else HEADS)
    return Problem(lambda: attention(*(each.clone() for each in inputs), **options), inputs)


def _of_two_lengths(deviation: int) -> Problem:
    query, key, value = _inputs(deviation)
    return Problem(
        lambda: F.scaled_dot_product_attention(query[:, :, :32].clone(), key * 1, value * 1), [query, key, value]
    )


def _with_a_common_mean(deviation: int) -> Problem:
    """Keys often have one, as behind a projection with a bias; it does not change the result."""
    query, key, value = _inputs(deviation)
    mean = 3 * normal(1, HEADS, 1, HEAD_DIM, seed=9)
    return Problem(lambda: F.scaled_dot_product_attention(query * 1, key + mean, value * 1), [query, key, value])


def _of_module(training: bool) -> Problem:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(HEADS * HEAD_DIM, HEADS, dropout=0.1, batch_first=True).train(training)
    x = (normal(BATCH, TOKENS, HEADS * HEAD_DIM) * 2).requires_grad_()

    def forward() -> Tensor:
        hidden = x * 1
        return module(hidden, hidden, hidden, need_weights=False)[0]

    return Problem(forward, [x, *module.parameters()], module)


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """Attention as models have it that do not call torch's."""
    logits = query @ key.mT / HEAD_DIM**0.5
    if is_causal:
        attn_mask = torch.ones(TOKENS, TOKENS).tril().bool()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        logits = logits.masked_fill(~attn_mask, torch.finfo(logits.dtype).min)
    elif attn_mask is not None:
        logits = logits + attn_mask
    return F.dropout(logits.softmax(-1), dropout_p) @ value
