"""Inputs that 8-bit layers of bitsandbytes keep for the gradient of a frozen weight, which nobody asks for.

Their functions keep them as attributes of their node, which no saved-tensor hook sees: an input then stays in memory as
it is, beside what DAF stores of it for an adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from daf_core.model.forward_patch import ForwardPatch
from daf_core.rewrites.base import Undo, qualified_name
from daf_core.rewrites.registry import uncompiled

_LAYER = "bitsandbytes.nn.modules.Linear8bitLt"

_KEPT = {
    "bitsandbytes.autograd._functions.MatMul8bitFp": ("A", None),
    "bitsandbytes.autograd._functions.MatMul8bitLt": ("tensors", (None, None, None)),
}
"""By function: the attribute of its node that holds the input, and what its backward takes in place of it."""


def release_frozen_inputs(model: nn.Module) -> Undo:
    """Has a model's 8-bit layers keep no input that only the gradient of a frozen weight reads.

    Gradients are the same, bit for bit. A layer whose weight is trained keeps its input.

    Returns:
        What undoes it, to be called once.
    """
    layers = [module for _, module in uncompiled(model) if _is_quantized(module)]
    patches = [ForwardPatch(layer, _releasing) for layer in layers]

    def undo() -> None:
        for patch in patches:
            patch.remove()

    return undo


def _is_quantized(module: nn.Module) -> bool:
    """Recognizes the layer by its name, also where it is a base: an import of bitsandbytes takes seconds."""
    return any(qualified_name(kind) == _LAYER for kind in type(module).__mro__)


def _releasing(forward: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    result = forward(*args, **kwargs)
    node: Any = result.grad_fn
    attribute, instead = _KEPT.get(qualified_name(getattr(node, "_forward_cls", None)), (None, None))
    if attribute is not None and not node.needs_input_grad[1] and hasattr(node, attribute):
        setattr(node, attribute, instead)
    return result
