"""What DAF uses of torch's private interface, all of it, each with the reason. Tested against torch 2.10 to 2.15."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# Private by their underscore, and partly missing from torch's stubs: that is what this file is for.

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

Node = Any
"""A node of the autograd graph; torch has no type for the kinds that are looked at here."""

_RAW = "_raw_saved_"

TELLS_WHO_SAVES: bool = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")
"""Whether it can be seen which autograd node has saved a tensor; torch tells that from 2.10 on."""

HookPair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def innermost_hooks() -> HookPair | None:
    """Returns the pair of saved-tensor hooks that applies in this thread: torch has no public way to see others'."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def push_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Installs a pair in this thread; the context manager of torch would run Python code, which Ctrl-C can cut off."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def drop_innermost_hooks() -> None:
    """Takes the innermost pair off the stack, also one that its owner forgot to leave."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def tensors_of(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the parameters and the buffers of a model; those that modules share may come more than once.

    The generators of `nn.Module`, one inside the other for each level of modules, take ten times as long.
    """
    parameters: list[Tensor | None] = []
    buffers: list[Tensor | None] = []
    modules, known = [model], {model}
    for module in modules:  # which grows meanwhile
        if module._parameters:
            parameters += module._parameters.values()
        if module._buffers:
            buffers += module._buffers.values()
        for child in module._modules.values():
            if child is not None and child not in known:
                known.add(child)
                modules.append(child)
    return [each for each in parameters if each is not None], [each for each in buffers if each is not None]


class ForwardHooks:
    """A hook before a module's forward and one that is always called after it, which can be switched off and on.

    To register them anew takes ten times as long.
    With `stay` they stay on.
    """

    def __init__(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any], stay: bool) -> None:
        self._module, self._before, self._after, self.stay = module, before, after, stay
        self._handles = module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)

    @property
    def are_on(self) -> bool:
        """Whether they are called."""
        return self._handles[1].id in self._module._forward_hooks

    @property
    def stays(self) -> bool:
        """Whether they stay on: also beside others, which save before a forward or after it."""
        others = len(self._module._forward_pre_hooks) + len(self._module._forward_hooks) - 2 * self.are_on
        return self.stay or others > 0

    def turn(self, on: bool) -> None:
        """Switches them on or off; others that have come meanwhile are called later than they."""
        if on is self.are_on or (self.stays and not on):
            return
        module, (before, after) = self._module, (handle.id for handle in self._handles)
        places: list[tuple[int, Any, Any]] = [
            (before, self._before, module._forward_pre_hooks),
            (after, self._after, module._forward_hooks),
            (after, True, module._forward_hooks_always_called),
        ]
        for number, hook, hooks in places:
            if on:
                hooks[number] = hook
                hooks.move_to_end(number, last=False)
            else:
                hooks.pop(number, None)

    def remove(self) -> None:
        """Removes them for good."""
        for handle in self._handles:
            handle.remove()


_CALL = nn.Module._call_impl.__code__

MODULE_CALLS = frozenset([_CALL, *(each for each in _CALL.co_consts if isinstance(each, CodeType))])
"""Code that calls a module's forward: another function does where the module has hooks."""


