"""What all rewrites of operators share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from daf_core.autograd.sites import is_own_hook
from daf_core.autograd.torch_private import hooks_of
from daf_core.model.forward_patch import runs_own_forward

Undo = Callable[[], None]

_OF_ANY_MODULE = {*vars(nn.Module()), "forward"}


def qualified_name(thing: object) -> str:
    """Returns the module and the name of a class or function."""
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}"


def is_bare(module: nn.Module) -> bool:
    """Whether a module runs the forward of its class, and nobody looks on: no hooks but those of DAF."""
    return runs_own_forward(module) and not is_parametrized(module) and not is_watched(module)


def is_watched(module: nn.Module) -> bool:
    """Whether a module has hooks that are not DAF's."""
    return not all(map(is_own_hook, hooks_of(module)))


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes that a module has beside those of any module: its formula may depend on them."""
    return {name: value for name, value in vars(module).items() if name not in _OF_ANY_MODULE}


def autocast_device(tensor: Tensor) -> str:
    """Returns the kind of device whose autocast is that of a tensor; "meta" has none, and follows that of a CPU."""
    return "cpu" if tensor.is_meta else tensor.device.type
