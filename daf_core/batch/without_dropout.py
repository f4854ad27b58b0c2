"""Passes in training mode whose dropouts drop nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

_DROPOUTS = (
    torch.dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
)  # fmt: skip
_PROBABILITY = 4  # place of `dropout_p` among the arguments of an attention


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