def module_calls(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """Yields `self`, `args` and `kwargs` of the modules whose forward a function is part of, the innermost first."""
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals
        frame = frame.f_back


def running_module(frame: FrameType | None, among: Container[int] | None = None) -> nn.Module | None:
    """Returns the innermost module whose forward a function is part of; `among` has the `id` of those that count."""
    for call in module_calls(frame):
        if among is None or id(call["self"]) in among:
            return call["self"]
    return None


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Returns a module's own forward and backward hooks."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return [hook for hooks in kinds for hook in hooks.values()]


def take_forward_hooks(module: nn.Module, names: Collection[str]) -> Callable[[], None] | None:
    """Takes away a module's forward hooks that are functions of these names; returns what puts them back, if any.

    Meanwhile their places are kept: hooks run in order, and whoever has installed one may remove it.
    """
    hooks = module._forward_hooks
    taken = {key: hook for key, hook in hooks.items() if getattr(hook, "__name__", "") in names}
    if not taken:
        return None
    hooks.update(dict.fromkeys(taken, _nothing))
    return lambda: hooks.update({key: hook for key, hook in taken.items() if key in hooks})


def _nothing(*_: object) -> None:
    """Stands for a hook that was taken away."""


def call_after_backward(function: Callable[[], None]) -> None:
    """Has a function called at the end of the backward pass that this thread is running, as DistributedDataParallel."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_tracing() -> bool:
    """Whether ``torch.jit.trace`` is recording this thread: `torch.jit` does not export its name for it."""
    return torch._C._is_tracing()


def is_transforming() -> bool:
    """Whether this thread is inside of ``torch.func.grad``, `vmap` or the like."""
    return torch._C._are_functorch_transforms_active()


graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward pass that this thread is running, or `NO_TASK`."""

NO_TASK = -1


def in_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return graph_task() != NO_TASK


class _Again(threading.local):
    """The node that `run_again` is running in this thread."""

    node: Any = None


_again = _Again()


def running_node() -> Any:
    """Returns the autograd node whose backward this thread is running; None where there is none."""
    return torch._C._current_autograd_node() if _again.node is None else _again.node


def node_number(node: Any) -> int:
    """Returns the number of an autograd node among those that this thread has made: a name that keeps nothing alive."""
    return node._sequence_nr()


def saving_node() -> int:
    """Returns the number of the autograd node that is saving a tensor in this thread: it is the newest there is."""
    return torch._C._autograd._get_sequence_nr() - 1


@lru_cache(maxsize=1024)
def _fields_of(kind: type) -> tuple[str, ...]:
    return tuple(name.removeprefix(_RAW) for name in dir(kind) if name.startswith(_RAW))


def fields_of(node: Any) -> tuple[str, ...]:
    """Returns the names under which an autograd node of torch's own saves tensors."""
    return _fields_of(type(node))


def arguments_saved(node: str, operator: str) -> set[str]:
    """Returns the arguments of an operator that autograd nodes of a name save under the same name."""
    fields = dir(getattr(torch._C._functions, node, None))
    return {name for name in argument_names(operator) if f"_saved_{name}" in fields}


def field_of(node: Any, packed: object, unpack: Callable[[Any], Tensor]) -> str | None:
    """Returns the name under which an autograd node has saved what a pack hook returned; None where it has not."""
    return next((name for name in fields_of(node) if packed_for(node, name, unpack) is packed), None)


def skip_nodes(node: Any, names: Collection[str]) -> Any:
    """Returns the first autograd node from `node` on, towards the leaves, with none of the names; None at the end."""
    while node is not None and node.name() in names:
        node = node.next_functions[0][0]
    return node


def forward_operator(name: str) -> Any:
    """Returns one of torch's own operators, below autograd's functions that users call."""
    return getattr(torch.ops.aten, name).default


def argument_names(name: str) -> set[str]:
    """Returns the names of the arguments that an operator takes; none where this torch has no such operator."""
    try:
        return {argument.name for argument in forward_operator(name)._schema.arguments}
    except AttributeError:
        return set()


def packed_for(node: Any, name: str, unpack: Callable[[Any], Tensor]) -> object:
    """Returns what was put in place of an autograd node's saved tensor by the pack hook that belongs to `unpack`.

    None where the node saved nothing of that name, has released it, or other hooks or none were active. No unpack hook
    is called: that of a checkpoint would recompute a block.
    """
    try:
        saved: Any = getattr(node, _RAW + name, None)
        # In this order: torch 2.13 crashes where data is asked for without hooks.
        return saved.data if _gives(getattr(saved, "unpack_hook", None), unpack) else None
    except RuntimeError:
        return None


def all_packed(node: Any, unpack: Callable[[Any], Tensor]) -> list[object]:
    """Returns all that `packed_for` gives for an autograd node, also for what it saved as a list."""
    found: list[object] = []
    for name in fields_of(node):
        try:
            saved = getattr(node, _RAW + name)
            several = saved if isinstance(saved, tuple | list) else (saved,)
            found += [each.data for each in several if _gives(getattr(each, "unpack_hook", None), unpack)]
        except RuntimeError:  # released, or saved without hooks
            continue
    return found


def _gives(hook: Any, unpack: Callable[[Any], Tensor]) -> bool:
    """Whether an unpack hook is `unpack`, or gives it all that no compiled graph has saved."""
    return hook == unpack or (hook is not None and getattr(hook, "outside_of_graphs", None) == unpack)


def is_being_saved(node: Any, name: str) -> bool:
    """Whether an autograd node is saving its tensor of that name just now: a pack hook is not told who asks."""
    try:
        saved = getattr(node, _RAW + name, None)
        # Under hooks that is put in place first; without, the tensor itself is there.
        if saved is None:
            return False
        return saved.unpack_hook is None and getattr(node, f"_saved_{name}") is None
    except RuntimeError:  # it has released the tensor, or saved it without hooks and it was changed since
        return False


number_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Returns the address of the control block of a storage. When the storage is freed, another one may get it."""


def storage_id(tensor: Tensor) -> int:
    """Returns `number_of` the storage of a tensor."""
    return number_of(tensor.untyped_storage())


def version_counter(tensor: Tensor) -> Tensor:
    """Returns an empty tensor whose `_version` follows that of `tensor`, without keeping its memory alive.

    Setting ``data`` replaces all of a tensor but what autograd knows of it, its version among that.
    """
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def all_nodes(node: Any) -> list[Any]:
    """Returns the autograd node, if there is one, and all that follow it towards the leaves, each once."""
    pending = [] if node is None else [node]
    found = dict.fromkeys(pending)
    while pending:
        for following, _ in pending.pop().next_functions:
            if following is not None and following not in found:
                found[following] = None
                pending.append(following)
    return list(found)


def run_again(node: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns the gradients that an autograd node makes for its inputs; what it saved must still be there.

    Like autograd's engine it sums what was broadcast, and casts to the type of the input.
    """
    _again.node = node  # autograd does not say so of a node that is called: it may be inside of another
    try:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            together = _run_python_node(node, gradients)
        else:
            found = node(*gradients)
            together = found if isinstance(found, tuple) else (found,)
    finally:
        _again.node = None
    return [_as_input(gradient, *edge) for gradient, edge in zip(together, node.next_functions, strict=True)]


def _run_python_node(node: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Runs the backward of a ``torch.autograd.Function``: it expects zeros, and answers for arguments of any type."""
    full = [
        torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if gradient is None else gradient
        for gradient, meta in zip(gradients, node._input_metadata, strict=True)
    ]
    found = node.apply(*full)
    answers = found if isinstance(found, tuple) else (found,)
    wanted = iter([answer for answer, needed in zip(answers, node.needs_input_grad, strict=False) if needed])
    return [None if following is None else next(wanted, None) for following, _ in node.next_functions]


def _as_input(gradient: Tensor | None, node: Any, place: int) -> Tensor | None:
    if gradient is None or node is None:
        return None
    expected = node._input_metadata[place]
    if gradient.shape != expected.shape:
        gradient = gradient.sum_to_size(expected.shape)
    return gradient.to(expected.dtype)


def output_count(node: Any) -> int:
    """Returns the number of gradients that enter an autograd node."""
    return len(node._input_metadata)


def is_leaf_node(node: Any) -> bool:
    """Whether an autograd node accumulates the gradient of a leaf."""
    return node.name() == "torch::autograd::AccumulateGrad"


def leaf_of(node: Any) -> Tensor | None:
    """Returns the leaf whose gradient an autograd node accumulates; None for other nodes."""
    return node.variable if is_leaf_node(node) else None


def order_of(node: Any) -> int:
    """Returns a number that is larger for nodes that backward runs earlier; 0 for leaves."""
    return 0 if is_leaf_node(node) else node._sequence_nr()


def keeps_only_for(node: Any, unpack: Callable[[Any], Tensor]) -> bool:
    """Whether nothing that an autograd node saved goes through an unpack hook other than `unpack`."""
    for name in fields_of(node):
        saved = getattr(node, _RAW + name)
        several = saved if isinstance(saved, tuple | list) else (saved,)
        hooks = (getattr(each, "unpack_hook", None) for each in several)
        if not all(hook is None or _gives(hook, unpack) for hook in hooks):
            return False
    return True
