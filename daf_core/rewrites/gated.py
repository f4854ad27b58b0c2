"""The gated product ``act(gate(x)) * up(x)``, of which autograd keeps the two factors' inputs and no activation.

Where blocks are recomputed, long rows go through a whole gated MLP in parts, each of which is recomputed once more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from daf_core.autograd.functions import apply, once_differentiable
from daf_core.model.forward_patch import ForwardPatch
from daf_core.model.recompute import in_recomputed_block
from daf_core.rewrites.base import Undo, is_bare, own_attributes

WIDTH, INNER, ROWS = 3, 5, 7  # sizes of the small layers with which a module's formula is checked
TOLERANCE = 1e-9  # largest difference in float64 of values and gradients
PART_BYTES = 32 << 20
"""Bytes of the result of one linear layer in a part, of which a backward pass has five at once."""

_CHILDREN = {"gate_proj", "up_proj", "down_proj", "act_fn"}  # what transformers calls the parts of a gated MLP


@dataclass(frozen=True)
class Gate:
    """An activation, and what returns the gradient of its input from that of the result, and the input."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


GATES = (
    Gate(functional.silu, torch.ops.aten.silu_backward),
    Gate(functional.gelu, torch.ops.aten.gelu_backward),
    Gate(partial(functional.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward, approximate="tanh")),
)
"""What the activation of a gated MLP may be."""


def gated_product(gate: Tensor, up: Tensor, form: Gate) -> Tensor:
    """Returns ``form.value(gate) * up`` for tensors of one shape and type; autograd saves `gate` and `up` alone."""
    return apply(_GatedProduct, gate, up, form)


def find_gate(module: nn.Module) -> Gate | None:
    """Returns the activation of a module that computes ``down(act(gate(x)) * up(x))``; None for all others.

    A copy of it is run with small layers in place of its own, in training and in evaluation, with random numbers of its
    own, so that nothing of that is left behind.
    """
    children = dict(module.named_children())
    if children.keys() != _CHILDREN or not is_bare(module) or not is_bare(children["act_fn"]):
        return None
    own_tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    if own_tensors or any(True for _ in children["act_fn"].parameters()):
        return None
    layers = {"gate_proj": _layer(WIDTH, INNER), "up_proj": _layer(WIDTH, INNER), "down_proj": _layer(INNER, WIDTH)}
    try:
        own = [_probe_copy(module, layers, training) for training in (True, False)]
    except Exception:  # whatever a stranger's module raises, it is none that takes a tensor alone
        return None

    def agrees(form: Gate) -> bool:
        gate, up, down = layers.values()
        other = _probe(lambda inputs: down(gated_product(gate(inputs), up(inputs), form)), layers)
        pairs = [pair for each in own for pair in zip(each, other, strict=True)]
        return all(a.shape == b.shape and torch.allclose(a, b, TOLERANCE, TOLERANCE) for a, b in pairs)

    return next(filter(agrees, GATES), None)


def rewrite_gated(module: nn.Module, form: Gate) -> Undo:
    """Makes a gated MLP save two tensors instead of three where autograd records it; returns what undoes it.

    As long as its activation and its attributes are those with which it was found to be one.
    """
    layers: Any = module
    known = _formula(module)

    def around(forward: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if kwargs or len(args) != 1 or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        formula = _formula(module)
        if formula.keys() != known.keys() or any(formula[name] is not value for name, value in known.items()):
            return forward(*args, **kwargs)
        parts = _parts(args[0], layers.gate_proj) if in_recomputed_block() else 1
        if parts == 1:
            return whole(args[0])
        tokens = args[0].tensor_split(parts, dim=-2)
        return torch.cat([checkpoint(whole, each, use_reentrant=False) for each in tokens], dim=-2)

    def whole(inputs: Tensor) -> Tensor:
        gate, up = layers.gate_proj(inputs), layers.up_proj(inputs)
        plain = type(gate) is Tensor and type(up) is Tensor and gate.dtype is up.dtype and gate.shape == up.shape
        fits = plain and gate.requires_grad and up.requires_grad
        return layers.down_proj(gated_product(gate, up, form) if fits else layers.act_fn(gate) * up)

    return ForwardPatch(module, around).remove


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, form: Gate) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(gate, up)
        ctx.form = form
        return form.value(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        return ctx.form.slope(gradient * up, gate), ctx.form.value(gate) * gradient, None


def _parts(inputs: Tensor, gate: Any) -> int:
    """Returns the number of parts of tokens in which no tensor of the width of `gate` is larger than `PART_BYTES`."""
    width = getattr(gate, "out_features", 0)
    if inputs.dim() < 2 or not isinstance(width, int):
        return 1
    size = inputs.numel() // max(inputs.shape[-1], 1) * width * inputs.element_size()
    return max(1, min(-(-size // PART_BYTES), inputs.shape[-2]))


def _layer(width: int, outputs: int) -> nn.Linear:
    """Returns a layer with weights of its own, for which no random number is drawn."""
    layer = nn.Linear(width, outputs, bias=False, device="meta", dtype=torch.float64).to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.copy_(_numbers(-2.0, 3.0, outputs, width).sin())
    return layer


def _numbers(first: float, last: float, rows: int, columns: int) -> Tensor:
    numbers = torch.linspace(first, last, rows * columns, dtype=torch.float64, device="cpu")
    return numbers.view(rows, columns)


def _formula(module: nn.Module) -> dict[str, object]:
    """Returns what the formula of a gated MLP depends on."""
    activation = module.get_submodule("act_fn")
    return {
        "act_fn": activation,
        **own_attributes(module),
        **{f".{k}": v for k, v in own_attributes(activation).items()},
    }


def _probe_copy(module: nn.Module, layers: dict[str, nn.Linear], training: bool) -> list[Tensor]:
    """Returns what `_probe` does of a copy of a module with other layers."""
    twin = copy.copy(module)
    vars(twin)["_modules"] = {"act_fn": copy.deepcopy(module.get_submodule("act_fn")), **layers}
    twin.train(training)
    with torch.random.fork_rng(devices=[]):
        return _probe(partial(type(module).forward, twin), layers)


def _probe(function: Callable[[Tensor], Tensor], layers: dict[str, nn.Linear]) -> list[Tensor]:
    """Returns values, and the gradients of inputs and weights."""
    inputs = _numbers(-4.0, 5.0, ROWS, WIDTH).requires_grad_()
    with torch.enable_grad():
        values = function(inputs)
        weights = [layer.weight for layer in layers.values()]
        return [values.detach(), *torch.autograd.grad(values.square().sum(), [inputs, *weights])]
