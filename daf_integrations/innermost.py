"""The model inside of what wraps it."""

from __future__ import annotations

import inspect

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from daf_core import ConfigError, UnsupportedDeviceError
from daf_core.errors import shown

_INSTEAD = {
    ("torch", "Optimizer"): "give the model that it trains; the optimizer stays as it is",
    ("torch", "DataLoader"): "give the model; what loads its batches stays as it is",
    ("accelerate", "Accelerator"): "give the model, before or after accelerator.prepare",
    ("transformers", "Trainer"): "give the Trainer callbacks=[DAFCallback(precision=4)]",
    ("lightning", "Trainer"): "give the Trainer strategy=DAFStrategy(precision=4)",
    ("pytorch_lightning", "Trainer"): "give the Trainer strategy=DAFStrategy(precision=4)",
}
"""What to do instead, by package and class of what was taken for a model."""


def innermost(model: nn.Module) -> nn.Module:
    """Returns the model inside of torch.compile and DistributedDataParallel.

    Raises:
        ConfigError: It is no model.
        UnsupportedDeviceError: It is in a DataParallel.
    """
    _refuse_others(model)
    while True:
        if isinstance(model, DataParallel):
            raise UnsupportedDeviceError(
                "torch.nn.DataParallel runs its threads without saved-tensor hooks. Start one process for each GPU: "
                "torchrun --nproc-per-node or accelerate launch"
            )
        inner = model.module if isinstance(model, DistributedDataParallel) else vars(model)["_modules"].get("_orig_mod")
        if inner is None:
            return model
        model = inner


def _refuse_others(model: object) -> None:
    if isinstance(model, nn.Module):
        return
    given = shown(model) if isinstance(model, str | int | None | type) else type(model).__name__
    kinds = [(kind.__module__.partition(".")[0], kind.__name__) for kind in inspect.getmro(type(model))]
    found = next((_INSTEAD[kind] for kind in kinds if kind in _INSTEAD), "make or load one, and give that")
    raise ConfigError(f"a model is a torch.nn.Module, got {given}; {found}")
