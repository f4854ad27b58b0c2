"""Fused attention, run again on what its query, key and value decode to.

Its backward takes the probabilities to be exp(scores - logsumexp), where the scores are those of the query and key that
it is given. Of decoded ones, and with the logsumexp of the true ones, they do not sum to 1, and where scores are sharp
they are off by orders of magnitude. The forward operator costs a third of attention's step, and gives a result and a
logsumexp that belong to what was decoded: backward then makes the exact gradient of attention at those values. Neither
has to be stored.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from daf_core.autograd.torch_private import Node, argument_names, arguments_saved, forward_operator

INPUTS = ("query", "key", "value")
"""Under these names all of them save what they are computed from."""


@dataclass(frozen=True)
class Kernel:
    """The forward operator of an autograd node.

    What the node does not save, such as slopes for each head, its backward does not know either: it is left at its
    default.

    Attributes:
        operator: Its name.
        logsumexp: The name under which the node saves that, which is the operator's second result.
        saved: Its arguments beside the inputs and the bias, with the names under which the node saves them.
        bias: The argument that is added to the scores; the node saves it under the same name. None where it has none.
        fixed: Arguments that are the same wherever there is a backward.
        drawn: The names under which the node saves where the random numbers of its dropout begin: two numbers of 64
            bits, seed and offset, together in the first or one in each. Empty where there is no dropout, or they are
            nobody's.
    """

    operator: str
    logsumexp: str
    saved: Mapping[str, str]
    bias: str | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    drawn: tuple[str, ...] = ()

    @property
    def results(self) -> tuple[str, str]:
        """The names under which the node saves what is computed."""
        return "output", self.logsumexp

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names under which the node saves its inputs, and the bias if it has one."""
        return INPUTS if self.bias is None else (*INPUTS, self.bias)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names under which the node saves its inputs and what is computed of them."""
        return (*self.inputs, *self.results)

    @property
    def arguments(self) -> set[str]:
        """All arguments that the operator is given."""
        return {*self.inputs, *self.saved, *self.fixed}


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_PLAIN = ("dropout_p", "is_causal", "scale")
_PACKED = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", *_PLAIN)
_SUMMED: dict[str, Any] = {"compute_log_sumexp": True}
_SILENT: dict[str, Any] = {"return_debug_mask": False}
_PHILOX = ("philox_seed", "philox_offset")

KERNELS: dict[str, Kernel] = {
    "ScaledDotProductFlashAttentionForCpuBackward0": Kernel(
        "_scaled_dot_product_flash_attention_for_cpu", "logsumexp", _same(*_PLAIN), "attn_mask"
    ),
    "ScaledDotProductFlashAttentionBackward0": Kernel(
        "_scaled_dot_product_flash_attention", "logsumexp", _same(*_PLAIN), None, _SILENT, ("rng_state", "unused")
    ),
    "ScaledDotProductEfficientAttentionBackward0": Kernel(
        "_scaled_dot_product_efficient_attention", "log_sumexp", _same(*_PLAIN), "attn_bias", _SUMMED, _PHILOX
    ),
    "ScaledDotProductCudnnAttentionBackward0": Kernel(
        "_scaled_dot_product_cudnn_attention", "logsumexp", _same(*_PLAIN), "attn_bias", _SUMMED | _SILENT, _PHILOX
    ),
    "ScaledDotProductFusedAttentionOverrideableBackward0": Kernel(  # of other makers, who draw as they like
        "_scaled_dot_product_fused_attention_overrideable", "logsumexp", _same(*_PLAIN), "attn_bias", _SILENT
    ),
    "FlashAttentionBackward0": Kernel(
        "_flash_attention_forward",
        "softmax_logsumexp",
        _same(*_PACKED, "window_size_left", "window_size_right"),
        None,
        _SILENT,
        ("rng_state", "unused"),
    ),
    "EfficientAttentionBackward0": Kernel(
        "_efficient_attention_forward",
        "logsumexp",
        {
            **_same("cu_seqlens_q", "cu_seqlens_k", "dropout_p", "custom_mask_type", "scale"),
            "max_seqlen_q": "max_seqlen_batch_q",
            "max_seqlen_k": "max_seqlen_batch_k",
        },
        "bias",
        _SUMMED,
        _PHILOX,
    ),
    "CudnnAttentionBackward0": Kernel(
        "_cudnn_attention_forward", "logsumexp", _same(*_PACKED), "attn_bias", _SUMMED | _SILENT, _PHILOX
    ),
}
"""By the name of the autograd node. The last three get the values of nested tensors, one behind the other."""


@lru_cache(maxsize=64)
def kernel_of(name: str) -> Kernel | None:
    """Returns what has to run again for an autograd node of this name; None where that is unknown.

    Unknown is what is no attention, and what this torch calls otherwise: its logsumexp and inputs have to stay as they
    are. An argument that this torch has added, such as the window of torch 2.15's, is given as the node saves it.
    """
    kernel = KERNELS.get(name)
    known = set() if kernel is None else argument_names(kernel.operator)
    if kernel is None or not kernel.arguments <= known:
        return None
    added = arguments_saved(name, kernel.operator) - kernel.arguments
    return replace(kernel, saved={**kernel.saved, **_same(*added)})


def can_attend_again(node: Node, device: torch.device) -> bool:
    """Says, before anything has to be computed, whether `attend_again` can give what an autograd node has computed.

    Args:
        node: Any node.
        device: Where its inputs are.
    """
    kernel = kernel_of(node.name())
    if kernel is None:
        return False
    return not dropout_of(node) or (bool(kernel.drawn) and device.type == "cuda")


def dropout_of(node: Node) -> float:
    """Returns the probability with which an attention has dropped."""
    return node._saved_dropout_p


class Draws:
    """Where the random numbers of a dropout begin, on their way to the host.

    Args:
        start: Seed and offset, of shape (2,) and type int64, on any device.
    """

    def __init__(self, start: Tensor) -> None:
        self._start = start.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream(start.device).record_event() if start.is_cuda else None

    @classmethod
    def of(cls, drawn: Sequence[Tensor]) -> Draws:
        """Returns those that an operator has given under the names of `Kernel.drawn`."""
        return cls(torch.cat([each.reshape(-1).view(torch.int64) for each in drawn])[:2])

    def arrived(self) -> Tensor:
        """Returns them, on the CPU, as soon as they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._start


