"""Where an operator saves a tensor: a name by which the next forward pass knows who reads what."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint

from daf_core.autograd.functions import apply
from daf_core.autograd.sites import ModuleCall
from daf_core.autograd.torch_compile import notice_graph
from daf_core.autograd.torch_private import MODULE_CALLS, module_calls, running_module
from daf_core.readers.table import CHECKPOINT, Kind, Reading, reading_of_function
from daf_core.readers.watch import unwatched

_CHECKPOINT = checkpoint.__file__
_CHECKPOINTS = (checkpoint.CheckpointFunction, getattr(checkpoint, "_NoopSaveInputs", None))
"""Functions that save the inputs of checkpoints: the second, of those that are not reentrant, up to torch 2.11."""

_WRITES_LATE = frozenset({"rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_"})
"""Operators that write what they have saved: a randomized ReLU saves its noise, and fills it then. By torch 2.13's
schemas no other operator that can be differentiated writes an argument that is neither its result nor a buffer."""

LINEAR: CodeType = nn.Linear.forward.__code__
"""Code of the function that saves the input of a linear layer."""

DROPOUT: CodeType = functional.dropout.__code__
"""Code of the function that saves the mask of a dropout, also that of a module."""

ENCLOSING = 3
"""Modules around a function whose inputs are looked at: a linear layer, an adapter that has it, and what has that."""

_APPLY: tuple[CodeType | None, ...] = (
    getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None),
    apply.__code__,
)
"""Who calls a ``torch.autograd.Function``. From torch 2.14 on its own is written in C, and has no frame."""


_EXPERTS = re.compile(r"expert|router|gating|^(sparse)?moe|moe(block|layer|mlp)?$", re.IGNORECASE)
"""Classes of modules with experts. That of a family of models tells nothing: a GraniteMoeHybrid may have none."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_JUMPING = re.compile(
    r"^((p|r|leaky_?)?relu6?|selu|hard(tanh|swish)|(hard|soft)shrink|threshold)_?$|^(adaptive_?)?max_?pool",
    re.IGNORECASE,
)
"""Classes of modules, and functions that modules call, whose slope jumps."""


class _Parts(NamedTuple):
    """What the modules inside of one do with a small error of its input."""

    choose: bool  # whether they send it to other experts, or have other statistics of a batch
    jump: bool  # whether functions have another slope


_parts = WeakKeyDictionary[nn.Module, _Parts]()


class Place(NamedTuple):
    """A place in the program at which autograd saves a tensor.

    A site would be too little: a branch that is taken in a later step may save there for another operator.
    """

    module: str  # qualified name of the innermost module whose forward is running
    op: str  # name of the autograd node that made the tensor, or "leaf"
    # Addresses of the code of the two innermost Python functions; 0 for what calls a module's forward.
    codes: tuple[int, int]
    instructions: tuple[int, int]  # where they are
    # Number of the save at this place, within the call of the module: C++ may make several nodes there, and a loop or a
    # helper may come there again.
    save: int


class Places:
    """Names places. It keeps the codes of functions alive whose addresses are in names."""

    def __init__(self) -> None:
        self._codes: dict[int, CodeType] = {}

    def name(self, frame: FrameType | None, call: ModuleCall, op: str) -> Place:
        """Names the place of the next save; `frame` is the innermost function that is running, but for DAF's."""
        inner = calling_function(unwatched(frame))
        outer = None if inner is None else calling_function(unwatched(inner.f_back))
        codes = (0 if inner is None else self._code(inner.f_code)), (0 if outer is None else self._code(outer.f_code))
        instructions = inner.f_lasti if inner else 0, outer.f_lasti if outer else 0
        save = call.saved_at[codes, instructions] = call.saved_at.get((codes, instructions), -1) + 1
        return Place(call.name, op, codes, instructions, save)

    def _code(self, code: CodeType) -> int:
        address = id(code)
        self._codes.setdefault(address, code)
        return address


def calling_function(frame: FrameType | None) -> FrameType | None:
    """Returns the function that has called another one, where `frame` has; None where that is a module's forward."""
    return None if frame is None or frame.f_code in MODULE_CALLS else frame


def is_checkpoint(frame: FrameType | None) -> bool:
    """Says whether a checkpoint is saving its inputs, where `frame` is the innermost function: no node does."""
    return frame is not None and frame.f_code.co_filename == _CHECKPOINT


def needs_exact_input(module: nn.Module) -> bool:
    """Says whether a small error of a module's input is no small error of what is computed from it.

    Rows may go to other experts. With statistics of batches, ResNets had a larger gradient error from inputs in 8 bits
    than from everything in 4 (.0201 against .0180), and MobileNetV2 one of .31.
    """
    return _parts_of(module).choose


def _parts_of(module: nn.Module) -> _Parts:
    found = _parts.get(module)
    if found is None:
        inside = list(module.modules())
        chooses = any(_EXPERTS.search(type(each).__name__) or isinstance(each, BATCH_NORMS) for each in inside)
        found = _parts[module] = _Parts(chooses, any(map(_jumps, inside)))
    return found


