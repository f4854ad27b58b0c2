"""The attention modules of transformers whose probabilities autograd need not keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from daf_core.model.forward_patch import ForwardPatch
from daf_core.rewrites.attention import dropped_attention
from daf_core.rewrites.base import Undo, is_bare

_DROPOUTS = ("attn_pdrop", "attention_probs_dropout_prob", "attention_dropout")
"""What transformers' configurations call the dropout of attention probabilities."""


class _Attention(TorchFunctionMode):
    """Answers calls of ``scaled_dot_product_attention`` inside."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        result = dropped_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is None else result


def drops_attention(module: nn.Module) -> bool:
    """Whether a module is an attention of transformers that calls torch's on a CPU, with dropout."""
    config: Any = getattr(module, "config", None)
    if "attention" not in type(module).__name__.lower() or not is_bare(module):
        return False
    if getattr(config, "_attn_implementation", None) != "sdpa" or not _is_innermost(module):
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


def _is_innermost(module: nn.Module) -> bool:
    inner = [type(child).__name__.lower() for child in module.modules() if child is not module]
    return not any("attention" in name for name in inner)
