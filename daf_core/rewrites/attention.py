"""Attention of transformers with dropout on a CPU: autograd keeps a mask of one byte and no probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from daf_core.autograd.functions import apply, once_differentiable
from daf_core.model.forward_patch import ForwardPatch
from daf_core.rewrites.base import Undo, is_bare

CHUNK_BYTES = 4 << 20
"""Scores that are computed at once, in float32: they stay in cache from one operator to the next. Forward and backward
of causal 2 x 12 x 512 x 64 take 107 to 117 ms on a core with 1 to 16 MB, 50 ms of it for random numbers; torch 155."""

QUERIES = 128
"""Queries that are computed at once. Causal ones skip the keys behind the last of them: with 256, which skip fewer,
that takes 121 to 129 ms."""


_DROPOUTS = ("attn_pdrop", "attention_probs_dropout_prob", "attention_dropout")
"""What transformers' configurations call the dropout of attention probabilities."""


class _Block(NamedTuple):
    """A row of the batch and some of its heads, queries and keys, as an index."""

    row: int
    heads: slice
    queries: slice
    keys: slice

    @property
    def seen(self) -> tuple[int, slice, slice]:
        return self.row, self.heads, self.keys


class _Settings(NamedTuple):
    """How scores become probabilities."""

    dropout: float
    causal: bool  # without keys behind the query's place
    scale: float  # factor on the scores


def dropped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Returns what `torch.nn.functional.scaled_dot_product_attention` returns, with the same random numbers.

    Torch computes it there in several operators, and autograd keeps the probabilities, the factors of dropout and their
    products. Here the probabilities are computed again in backward, one chunk of heads at a time. Arguments are those
    of torch's function. None where torch has a kernel that keeps little itself, or where types and shapes do not suit.
    """
    tensors = (query, key, value)
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors) and not enable_gqa
    if not recorded or not 0.0 < dropout_p < 1.0 or not _fits(query, key, value, attn_mask, is_causal):
        return None
    settings = _Settings(dropout_p, is_causal, 1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
    return apply(_DroppedAttention, query, key, value, mask, settings)


class _Attention(TorchFunctionMode):
    """Answers calls of ``scaled_dot_product_attention`` inside."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        result = dropped_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is None else result


def drops_attention(module: nn.Module) -> bool:
    """Whether a module is an attention of transformers that calls torch's on a CPU, with dropout."""
    config: Any = getattr(module, "config", None)
    if "attention" not in type(module).__name__.lower() or not is_bare(module):
        return False
    inner = [type(child).__name__.lower() for child in module.modules() if child is not module]
    if getattr(config, "_attn_implementation", None) != "sdpa" or any("attention" in name for name in inner):
        return False
    drops = any(isinstance(rate := getattr(config, name, None), float) and 0.0 < rate < 1.0 for name in _DROPOUTS)
    return drops and all(parameter.device.type == "cpu" for parameter in module.parameters())


def rewrite_attention(module: nn.Module) -> Undo:
    """Makes a module that `drops_attention` compute without keeping its probabilities; returns what undoes it."""
    mode = _Attention()

    def around(forward: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if not module.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        with mode:
            return forward(*args, **kwargs)

    return ForwardPatch(module, around).remove


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> bool:
    tensors = (query, key, value)
    plain = all(type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.dim() == 4 for tensor in tensors)
    if not plain or any(tensor.dtype is not torch.float32 for tensor in tensors) or torch.is_autocast_enabled("cpu"):
        return False
    if causal and mask is not None:
        return False
    if mask is not None and (mask.dim() > 4 or mask.requires_grad or mask.dtype not in (torch.bool, torch.float32)):
        return False
    return query.shape[:2] == key.shape[:2] == value.shape[:2]


class _DroppedAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: _Settings
    ) -> Tensor:
        shape = (*query.shape[:3], key.shape[2])
        kept = torch.empty(shape, dtype=torch.bool, device=query.device).bernoulli_(1 - settings.dropout)
        # The memory order that torch gives its result: what follows merges the heads without a copy.
        result = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)
        for block in _blocks(shape, settings.causal):
            probabilities = _probabilities(query, key, mask, block, settings).mul_(_factors(kept[block]))
            result[block[:3]].baddbmm_(probabilities, value[block.seen], beta=0, alpha=1 / (1 - settings.dropout))
        ctx.save_for_backward(query, key, value, mask, kept)
        ctx.settings = settings
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, mask, kept = ctx.saved_tensors
        settings: _Settings = ctx.settings
        slopes = tuple(torch.zeros_like(tensor) for tensor in (query, key, value))
        for block in _blocks(kept.shape, settings.causal):
            factors, raised = _factors(kept[block]), gradient[block[:3]] * (1 / (1 - settings.dropout))
            probabilities = _probabilities(query, key, mask, block, settings)
            errors = torch.bmm(raised, value[block.seen].mT).mul_(factors)
            errors = torch.ops.aten._softmax_backward_data(errors, probabilities, -1, torch.float32)
            slopes[0][block[:3]].baddbmm_(errors, key[block.seen], alpha=settings.scale)
            slopes[1][block.seen].baddbmm_(errors.mT, query[block[:3]], alpha=settings.scale)
            slopes[2][block.seen].baddbmm_(probabilities.mul_(factors).mT, raised)
        return (*slopes, None, None)


def _blocks(shape: tuple[int, ...], causal: bool) -> Iterator[_Block]:
    """Yields indices of the parts that are computed together."""
    batch, heads, queries, keys = shape
    together = max(1, CHUNK_BYTES // max(1, 4 * min(queries, QUERIES) * keys))
    for row, head, start in product(range(batch), range(0, heads, together), range(0, queries, QUERIES)):
        stop = min(start + QUERIES, queries)
        last = min(stop, keys) if causal else keys
        yield _Block(row, slice(head, head + together), slice(start, stop), slice(0, last))


def _probabilities(query: Tensor, key: Tensor, mask: Tensor | None, block: _Block, settings: _Settings) -> Tensor:
    empty, factor = query.new_empty(()), settings.scale
    scores = torch.baddbmm(empty, query[block[:3]], key[block.seen].mT, beta=0, alpha=factor)
    if settings.causal:
        ahead = scores[..., block.queries.start :]
        ahead.masked_fill_(ahead.new_ones(ahead.shape[-2:], dtype=torch.bool).triu_(1), -torch.inf)
    if mask is None:
        return torch.softmax(scores, -1)
    scores.add_(_bias(mask, block))
    probabilities, best = torch.softmax(scores, -1), scores.amax(-1, keepdim=True)
    # A query that sees no key has no probabilities, in torch as here.
    return probabilities.masked_fill_(best == -torch.inf, 0.0) if best.min() == -torch.inf else probabilities


def _bias(mask: Tensor, block: _Block) -> Tensor:
    """Returns what is added to a block's scores, for (heads or 1, queries or 1, keys or 1)."""
    places = (slice(block.row, block.row + 1), *block[1:])
    part = mask[tuple(slice(None) if size == 1 else place for size, place in zip(mask.shape, places, strict=True))][0]
    # Adding is five times as fast as filling, and the heads share what is added.
    if part.dtype is not torch.bool:
        return part
    return part.new_zeros(part.shape, dtype=torch.float32).masked_fill_(~part, -torch.inf)


def _factors(kept: Tensor) -> Tensor:
    """Returns zeros and ones in float32; torch converts bytes five times as fast as booleans."""
    return kept.view(torch.uint8).float()
