"""The model inside of what wraps it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
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

_FABRIC = "_FabricModule"
"""Class of what `lightning.fabric` and `lightning_fabric` make of a model, by name: importing one takes seconds."""

_ASKS_FOR_BACKWARD = "_register_backward_hook"

_REDIRECTION = f"{_FABRIC}._redirection_through_forward"


def unwrap_model(model: nn.Module) -> nn.Module:
    """Returns the model inside of torch.compile, DistributedDataParallel and Lightning Fabric.

    Raises:
        ConfigError: It is no model.
        UnsupportedDeviceError: It is in a DataParallel.
    """
    _check_model(model)
    *_, inner = _layers(model)
    return inner


def alone(model: nn.Module) -> Callable[..., Any]:
    """Returns what calls the model inside, which waits for no other process, in the precision that Fabric gives it.

    Fabric's own call would ask for `Fabric.backward`, and that trains.
    """
    inner: Any = unwrap_model(model)
    for wrapper in _fabric_layers(model):
        inner = partial(_in_precision, wrapper, inner)
    return inner


@contextmanager
def any_backward(model: nn.Module) -> Generator[None]:
    """Has Fabric not ask for `Fabric.backward` where the model is called inside, for a gradient that trains nothing."""
    wrappers = _fabric_layers(model)
    for wrapper in wrappers:
        vars(wrapper)[_ASKS_FOR_BACKWARD] = _as_it_is  # set by `setattr`, it would be an attribute of the model inside
    try:
        yield
    finally:
        for wrapper in wrappers:
            vars(wrapper).pop(_ASKS_FOR_BACKWARD, None)


def is_redirected(model: nn.Module) -> bool:
    """Says whether Fabric calls another method now, such as training_step, by way of the next call of the model."""
    forwards = (vars(wrapper.module).get("forward") for wrapper in _fabric_layers(model))
    return any(getattr(forward, "__qualname__", "").startswith(_REDIRECTION) for forward in forwards)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yields a model and what it wraps, one inside of the other."""
    inner: nn.Module | None = model
    while inner is not None:
        if isinstance(inner, DataParallel):
            raise UnsupportedDeviceError(
                "torch.nn.DataParallel runs its threads without saved-tensor hooks. Start one process for each GPU: "
                "torchrun --nproc-per-node or accelerate launch"
            )
        yield inner
        if isinstance(inner, DistributedDataParallel):
            inner = inner.module
        elif isinstance(inner, torch.jit.ScriptModule):
            return
        else:
            wrapped = "_forward_module" if type(inner).__name__ == _FABRIC else "_orig_mod"
            inner = vars(inner)["_modules"].get(wrapped)


def _fabric_layers(model: nn.Module) -> list[Any]:
    return [layer for layer in _layers(model) if type(layer).__name__ == _FABRIC]


def _in_precision(wrapper: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    precision = wrapper._strategy.precision
    args, kwargs = precision.convert_input((args, kwargs))
    with precision.forward_context():
        return precision.convert_output(call(*args, **kwargs))


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _check_model(model: object) -> None:
    if isinstance(model, nn.Module):
        return
    given = shown(model) if isinstance(model, str | int | None | type) else type(model).__name__
    kinds = [(kind.__module__.partition(".")[0], kind.__name__) for kind in inspect.getmro(type(model))]
    load = "make or load one, and give that"
    if isinstance(model, str):
        load += f": AutoModelForSequenceClassification.from_pretrained({given}) loads one with a classifier"
    found = next((_INSTEAD[kind] for kind in kinds if kind in _INSTEAD), load)
    raise ConfigError(f"a model is a torch.nn.Module, got {given}; {found}")
