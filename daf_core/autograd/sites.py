"""Where an activation is saved: a name that is the same from step to step."""

from __future__ import annotations

import sys
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from daf_core.autograd.torch_compile import is_compiled, skip_dynamo
from daf_core.autograd.torch_private import (
    NO_TASK,
    ForwardHooks,
    graph_task,
    is_transforming,
    module_calls,
    saving_node,
)
from daf_core.state_checks import count as checked_count

_NORMALIZATIONS = (nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

NORMALIZED = 2
"""Results of normalizations that are remembered: those of a residual block and of its shortcut are added."""


class Site(NamedTuple):
    """The place an activation is saved at."""

    module: str  # qualified name of the innermost module whose forward is running; "" for the model or outside of it
    op: str  # name of the autograd node that made the tensor, or "leaf"
    save: int  # number of the save within this call of the module

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
        return cls(module, op, checked_count(save))


class Dropout(NamedTuple):
    """An operator that multiplies with a mask."""

    number: int  # of its node, as `node_number` gives it
    argument: weakref.ref[Tensor]
    dtype: torch.dtype  # that of the argument


_numbers = count()

_RECOMPUTES = CheckpointFunction.backward.__code__
"""Code that runs a checkpoint's function again, of those that are reentrant."""


class ModuleCall:
    """A running forward of a module."""

    __slots__ = ("kept", "largest", "name", "normalizes", "number", "saved_at", "saves")

    def __init__(self, name: str, kept: bool = False, normalizes: bool = False) -> None:
        self.number = next(_numbers)  # tells calls apart
        self.name = name  # qualified name of the module
        self.kept = kept  # whether its activations stay as they are
        self.normalizes = normalizes  # whether it is a normalization, by the name of its class
        self.saves = 0  # activations saved so far
        self.largest = 0  # elements of the largest of them
        self.saved_at: dict[object, int] = {}  # how many were saved by each instruction of the program, by its name

    def next_site(self, tensor: Tensor) -> Site:
        """Names the place at which `tensor` is being saved."""
        node = tensor.grad_fn
        site = Site(self.name, node.name() if node is not None else "leaf", self.saves)
        self.count(tensor.numel())
        return site

    def count(self, elements: int) -> None:
        """Counts a tensor with so many elements as saved."""
        self.saves += 1
        self.largest = max(self.largest, elements)


def _running() -> list[dict[str, Any]]:
    return [*module_calls(sys._getframe(1))]  # pyright: ignore[reportPrivateUsage]


def enclosing_backward() -> int:
    """Returns the backward pass in which a forward pass begins, as that of a cache of gradients; `NO_TASK` elsewhere.

    One that a checkpoint runs again is none of its own: what that saves is used at once.
    """
    task, frame = graph_task(), sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while task != NO_TASK and frame is not None:
        if frame.f_code is _RECOMPUTES:
            return NO_TASK
        frame = frame.f_back
    return task


class ModuleScopes(threading.local):
    """Follows which module's forward is running, in each thread.

    Attributes:
        begun: Names of the modules whose forward has begun since this was emptied, of those that are followed in each
            pass; the oldest first.
        dropout: The latest one, if its argument was unchanged.
    """

    def __init__(self) -> None:
        self._calls: list[ModuleCall] | None = None
        self._unhooked = self._outside = 0
        self._backward = NO_TASK  # the backward pass in which this forward pass has begun, as one of a gradient cache
        self._followed: Mapping[int, Followed] = {}
        self._kept: Mapping[str, bool] = {}
        self._normalized: deque[weakref.ref[Tensor]] = deque(maxlen=NORMALIZED)
        self.begun: list[str] = []
        self.dropout: Dropout | None = None

    def __reduce__(self) -> tuple[type[ModuleScopes], tuple[()]]:
        """Copies as a new one: a copy of the model, whose hooks hold this, is followed by nobody."""
        return type(self), ()

    def start(self, kept: Mapping[str, bool] = MappingProxyType({})) -> None:
        """Begins following, outside of any module; for `kept` see `Treatments`."""
        self._kept, self._unhooked, self._outside = kept, 0, len(_running())
        self._backward = enclosing_backward()
        self._calls = [ModuleCall("", kept.get("", False))]
        self.begun.clear()

    def stop(self) -> None:
        """Stops following; modules that an exception left open are forgotten."""
        self._calls = None

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is running that has begun since.

        It recomputes checkpointed blocks, whose activations are used at once.
        """
        return graph_task() != self._backward

    def catch_up(self, followed: Mapping[int, Followed], turned: Container[str]) -> None:
        """Finds the modules that have begun while nobody followed; `turned` are those that are followed from now on.

        Their forward ends without a word, as hooks that are registered in the middle of it are not called: until then
        they are looked for on the stack.
        """
        calls, self._followed = self._calls, followed
        assert calls is not None
        begun, in_forward = {call.name for call in calls}, {known.name for known in self._on_stack(in_forward=True)}
        del calls[1:]
        for known in self._on_stack():
            # One whose hooks were on and that has not begun is running others, before its forward or after it.
            if known.name in begun or (known.name in turned and known.name in in_forward):
                calls.append(self._begin(known.name, known.normalizes))
        self._unhooked = len(calls) - 1

    def _on_stack(self, in_forward: bool = False) -> list[Followed]:
        """Returns the modules that are running, without those whose forward has ended, if asked: others' hooks run."""
        running = _running()
        del running[len(running) - self._outside :]
        calls = [call for call in running if not in_forward or call.get("result") is None]
        found = [self._followed.get(id(call["self"])) for call in calls]
        return [known for known in reversed(found) if known is not None]

    def _let_go(self, begins: bool = False) -> None:
        """Forgets modules whose forward has ended without a word; `begins` says whether one is just beginning."""
        calls = self._calls
        if self._unhooked and calls is not None and len(calls) == 1 + self._unhooked:
            running = self._on_stack()
            pairs = zip(calls[1:], running[:-1] if begins else running, strict=False)
            self._unhooked = sum(1 for _ in takewhile(lambda pair: pair[0].name == pair[1].name, pairs))
            del calls[1 + self._unhooked :]

    def _begin(self, name: str, normalizes: bool) -> ModuleCall:
        assert self._calls is not None
        return ModuleCall(name, self._kept.get(name, self._calls[-1].kept), normalizes)

    @property
    def calls(self) -> list[ModuleCall]:
        """The running modules, the innermost last."""
        self._let_go()
        return self._calls or []

    @property
    def current(self) -> ModuleCall:
        """The innermost running module."""
        if self._unhooked:
            self._let_go()
        return self._calls[-1] if self._calls else ModuleCall("")

    def enter(self, name: str, normalizes: bool, stays: bool = False) -> None:
        """A module's forward begins; `stays` says whether it is followed in each pass."""
        calls = self._calls
        if calls is not None:
            self._let_go(begins=True)
            calls.append(self._begin(name, normalizes))
            if stays:
                self.begun.append(name)

    @property
    def normalized(self) -> list[Tensor]:
        """The latest results of normalizations that still exist, the newest first."""
        results = [reference() for reference in reversed(self._normalized)]
        return [result for result in results if result is not None]

    def drops(self, argument: object) -> None:
        """A dropout saves its mask."""
        self.dropout = None
        # Those of a `vmap` end with it.
        if type(argument) is Tensor and not argument._version and not is_transforming():
            self.dropout = Dropout(saving_node(), weakref.ref(argument), argument.dtype)

    def leave(self, normalized: object = None) -> None:
        """The innermost module's forward ended; `normalized` is its result, if others may follow from that."""
        calls = self._calls
        if calls is None:
            return
        if isinstance(normalized, Tensor):
            self._normalized.append(weakref.ref(normalized))
        if len(calls) > 1:
            calls.pop()
            self._unhooked = min(self._unhooked, len(calls) - 1)


class Followed(NamedTuple):
    """A module that is followed."""

    name: str  # its qualified name
    normalizes: bool  # whether it is a normalization, by the name of its class
    hooks: ForwardHooks


class ModuleFollower:
    """Keeps `ModuleScopes` up to date by hooks on all modules of a model, while somebody needs that.

    A module with hooks takes 5 us more for each call: 2.5 of the 27 ms of a step of RoBERTa with hidden size 64.

    What a graph of torch.compile saves belongs to the module that is compiled, or to the one that calls it. Inside
    there are no hooks, or, where the model is compiled from outside, hooks that do nothing.

    `normalized` says whether `ModuleScopes.normalized` is of use.
    """

    def __init__(self, model: nn.Module, scopes: ModuleScopes, normalized: bool = True) -> None:
        self.followed: dict[int, Followed] = {}  # the modules, by their `id`
        self.staying: set[str] = set()  # names of those that are followed in each pass
        self._following: set[int] = set()
        self._lock = threading.Lock()
        # Torch.compile looks at the number of a hook that is always called: with one for each, equal blocks are
        # compiled one by one.
        number = RemovableHandle.next_id
        for name, module in outside_of_graphs(model):
            RemovableHandle.next_id = number
            # What is known of a module now is not asked for at each call: there are as many calls as activations.
            normalizes = "norm" in type(module).__name__.lower()
            noted = normalized and isinstance(module, _NORMALIZATIONS)
            hooks = ForwardHooks(
                module, partial(_enter, scopes, name, normalizes, self.staying), partial(_leave, scopes, noted), noted
            )
            self.followed[id(module)] = Followed(name, normalizes, hooks)
            if noted:
                self.staying.add(name)

    def begin(self) -> set[str]:
        """Follows modules in a forward pass of this thread; returns the names of those that were not followed."""
        with self._lock:
            self._following.add(threading.get_ident())
            # Looked at rather than remembered: a measurement puts back what modules were before, their hooks too.
            turned = [each for each in self.followed.values() if not each.hooks.are_on]
            for each in turned:
                each.hooks.turn(True)
        return {each.name for each in turned}

    def end(self) -> None:
        """This thread's forward pass has ended."""
        self._following.discard(threading.get_ident())

    def stay(self, names: Container[str]) -> bool:
        """Follows the modules of these names for good; returns whether one of them was not before."""
        with self._lock:
            found = [each for each in self.followed.values() if each.name in names and not each.hooks.stay]
            for each in found:
                each.hooks.turn(True)
                each.hooks.stay = True
                self.staying.add(each.name)
        return bool(found)

    @contextmanager
    def following(self) -> Generator[None]:
        """Follows modules inside."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def rest(self) -> None:
        """Takes the hooks away where no thread needs them, but for those that stay."""
        with self._lock:
            first = next((each.hooks for each in self.followed.values() if not each.hooks.stays), None)
            if not self._following and first is not None and first.are_on:
                for each in self.followed.values():
                    each.hooks.turn(False)

    def close(self) -> None:
        """Removes all hooks."""
        for each in self.followed.values():
            each.hooks.remove()
        self.followed.clear()


def outside_of_graphs(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields modules with their names as `named_modules` does, but for those inside of a compiled one."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if is_compiled(module):
            inside.update(module.modules())
            inside.remove(module)
        if module not in inside:
            yield name, module


def _enter(
    scopes: ModuleScopes, name: str, normalizes: bool, staying: Container[str], _module: nn.Module, _inputs: object
) -> None:
    if not torch.compiler.is_compiling():
        scopes.enter(name, normalizes, name in staying)


def _leave(scopes: ModuleScopes, noted: bool, _module: nn.Module, _inputs: object, result: object) -> None:
    if not torch.compiler.is_compiling():
        scopes.leave(result if noted else None)


def is_own_hook(hook: Any) -> bool:
    """Whether a module's forward hook is one of `ModuleFollower`."""
    return getattr(hook, "func", hook) in (_enter, _leave)


skip_dynamo(_enter, _leave)