def draws_of(node: Node) -> Draws | None:
    """Has copied what an attention has drawn from a device's generator; None where it has drawn nothing.

    To ask for it in backward waits for all that the device has been given to do until then.
    """
    kernel = KERNELS[node.name()]
    if not dropout_of(node):
        return None
    return Draws.of([_saved(node, name) for name in kernel.drawn])


def attend_again(node: Node, *inputs: Tensor | None, draws: Draws | None = None) -> dict[str, Tensor]:
    """Computes what an attention has saved of its results, for other inputs, with the same dropout.

    Random generators are then as they were before. The results have no graph: a fused attention has no second
    derivative.

    Args:
        node: Its autograd node, not released; `can_attend_again` has said yes of it.
        inputs: Query, key, value and, where the node knows one, the bias of the scores, such as a mask, or None: each
            with the shape, strides, type and device of the node's own.
        draws: Its `draws_of`, if that was asked for earlier.

    Returns:
        The result and the logsumexp, under the names that the node has for them.
    """
    kernel = kernel_of(node.name())
    assert kernel is not None
    arguments = {argument: _saved(node, name) for argument, name in kernel.saved.items()}
    arguments |= dict(zip(kernel.inputs, inputs, strict=True))
    with torch.no_grad():
        draws = draws or draws_of(node)
        with nullcontext() if draws is None else drawing_from(arguments["query"].device, draws):
            found = forward_operator(kernel.operator)(**arguments, **kernel.fixed)
    return dict(zip(kernel.results, found, strict=False))


def _saved(node: Node, name: str) -> Any:
    """Returns what a node has saved; a tensor comes through whatever hook has packed it, and not to be derived."""
    found = getattr(node, f"_saved_{name}")
    return found.detach() if isinstance(found, Tensor) else found


@contextmanager
def drawing_from(device: torch.device, draws: Draws) -> Generator[None]:
    """Has a GPU's generator, whose state are a seed and an offset, draw what an attention has drawn before, inside."""
    generator = torch.cuda.default_generators[device.index]
    state = generator.get_state()
    generator.set_state(draws.arrived().view(torch.uint8))
    try:
        yield
    finally:
        generator.set_state(state)
