"""Functions with the names of fused layers of other libraries: they save what those save, and compute it in torch.

Those libraries' own run on GPUs alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _named(module: str) -> Any:
    """Has a function be taken for one of a library's module."""

    def name(function: type) -> type:
        function.__module__ = module
        return function

    return name


@_named("liger_kernel.ops.swiglu")
class LigerSiLUMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return functional.silu(a) * b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        """Writes into what was saved, as Liger's kernel does, which no version tells."""
        a, b = (each.detach() for each in ctx.saved_tensors)
        sigmoid = a.sigmoid()
        of_a, of_b = gradient * b * (sigmoid + a * sigmoid * (1 - sigmoid)), gradient * a * sigmoid
        a.data.copy_(of_a)
        b.data.copy_(of_b)
        return a, b


@_named("liger_kernel.ops.geglu")
class LigerGELUMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return functional.gelu(a, approximate="tanh") * b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        a, b = ctx.saved_tensors
        slope = torch.ops.aten.gelu_backward(gradient * b, a, approximate="tanh")
        return slope, gradient * functional.gelu(a, approximate="tanh")


@_named("liger_kernel.ops.rms_norm")
class LigerRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rstd = (x.square().mean(-1) + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd[..., None] * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        normalized, scaled = x * rstd[..., None], gradient * weight
        along = (scaled * normalized).mean(-1, keepdim=True)
        of_weight = (gradient * normalized).flatten(0, -2).sum(0)
        return rstd[..., None] * (scaled - normalized * along), of_weight, None


@_named("flash_attn.flash_attn_interface")
class FlashAttnFunc(torch.autograd.Function):
    """Attention over all keys; the layout is rows, tokens, heads, width."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        sums = scores.logsumexp(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", (scores - sums[..., None]).exp(), v)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        probabilities = (torch.einsum("bqhd,bkhd->bhqk", q, k) * scale - sums[..., None]).exp()
        of_v = torch.einsum("bhqk,bqhd->bkhd", probabilities, gradient)
        delta = (gradient * out).sum(-1).transpose(1, 2)[..., None]
        of_scores = probabilities * (torch.einsum("bqhd,bkhd->bhqk", gradient, v) - delta) * scale
        of_q, of_k = (
            torch.einsum(f"bhqk,b{a}hd->b{b}hd", of_scores, of) for a, b, of in (("k", "q", k), ("q", "k", q))
        )
        return of_q, of_k, of_v
