"""Training passes on device "meta": shapes, graphs and bytes as they would be, and no values."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from daf_core.autograd.torch_private import storage_id
from daf_core.memory.system.mortal import at_death
from daf_core.saved_tensors.backends import on_meta
from daf_kernels import Backend, PageMemory, Pages, PlaneLayout, Seed, TwoValues

aten = torch.ops.aten

_DRAWS = (aten.bernoulli_.float, aten.bernoulli_.Tensor)
"""What a dropout on a CPU draws its factors with, which have two values."""

_TRUE = (aten.all.default, aten.all.dim, aten.eq.Scalar, aten.eq.Tensor)
"""What is true of full rows: transformers ask whether all of a mask is, or whether it adds up to all tokens."""

USUAL = 1.0
"""What is told of a number with a fraction. It makes no attention sharp, and no softmax sure."""


@contextmanager
def without_values(drops_fused: bool = False) -> Generator[None]:
    """Lets models on device "meta" run training passes inside, and engines on them count bytes and store nothing.

    Operators are those of a CPU. Code that asks for values is told what holds for full rows: all of some values are
    true, none is special, and all rows of a loss count. Only one thread of a process may be inside.

    Args:
        drops_fused: Whether fused attention can drop probabilities, as that of GPUs can and that of CPUs cannot.
    """
    answers = _Answers()
    token = on_meta.set(SizesBackend(answers.has_drawn))
    attention = functional.scaled_dot_product_attention
    # Not by a mode for functions: torch has none in backward, where blocks run once more.
    functional.scaled_dot_product_attention = partial(_attention, attention, drops_fused)
    try:
        with answers:
            yield
    finally:
        functional.scaled_dot_product_attention = attention
        on_meta.reset(token)


class SizesBackend(Backend):
    """Kernels that compute nothing: the methods of `Backend` do nothing by themselves, and all values count as finite.

    `is_mask` says whether a tensor without values would have two of them alone.
    """

    def __init__(self, is_mask: Callable[[Tensor], bool]) -> None:
        self._is_mask = is_mask

    @override
    def relative_range(self, values: Tensor, layout: PlaneLayout) -> float:
        return 12.0  # that of evenly spread values

    @override
    def encode(
        self, values: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages, seed: Seed | None
    ) -> bool:
        return True

    @override
    def encode_slopes(self, values: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages) -> bool:
        return True

    @override
    def two_values(self, values: Tensor) -> TwoValues | None:
        return (0, 1) if values.dtype is torch.bool or self._is_mask(values) else None

    @override
    def encode_mask(self, values: Tensor, two: TwoValues, memory: PageMemory, pages: Pages) -> bool:
        return True


class _Answers(TorchDispatchMode):
    """Answers code that asks for values. It remembers the storages whose values are known, or would be two."""

    def __init__(self) -> None:
        super().__init__()
        self._true: dict[int, object] = {}
        self._drawn: dict[int, object] = {}

    def has_drawn(self, tensor: Tensor) -> bool:
        """Whether a tensor is what a dropout draws."""
        return storage_id(tensor) in self._drawn

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = args[0] if args else None
        if isinstance(asked, Tensor) and asked.is_meta:
            if func is aten._local_scalar_dense.default:
                return self._told(asked)
            if func is aten.equal.default:
                return True
            if func is aten.nonzero.default:
                return asked.new_empty((asked.numel(), asked.dim()), dtype=torch.long)
        result = func(*args, **(kwargs or {}))
        if func in _TRUE:
            self._remember(self._true, result)
        elif func in _DRAWS:
            self._remember(self._drawn, result)
        return result

    def _told(self, asked: Tensor) -> bool | float:
        if asked.dtype is torch.bool:
            return storage_id(asked) in self._true
        return USUAL if asked.is_floating_point() else 0

    def _remember(self, known: dict[int, object], result: Any) -> None:
        if isinstance(result, Tensor):
            number = storage_id(result)
            # Another storage may get the number when this one is gone.
            known[number] = at_death(result.untyped_storage(), int, number, lambda dead: known.pop(dead[1], None))


def _attention(
    unfused: Callable[..., Tensor],
    drops_fused: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Returns an attention's result by the operator that a CPU takes: on "meta" torch itself knows no fused one.

    It keeps what those of GPUs keep.
    """
    fits = query.is_meta and query.dim() == 4 and query.shape[-1] == value.shape[-1]
    if not fits or (dropout_p and not drops_fused) or (attn_mask is not None and attn_mask.requires_grad):
        return unfused(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
