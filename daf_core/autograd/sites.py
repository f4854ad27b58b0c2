"""Where an activation is saved: a name that is the same from step to step."""

from __future__ import annotations

import threading
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from daf_core.autograd.torch_private import is_compiled, skip_dynamo
from daf_core.state_checks import count

_NORMALIZATIONS = (nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

NORMALIZED = 2
"""Results of normalizations that are remembered: those of a residual block and of its shortcut are added."""


class Site(NamedTuple):
    """The place an activation is saved at.

    Attributes:
        module: Qualified name of the innermost module whose forward is running; "" for the model or outside of it.
        op: Name of the autograd node that made the tensor, or "leaf".
        save: Number of the save within this call of the module.
    """

    module: str
    op: str
    save: int

    @property
    def number(self) -> int:
        """A number of 32 bits for the name, equal in every process."""
        return zlib.crc32(f"{self.module}/{self.op}/{self.save}".encode())

    @classmethod
    def from_state(cls, values: Sequence[Any]) -> Site:
        """Returns the site with these fields, as they are saved; a ValueError if they are something else."""
        module, op, save = values
        if not (isinstance(module, str) and isinstance(op, str)):
            raise ValueError(f"{values!r} names no site")
        return cls(module, op, count(save))


class ModuleCall:
    """A running forward of a module.

    Attributes:
        name: Qualified name of the module.
        kept: Whether they stay as they are.
        normalizes: Whether it is a normalization, by the name of its class.
        saves: Activations saved so far.
        largest: Elements of the largest of them.
        saved_at: How many were saved by each instruction of the program, by its name.
    """

    __slots__ = ("kept", "largest", "name", "normalizes", "saved_at", "saves")

    def __init__(self, name: str, kept: bool = False, normalizes: bool = False) -> None:
        self.name = name
        self.kept = kept
        self.normalizes = normalizes
        self.saves = 0
        self.largest = 0
        self.saved_at: dict[object, int] = {}

    def next_site(self, tensor: Tensor) -> Site:
        """Names the place at which `tensor` is being saved."""
        node = tensor.grad_fn
        site = Site(self.name, node.name() if node is not None else "leaf", self.saves)
        self.saves += 1
        self.largest = max(self.largest, tensor.numel())
        return site


class ModuleScopes(threading.local):
    """Follows which module's forward is running, in each thread."""

    def __init__(self) -> None:
        self._calls: list[ModuleCall] | None = None
        self._kept: Mapping[str, bool] = {}
        self._normalized: deque[weakref.ref[Tensor]] = deque(maxlen=NORMALIZED)

    def __reduce__(self) -> tuple[type[ModuleScopes], tuple[()]]:
        """Copies as a new one: a copy of the model, whose hooks hold this, is followed by nobody."""
        return type(self), ()

    def start(self, kept: Mapping[str, bool] = MappingProxyType({})) -> None:
        """Begins following, outside of any module; for `kept` see `Treatments`."""
        self._kept = kept
        self._calls = [ModuleCall("", kept.get("", False))]

    def stop(self) -> None:
        """Stops following; modules that an exception left open are forgotten."""
        self._calls = None

    @property
    def current(self) -> ModuleCall:
        """The innermost running module."""
        return self._calls[-1] if self._calls else ModuleCall("")

    def enter(self, name: str, normalizes: bool) -> None:
        """A module's forward begins.

        Args:
            name: Its qualified name.
            normalizes: Whether it is a normalization.
        """
        calls = self._calls
        if calls is not None:
            calls.append(ModuleCall(name, self._kept.get(name, calls[-1].kept), normalizes))

    @property
    def normalized(self) -> list[Tensor]:
        """The latest results of normalizations that still exist, the newest first."""
        results = [reference() for reference in reversed(self._normalized)]
        return [result for result in results if result is not None]

    def leave(self, normalized: object = None) -> None:
        """The innermost module's forward ended.

        Args:
            normalized: Its result, if it is a normalization that others may follow from.
        """
        calls = self._calls
        if calls is None:
            return
        if isinstance(normalized, Tensor):
            self._normalized.append(weakref.ref(normalized))
        if len(calls) > 1:
            calls.pop()


def follow_modules(model: nn.Module, scopes: ModuleScopes) -> list[RemovableHandle]:
    """Registers hooks on all modules that keep `scopes` up to date; returns the handles that remove them.

    What a graph of torch.compile saves belongs to the module that is compiled, or to the one that calls it. Inside
    there are no hooks, or, where the model is compiled from outside, hooks that do nothing.
    """
    handles: list[RemovableHandle] = []
    # Torch.compile looks at the number of a hook that is always called: with one for each, equal blocks are compiled
    # one by one.
    number = RemovableHandle.next_id
    for name, module in outside_of_graphs(model):
        RemovableHandle.next_id = number
        # What is known of a module now is not asked for at each call: there are as many calls as activations.
        normalizes, noted = "norm" in type(module).__name__.lower(), isinstance(module, _NORMALIZATIONS)
        handles.append(module.register_forward_pre_hook(partial(_enter, scopes, name, normalizes)))
        handles.append(module.register_forward_hook(partial(_leave, scopes, noted), always_call=True))
    return handles


def outside_of_graphs(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields modules with their names as `named_modules` does, but for those inside of a compiled one."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if is_compiled(module):
            inside.update(module.modules())
            inside.remove(module)
        if module not in inside:
            yield name, module


def _enter(scopes: ModuleScopes, name: str, normalizes: bool, _module: nn.Module, _inputs: object) -> None:
    if not torch.compiler.is_compiling():
        scopes.enter(name, normalizes)


def _leave(scopes: ModuleScopes, noted: bool, _module: nn.Module, _inputs: object, result: object) -> None:
    if not torch.compiler.is_compiling():
        scopes.leave(result if noted else None)


def is_own_hook(hook: Any) -> bool:
    """Whether a module's forward hook is one of `follow_modules`."""
    return getattr(hook, "func", hook) in (_enter, _leave)


skip_dynamo(_enter, _leave)
