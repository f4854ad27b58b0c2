"""Not stored at all: what follows from other activations that are."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from daf_core.codecs.base import StoredActivation
from daf_core.codecs.raw import RawActivation

Source = StoredActivation | RawActivation
"""What an activation is derived from: the same number of elements, dense, in the same order."""


Unpack = Callable[[], Tensor]
"""Gives a small exact tensor."""


class ProductActivation(StoredActivation):
    """The result of a dropout: another activation times its mask.

    It is exact where the other one is; otherwise its error is the other one's, seen through the mask.
    """

    codec: ClassVar[str] = "product"

    def __init__(self, factor: Source, mask: Source) -> None:
        self._factor = factor
        self._mask = mask

    @override
    def decode_into(self, out: Tensor) -> None:
        _load(self._factor, out)
        mask = torch.empty_like(out)
        _load(self._mask, mask)
        out.mul_(mask)


class NormalizedActivation(StoredActivation):
    """The result of a layer normalization, from its input and the exact statistics that it saves.

    Lossy even where the input is exact: the operator itself rounds in another order.
    """

    codec: ClassVar[str] = "normalized"

    def __init__(self, source: Source, mean: Unpack, scale: Unpack, weight: Unpack, bias: Unpack) -> None:
        self._source = source
        self._mean, self._scale = mean, scale
        self._weight, self._bias = weight, bias

    @override
    def decode_into(self, out: Tensor) -> None:
        _load(self._source, out)
        weight, bias = self._weight(), self._bias()
        rows = out.view(-1, weight.numel()).float()  # as the operator: in 16 bits a difference may overflow
        rows.sub_(self._mean().view(-1, 1)).mul_(self._scale().view(-1, 1))
        torch.addcmul(bias.view(-1), rows, weight.view(-1), out=rows)
        if out.dtype is not rows.dtype:
            out.copy_(rows.view(-1))


def _load(source: Source, out: Tensor) -> None:
    if isinstance(source, RawActivation):
        out.copy_(source.unpack().view(-1))
    else:
        source.decode_into(out)
