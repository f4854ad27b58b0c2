"""What a trial sees and changes of the functions that a loss calls: weights of classes, and dropouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from daf_core.batch.loss_reduction import ClassMean
from daf_core.batch.rows import IGNORED, INTEGERS, named_tensors

_WEIGHT, _IGNORE_INDEX = 2, 4  # places of arguments of a cross entropy
_DROPOUTS = (
    torch.dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
)  # fmt: skip
_PROBABILITY = 4  # place of `dropout_p` among the arguments of an attention


class ClassWeights(TorchFunctionMode):
    """Notes the weights of classes, and the label that is ignored, of the cross entropies inside."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[tuple[Tensor, int]] = []

    def laws(self, batch: Any) -> frozenset[ClassMean]:
        """Returns the laws by which the classes in tensors of a batch may weigh its rows."""
        integers = [(name, each) for name, each in named_tensors(batch) if each.dtype in INTEGERS]
        return frozenset(
            ClassMean(name, id(weights), ignored, shifted, weights)
            for weights, ignored in self._found
            for name, each in integers
            for shifted in ([False, True] if each.dim() > 1 else [False])
        )

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss):
            weights = args[_WEIGHT] if len(args) > _WEIGHT else kwargs.get("weight")
            ignored = args[_IGNORE_INDEX] if len(args) > _IGNORE_INDEX else kwargs.get("ignore_index", IGNORED)
            self._note(weights, ignored)
        return func(*args, **kwargs)

    def _note(self, weights: Tensor | None, ignored: int) -> None:
        if weights is None or weights.requires_grad:  # what is learned has a gradient of its own in each part
            return
        if not any(number == ignored and torch.equal(known, weights) for known, number in self._found):
            self._found.append((weights, ignored))


class WithoutDropout(TorchFunctionMode):
    """Leaves out dropouts, also those of attentions, inside; those of recurrent layers and custom ones stay."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention and len(args) > _PROBABILITY:
            args = (*args[:_PROBABILITY], 0.0, *args[_PROBABILITY + 1 :])
        elif func is F.scaled_dot_product_attention:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)
