"""One bit an element: whether the result of a ReLU is positive."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self, override

from daf_core.autograd.torch_private import is_being_saved
from daf_core.codecs.base import EncodeContext, PagedActivation, StoredActivation
from daf_core.codecs.saved_tensor import SavedTensor, TensorKind
from daf_core.memory.lease import Lease
from daf_core.memory.pager import Pager
from daf_kernels import Backend, bits_of_number, mask_pages

RELU = "ReluBackward0"
"""The autograd node of whose result the signs are kept."""


class ReluSignsActivation(PagedActivation):
    """All that the backward of a ReLU reads of its result; it decodes to 1 and 0.

    Codes alone lose it: half of the elements are exactly 0 and decode to a little more or less, which let gradients
    through at random (ResNet-18: an error of 4 times the gradient at 8 bits, and 0.004 with the bit).
    """

    name: ClassVar[str] = "signs"
    readable_by_any_op = False

    def __init__(self, pager: Pager, backend: Backend, version: int) -> None:
        super().__init__(pager)
        self._backend = backend
        self.version = version  # the tensor's version when its signs were taken
        # Recipe for the argument of the ReLU, where it follows from what is stored.
        self.argument: StoredActivation | None = None

    @override
    @classmethod
    def accepts(cls, saved: SavedTensor) -> bool:
        return saved.form is TensorKind.LOSSY and saved.site.op == RELU and is_being_saved(saved.node, "result")

    @override
    @classmethod
    def encode(cls, saved: SavedTensor, ctx: EncodeContext) -> Self:
        signs = cls.pack(ctx.values, ctx.pager, ctx.backend, saved.version)
        signs.argument = None if ctx.sources is None else ctx.sources.argument_of(saved)
        return signs

    @classmethod
    def pack(cls, values: Tensor, pager: Pager, backend: Backend, version: int) -> Self:
        """Takes the signs of `values`, none of which is negative.

        Raises:
            ActivationBudgetError: The bits do not fit in the budget.
        """
        stored = cls(pager, backend, version)
        with stored._new_pages(mask_pages(values.numel(), pager.pool.page_bytes)) as lease:
            backend.encode_nonzero(values, pager.pool, lease.pages)
        return stored

    def rectify(self, out: Tensor) -> None:
        """Makes elements zero, or positive where they are not, as the signs say."""
        with self.pager.reading(self.lease) as lease:
            self._backend.rectify(out, self.pager.pool, lease.pages)

    @override
    def _decode(self, out: Tensor, lease: Lease) -> None:
        self._backend.decode_mask(out, (0, _bits_of_one(out.dtype)), self.pager.pool, lease.pages)


@lru_cache(maxsize=8)
def _bits_of_one(dtype: torch.dtype) -> int:
    return bits_of_number(1.0, dtype)