def _jumps(module: nn.Module) -> bool:
    """Says whether a module is a function whose slope jumps, or calls one."""
    methods = [value for kind in type(module).__mro__ if kind is not nn.Module for value in vars(kind).values()]
    functions = [each for each in methods if isinstance(each, FunctionType) and not each.__name__.startswith("__")]
    held = [value.func if isinstance(value, partial) else value for value in vars(module).values()]
    names = [value.__name__ for value in held if isinstance(value, FunctionType | BuiltinFunctionType)]
    called = [name for function in functions for name in function.__code__.co_names]
    found = any(map(_JUMPING.search, (type(module).__name__, *names, *called)))
    return found or (isinstance(module, nn.ELU) and module.alpha != 1)


def reading_of_frame(frame: FrameType | None, model: nn.Module) -> Reading | None:
    """Returns what a function of Python, or a checkpoint, reads of what it saves, where `frame` is the innermost one.

    None where neither is saving. Graphs that were compiled without DAF are read exactly, as nobody looks into them.
    Where a slope jumps in what is checkpointed, an error of its input has it jump at random: in OPT with 8 bits it was
    that of everything in 4 (.059 against .068). So it takes twice the bits.
    """
    function = function_that_saves(frame)
    if function is None and not is_checkpoint(frame):
        return None
    if function is not None:
        notice_graph(function)
    reading = CHECKPOINT if function is None else reading_of_function(function)
    if function is not None and function not in _CHECKPOINTS:
        return reading
    # Where it is not known what is checkpointed, it is a part of what runs.
    around = _checkpointed(frame) or running_module(frame) or model
    if needs_exact_input(around):
        return replace(reading, kind=Kind.EXACT)
    return replace(reading, deviation=math.inf) if _parts_of(around).jump else reading


def _checkpointed(frame: FrameType | None) -> nn.Module | None:
    """Returns the module that a checkpoint runs, which is saving; None where that is a function of somebody else."""
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != (_CHECKPOINT, "checkpoint"):
        frame = frame.f_back if frame.f_code in _APPLY or is_checkpoint(frame) else None
    function = None if frame is None else frame.f_locals.get("function")
    while isinstance(function, partial):
        function = function.func
    found = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return found if isinstance(found, nn.Module) else None


def is_written_late(tensor: Tensor, frame: FrameType | None) -> bool:
    """Says whether an operator may write a tensor that it has saved, where `frame` is the innermost function.

    What a hook gets then is what the memory held before, and no version tells. So such a tensor is new, and the
    function names the operator that is running; one that calls it by another name is not recognized.
    """
    new = tensor.grad_fn is None and not tensor.requires_grad and tensor._version == 0 and tensor._base is None
    return new and may_write_late(frame)


def may_write_late(frame: FrameType | None) -> bool:
    """Says whether the function that saves names an operator that writes what it has saved."""
    function = unwatched(frame)
    return function is not None and not _WRITES_LATE.isdisjoint(function.f_code.co_names)


def runs(code: CodeType, frame: FrameType | None) -> FrameType | None:
    """Returns the innermost function, where `frame` is, if it has this code."""
    function = unwatched(frame)
    return function if function is not None and function.f_code is code else None


def input_of(code: CodeType, frame: FrameType | None) -> object:
    """Returns the input of a linear layer or a dropout whose function has this code, if it is the innermost one.

    Others are not asked for their variables: up to Python 3.12 that keeps all of them until the function ends.
    """
    function = runs(code, frame)
    return None if function is None else function.f_locals.get("input")


def inputs_of_modules(frame: FrameType | None) -> Iterator[object]:
    """Yields the inputs of the innermost modules that a function is part of."""
    for call in islice(module_calls(frame), ENCLOSING):
        yield from call["args"]
        yield from call["kwargs"].values()


def function_that_saves(frame: FrameType | None) -> type | None:
    """Returns the ``torch.autograd.Function`` that is saving, where `frame` is the innermost function."""
    return frame.f_locals.get("cls") if frame is not None and frame.f_code in _APPLY else None


def more_exact(known: Reading, reading: Reading) -> Reading:
    """Returns what serves both a reading that is known of a place and another one, which is the latest."""
    alike = known.bounds == reading.bounds
    if known.kind is reading.kind and (alike or known.kind is not Kind.APPROXIMATE):
        return reading if reading.deviation else replace(reading, deviation=known.deviation)
    if known.kind is reading.kind and None in (known.bounds, reading.bounds):
        return reading if known.bounds is None else known
    for kind in (Kind.NORMALIZED, Kind.PROBABILITIES):
        if alike and {known.kind, reading.kind} == {Kind.APPROXIMATE, kind}:
            special = known if known.kind is kind else reading
            return replace(special, deviation=max(known.deviation, reading.deviation))
    both = alike and known.takes_approximations and reading.takes_approximations
    return Reading(Kind.APPROXIMATE if both else Kind.EXACT, reading.reader)
