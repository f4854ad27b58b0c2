"""The model inside of what wraps it."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from daf_core import UnsupportedDeviceError


def innermost(model: nn.Module) -> nn.Module:
    """Returns the model inside of torch.compile and DistributedDataParallel.

    Raises:
        UnsupportedDeviceError: It is in a DataParallel.
    """
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
