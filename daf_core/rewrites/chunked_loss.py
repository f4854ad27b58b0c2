"""The cross entropy of a linear layer's result, which never exists as a whole."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf_core.autograd.functions import apply, once_differentiable
from daf_core.rewrites.base import autocast_device
from daf_kernels import is_capturing

CHUNK_BYTES = 32 << 20
"""Logits of a chunk in float32, of which there are two copies. GPT-2's head on 2 x 512 tokens, 2 cores: 8 MB take 1.6
times as long as all at once, 16 MB 1.3, 32 MB 1.07, and 64 MB no less, as every chunk reads all of the weight."""

FLOAT16_SCALE = 1024.0
"""Factor on the gradient of the logits in float16, whose least normal number is 6e-5, three times the probability of
one of 50,000 tokens; hidden states' gradients stay below 65504 for weights up to 32."""


class Bend(NamedTuple):
    """How logits follow from what the projection gives: by a factor, and where there is a limit, by a tanh below it."""

    scale: float = 1.0
    limit: float | None = None


STRAIGHT = Bend()
"""Logits are what the projection gives."""


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    dtype: torch.dtype,
    bend: Bend = STRAIGHT,
    smoothing: float = 0.0,
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
        bend: How logits follow from the products.
        smoothing: Part of a target's probability that all tokens share, as label smoothing has it.

    Raises:
        RuntimeError: A target is outside of the vocabulary.
        ReaderError: The gradient is to be differentiated; raised in backward.
    """
    with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
        return apply(_LinearCrossEntropy, hidden, weight, bias, _Loss(targets, ignore_index, dtype, bend, smoothing))


class _Loss(NamedTuple):
    """What is lost of logits; see `linear_cross_entropy_sum`."""

    targets: Tensor
    ignore_index: int
    dtype: torch.dtype
    bend: Bend
    smoothing: float


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: _Loss
    ) -> Tensor:
        scale = FLOAT16_SCALE if loss.dtype is torch.float16 else 1.0
        found: list[Tensor | None] = [torch.zeros_like(hidden, dtype=loss.dtype)]
        for tensor, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True):
            found.append(torch.zeros_like(tensor, dtype=torch.float32) if tensor is not None and needed else None)
        with torch.autocast(autocast_device(hidden), enabled=False):
            cast_bias = None if bias is None else bias.to(loss.dtype)
            total = _accumulate(hidden, weight.to(loss.dtype), cast_bias, loss, found, scale)
        ctx.save_for_backward(*found)
        ctx.scale = scale
        ctx.counts = (loss.targets != loss.ignore_index).any()
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # The mean of no losses is NaN, and yet has no gradient in torch.
        factor = torch.where(ctx.counts, gradient / ctx.scale, 0.0)
        found = [
            (tensor * factor).to(dtype) if needed else None
            for tensor, dtype, needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad, strict=False)
        ]
        return (*found, None)


def _accumulate(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: _Loss, gradients: list[Any], scale: float
) -> Tensor:
    """Returns the sum of losses; adds `scale` times the gradients of hidden states, weight and bias to those given."""
    of_hidden, of_weight, of_bias = gradients
    targets, ignore_index, _, bend, smoothing = loss
    live, ignored = targets != ignore_index, None
    if is_capturing():  # a CUDA graph has the same rows each time, with a target or without
        rows, targets = torch.arange(len(targets), device=targets.device), torch.where(live, targets, 0)
        ignored = ~live.unsqueeze(1)
    else:
        rows = live.nonzero().squeeze(1)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    most = max(1, CHUNK_BYTES // (4 * len(weight)))
    # Equal chunks: a short one at the end would read all of the weight for little.
    parts = rows.tensor_split(-(-len(rows) // most)) if len(rows) else ()
    longest = max(map(len, parts), default=0)
    all_scores = torch.empty(longest, len(weight), dtype=weight.dtype, device=weight.device)
    all_logs = torch.empty_like(all_scores, dtype=torch.float32)
    all_bent = torch.empty_like(all_logs) if bend != STRAIGHT else all_scores
    for part in parts:
        scores, logs = all_scores[: len(part)], all_logs[: len(part)]
        states = hidden.index_select(0, part).to(weight.dtype)
        target = targets.index_select(0, part).unsqueeze(1)
        if bias is None:
            torch.mm(states, weight.t(), out=scores)
        else:
            torch.addmm(bias, states, weight.t(), out=scores)
        bent = _bent(scores, all_bent[: len(part)], bend) if bend != STRAIGHT else scores
        torch.log_softmax(bent, -1, dtype=torch.float32, out=logs)
        if ignored is not None:
            logs.masked_fill_(ignored.index_select(0, part), 0.0)
        total -= (1.0 - smoothing) * logs.gather(1, target).sum()
        if smoothing:
            total -= smoothing * logs.mean(1).sum()
        # The gradient of the logits, in the memory of the scores.
        probabilities = logs.exp_()
        probabilities.scatter_add_(1, target, probabilities.new_full(target.shape, smoothing - 1.0))
        if smoothing:
            probabilities.sub_(smoothing / len(weight))
        if bend != STRAIGHT:
            probabilities.mul_(_slope_of(bent, bend))
        if ignored is not None:
            probabilities.masked_fill_(ignored.index_select(0, part), 0.0)
        slopes = scores.copy_(probabilities if scale == 1.0 else probabilities.mul_(scale))
        of_hidden.index_copy_(0, part, slopes @ weight)
        if of_weight is not None and of_weight.dtype is slopes.dtype:
            of_weight.addmm_(slopes.t(), states)
        elif of_weight is not None:  # chunks are summed in float32
            of_weight += slopes.t() @ states
        if of_bias is not None:
            of_bias.add_(slopes.sum(0, dtype=torch.float32))
    return total


def _bent(scores: Tensor, out: Tensor, bend: Bend) -> Tensor:
    """Returns the logits of scores, in `out`."""
    out.copy_(scores).mul_(bend.scale)
    return out if bend.limit is None else out.tanh_().mul_(bend.limit)


def _slope_of(bent: Tensor, bend: Bend) -> Tensor | float:
    """Returns the derivative of logits by scores, in the memory of the logits."""
    if bend.limit is None:
        return bend.scale
    # limit * scale * (1 - tanh**2), where the logits are limit * tanh
    return bent.square_().mul_(-bend.scale / bend.limit).add_(bend.scale * bend.limit)


def _itself(tensor: Tensor) -> Tensor:
    return tensor
