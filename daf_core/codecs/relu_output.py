"""The result of a ReLU, with exact zeros."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from daf_core.autograd.torch_private import skip_nodes
from daf_core.codecs.base import EncodeContext, StoredActivation, encode_first
from daf_core.codecs.relu_signs import RELU, ReluSignsActivation
from daf_core.codecs.saved_tensor import VIEWS, SavedTensor, TensorKind
from daf_core.readers.table import Reading

_MOVES = VIEWS | {"CloneBackward0", "PermuteBackward0", "SliceBackward0", "TransposeBackward0"}
"""Nodes between a ReLU and a product that change no value, as in an attention with ReLUs. Where all keys or queries are
zero its gradient is divided by next to nothing, and only zeros cancel that."""


class ReluOutputActivation(StoredActivation):
    """Codes of the result of a ReLU, or a recipe for its argument, and the exact signs."""

    name: ClassVar[str] = "rectified"

    def __init__(self, signs: ReluSignsActivation, values: StoredActivation) -> None:
        self._signs = signs
        self.values = values  # values at any precision
        self.readable_by_any_op = values.readable_by_any_op

    @override
    @classmethod
    def accepts(cls, saved: SavedTensor) -> bool:
        if saved.form is not TensorKind.LOSSY or saved.site.op not in _MOVES:
            return saved.form is TensorKind.LOSSY and saved.site.op == RELU
        made = skip_nodes(saved.node, _MOVES)
        return made is not None and made.name() == RELU

    @override
    @classmethod
    def encode(cls, saved: SavedTensor, ctx: EncodeContext) -> StoredActivation | None:
        """Takes signs, and values in the form of the next lossy codec; values alone where some are negative."""
        signs = None if ctx.sources is None else ctx.sources.signs_of(saved)
        if signs is None and ctx.values.min() >= 0:
            signs = ReluSignsActivation.pack(ctx.values, ctx.pager, ctx.backend, saved.version)
        following = [codec for codec in ctx.codecs[ctx.codecs.index(cls) + 1 :] if codec.lossy]
        values = encode_first(following, saved, ctx)
        return values if values is None or signs is None else cls(signs, values)

    @override
    def serves(self, reading: Reading) -> bool:
        return self.values.serves(reading)

    @override
    def decode_into(self, out: Tensor) -> None:
        self.values.decode_into(out)  # before the bits are brought back: a budget may have no room for both at once
        self._signs.rectify(out)
