"""The cross entropy of a linear layer's result, which never exists as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 32 << 20
"""Logits of a chunk in float32, of which there are two copies. GPT-2's head on 2 x 512 tokens, 2 cores: 8 MB take 1.6
times as long as all at once, 16 MB 1.3, 32 MB 1.07, and 64 MB no less, as every chunk reads all of the weight."""

FLOAT16_SCALE = 1024.0
"""Factor on the gradient of the logits in float16, whose least normal number is 6e-5, three times the probability of
one of 50,000 tokens; hidden states' gradients stay below 65504 for weights up to 32."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Gradients of the sum of losses, times `scale`; those of weight and bias in float32, None where not wanted."""

    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None
    scale: float


def linear_cross_entropy_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """Returns the sum of the cross entropies of ``linear(hidden, weight, bias)``, in float32.

    The gradient is computed in the same pass, so that nothing is computed twice. Of that gradient an error would reach
    all layers below as it is: it is kept past other saved-tensor hooks, and weighs as much as the hidden states.

    Args:
        hidden: Hidden states, (rows, hidden size).
        weight: (vocabulary, hidden size).
        bias: (vocabulary,), or None.
        targets: Indices into the vocabulary, (rows,).
        ignore_index: Target of rows that do not count; their logits are not computed.
        dtype: Type of the products; the loss is computed in float32.

    Raises:
        RuntimeError: A target is outside of the vocabulary, or the gradient is to be differentiated.
    """
    with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
        return _LinearCrossEntropy.apply(hidden, weight, bias, targets, ignore_index, dtype)  # pyright: ignore[reportReturnType]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore_index: int,
        dtype: torch.dtype,
    ) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = Gradients(
                hidden=torch.zeros_like(hidden, dtype=dtype),
                weight=_zeros(weight, ctx.needs_input_grad[1]),
                bias=_zeros(bias, ctx.needs_input_grad[2]),
                scale=FLOAT16_SCALE if dtype is torch.float16 else 1.0,
            )
            cast_bias = None if bias is None else bias.to(dtype)
            total = _accumulate(hidden, weight.to(dtype), cast_bias, targets, ignore_index, gradients)
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.scale = gradients.scale
        ctx.counts = bool((targets != ignore_index).any())
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # The mean of no losses is NaN, and yet has no gradient in torch.
        factor = gradient / ctx.scale if ctx.counts else torch.zeros_like(gradient)
        found = [
            (tensor * factor).to(dtype) if needed else None
            for tensor, dtype, needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad, strict=False)
        ]
        return (*found, None, None, None)


def _accumulate(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, gradients: Gradients
) -> Tensor:
    """Returns the sum of losses, and adds to the gradients."""
    rows = (targets != ignore_index).nonzero().squeeze(1)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    most = max(1, CHUNK_BYTES // (4 * len(weight)))
    # Equal chunks: a short one at the end would read all of the weight for little.
    parts = rows.tensor_split(-(-len(rows) // most)) if len(rows) else ()
    longest = max(map(len, parts), default=0)
    scores = torch.empty(longest, len(weight), dtype=weight.dtype, device=weight.device)
    logs = torch.empty_like(scores, dtype=torch.float32)
    for part in parts:
        states = hidden.index_select(0, part).to(weight.dtype)
        target = targets.index_select(0, part).unsqueeze(1)
        total -= _log_probabilities(states, weight, bias, target, scores[: len(part)], logs[: len(part)])
        slopes = _slopes(logs[: len(part)], target, scores[: len(part)], gradients.scale)
        gradients.hidden.index_copy_(0, part, slopes @ weight)
        if gradients.weight is not None:
            _add_product(gradients.weight, slopes.t(), states)
        if gradients.bias is not None:
            gradients.bias.add_(slopes.sum(0, dtype=torch.float32))
    return total


def _zeros(tensor: Tensor | None, wanted: bool) -> Tensor | None:
    return torch.zeros_like(tensor, dtype=torch.float32) if tensor is not None and wanted else None


def _log_probabilities(
    states: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scores: Tensor, logs: Tensor
) -> Tensor:
    """Writes the logarithms of the probabilities to `logs`, and returns the sum of those of the targets."""
    if bias is None:
        torch.mm(states, weight.t(), out=scores)
    else:
        torch.addmm(bias, states, weight.t(), out=scores)
    torch.log_softmax(scores, -1, dtype=torch.float32, out=logs)
    return logs.gather(1, target).sum()


def _slopes(logs: Tensor, target: Tensor, scores: Tensor, scale: float) -> Tensor:
    """Returns `scale` times the gradient of the logits, in the memory of the scores."""
    probabilities = logs.exp_()
    probabilities.scatter_add_(1, target, probabilities.new_full(target.shape, -1.0))
    return scores.copy_(probabilities if scale == 1.0 else probabilities.mul_(scale))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype is left.dtype:
        total.addmm_(left, right)
    else:  # chunks are summed in float32
        total += left @ right


def _itself(tensor: Tensor) -> Tensor:
    return tensor
