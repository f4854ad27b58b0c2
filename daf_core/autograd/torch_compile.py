"""What DAF uses of torch.compile's private interface, each with the reason. Tested against torch 2.10 to 2.15."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import gc
import importlib
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C._dynamo import eval_frame

from daf_core.autograd.torch_private import is_tracing, is_transforming

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Gets a forward and its arguments, and returns what it returns."""


COMPILED = "a graph of torch.compile runs backward once, and saves other activations than the plain model"
"""Why compiled models are not measured."""

COMPILED_ON_IMPORT = "bitsandbytes.backends.default.ops", "bitsandbytes.backends.triton.kernels_optim"
"""Modules that hand functions to torch.compile when they are imported, to run them without gradients if ever.

PEFT imports the first wherever it is installed, and what knows whether anything is compiled must not take every program
with adapters for a compiled one: nothing would be replayed, and a step of the smallest RoBERTa took 1.4 times as long.
"""


NOT_IN_CUDA_GRAPHS = (torch.Tag.cudagraph_unsafe,)
"""Tags of operators that call Python, which the replay of a CUDA graph does not: Inductor cuts the graph there."""

_GRAPHS = "torch._functorch._aot_autograd.graph_compile"
"""The module that inlines hooks into graphs."""

_WITHIN = "_torchdynamo_orig_backend"
"""What a compiler calls, down to the backend."""


def skip_dynamo(*functions: Any) -> None:
    """Keeps torch.compile from compiling functions, and what they call, where it meets them on their own.

    It does where a part of what is compiled runs eagerly, and autograd calls its hooks there.
    ``torch.compiler.disable`` does the same with a wrapper, which takes time at every call and a second at import.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, skip)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what torch.compile made of another, or was compiled in place."""
    # The class of what torch.compile returns is torch._dynamo's, which takes a second to import.
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


class _Within(threading.local):
    """Whether the forward that this thread runs is compiled."""

    compiled = False


_within = _Within()


class _Met:
    """Whether a compiled graph has run that nothing here knew of."""

    graph = False


_met = _Met()


def leave_to_run(function: Any) -> None:
    """Has torch.compile run a function as it is, also inside of what it compiles, and compile what that one calls.

    ``torch.compiler.disable(recursive=False)`` does the same, and takes a second to import.
    """
    function._torchdynamo_disable = True
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def run_uncompiled(around: Around, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `around` in place of a forward that torch.compile may be compiling: it compiles the forward alone.

    Who prepares a model and compiles it then has everything that `around` does in the frames that torch.compile sees.
    """
    compiler = eval_frame.set_eval_frame(None)
    if compiler is None:
        return around(forward, args, kwargs)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        eval_frame.set_eval_frame(compiler)
        try:
            return forward(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(None)

    outside, _within.compiled = _within.compiled, True
    try:
        return around(compiled, args, kwargs)
    finally:
        _within.compiled = outside
        eval_frame.set_eval_frame(compiler)


leave_to_run(run_uncompiled)


def is_forward_compiled() -> bool:
    """Whether the forward that this thread runs, inside of `run_uncompiled`, is compiled."""
    return _within.compiled


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether parts of a model, or what calls it now, are compiled, in place or by what torch.compile has made of them.

    A part does not know of the latter, so all objects are looked through, about 0.1 s, where anything was compiled.
    """
    modules = set(model.modules())
    if _within.compiled or any(map(is_compiled, modules)):
        return True
    if not has_compiled_anything():
        return False
    made = sys.modules["torch._dynamo.eval_frame"].OptimizedModule
    return any(type(each) is made and getattr(each, "_orig_mod", None) in modules for each in gc.get_objects())


def notice_graph(function: type) -> None:
    """Notices where a function that saves is a graph, such as one that was compiled in forward, or after a reset."""
    if function.__name__ == "CompiledFunction":  # whoever has compiled it
        _met.graph = True


def has_compiled_anything() -> bool:
    """Whether torch.compile was used in this process, but for what libraries compile when they are imported.

    Where it cannot be known, whether it was loaded.
    """
    if _met.graph:
        return True
    loaded = sys.modules.get("torch._dynamo.eval_frame")
    if loaded is None:
        return False
    backends = getattr(loaded, "cached_backends", None)
    if backends is None:
        return True
    known = set[int]().union(*(_backends_of(sys.modules[name]) for name in COMPILED_ON_IMPORT if name in sys.modules))
    return any(backend is not None and key not in known for key, backend in backends.items())


@functools.cache
def _backends_of(library: ModuleType) -> set[int]:
    """Returns the `id` of the backends of all compiled functions that the functions of a module call.

    They exist as long as the module does, which the cache holds.
    """
    found: set[int] = set()
    functions = [each for each in vars(library).values() if isinstance(each, FunctionType)]
    for function in functions:  # which grow meanwhile
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        around = {name: cell.cell_contents for name, cell in cells if cell != CellType()}
        functions += [each for each in around.values() if isinstance(each, FunctionType) and each not in functions]
        if (backend := around.get("callback")) is not None:
            while (inner := getattr(backend, _WITHIN, None)) is not None:
                backend = inner
            found.add(id(backend))
    return found


def graph_hook_context() -> dict[str, Any] | None:
    """Returns what a hook is told of the graphs that it is inlined into; None outside of that."""
    compile_graphs = sys.modules.get(_GRAPHS)
    context = getattr(compile_graphs, "_get_saved_tensor_hook_context", None)
    return None if context is None else context()


_TRACES = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


def has_no_values(model: nn.Module) -> bool:
    """Whether this thread's operators are recorded or transformed, so that tensors have no memory of their own.

    That is so in ``torch.jit.trace``, ``torch.export``, `make_fx`, `FakeTensorMode` and the transforms of `torch.func`,
    but for a `vmap` that leaves the parameters as they are.
    """
    if is_tracing() or any(torch._C._get_dispatch_mode(each) is not None for each in _TRACES):
        return True
    if not is_transforming():
        return False
    functorch = torch._C._functorch
    if any(each.key() != functorch.TransformType.Vmap for each in functorch.get_interpreter_stack() or ()):
        return True
    return any(map(functorch.is_batchedtensor, model.parameters()))


def given_parameters() -> list[int]:
    """Returns which inputs of the graph that this thread is about to divide are parameters and buffers, by their place.

    Without those that the forward graph changes: backward would find them as they are then. A pass over the graph gets
    its inputs as those of others are, and only the function that calls it knows.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _GRAPHS and (known := frame.f_locals.get("fw_metadata")) is not None:
            given, inputs = getattr(known, "static_input_indices", None) or (), known.input_info
            return [each for each in given if each < len(inputs) and not inputs[each].mutates_data]
        frame = frame.f_back
    return []


IN_FORWARD = "daf_in_forward"
"""Marks nodes, in their `meta`, that the forward graph is to make though no result of it needs them."""


class _Replaced:
    """A function of a module of torch's, as long as scopes have another one in its place, which gets it first."""

    def __init__(self, module: str, name: str, other: Callable[..., Any]) -> None:
        self._module, self._name, self._other = module, name, other
        self._function: Any = None
        self._scopes = 0
        self._lock = threading.Lock()

    @contextmanager
    def inside(self) -> Generator[None]:
        """Has the other one in its place inside."""
        module = importlib.import_module(self._module)
        with self._lock:
            if not self._scopes:
                self._function = getattr(module, self._name)
                setattr(module, self._name, partial(self._other, self._function))
            self._scopes += 1
        try:
            yield
        finally:
            with self._lock:
                self._scopes -= 1
                if not self._scopes:
                    setattr(module, self._name, self._function)


def _trace(function: Callable[..., Any], config: Any, hook: Any, arguments: tuple[Any, ...]) -> Any:
    anew = partial(function, config, hook, arguments)
    traced = getattr(hook, "daf_traced", None)
    return anew() if traced is None else traced(arguments, anew)


def reached(start: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """Yields nodes, what follows each of them, what follows that, and so on: each node once."""
    pending = [*start]
    seen = set(pending)
    for node in pending:  # which grows meanwhile
        yield node
        fresh = [each for each in following(node) if each not in seen]
        seen.update(fresh)
        pending += fresh


def _divide(function: Callable[..., Any], joint: Any, *arguments: Any, **named: Any) -> Any:
    found = function(joint, *arguments, **named)
    known = found._required_fw_nodes
    for node in joint.graph.nodes:
        if IN_FORWARD in node.meta and node in found.unclaimed_nodes:
            # What has to be in backward stays there, and so do random numbers, which are drawn in an order.
            needed = set(reached([node], lambda each: [one for one in each.all_input_nodes if one not in known]))
            if not any(each in found.required_bw_nodes or _is_random(each) for each in needed):
                known.update(needed)
                found.unclaimed_nodes.difference_update(needed)
    found.fw_order.update(
        {node: place for place, node in enumerate(each for each in joint.graph.nodes if each in known)}
    )
    return found


def _is_random(node: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


_TRACER = _Replaced(_GRAPHS, "prepare_hook_gm", _trace)
_DIVISION = _Replaced("torch._functorch.partitioners", "classify_nodes", _divide)


@contextmanager
def graphs_made_with_hooks() -> Generator[None]:
    """Has graphs that are compiled inside cut and traced as hooks need them.

    Hooks are inlined that have a method `daf_traced`, which says what graph a call of theirs is: it gets the arguments,
    and a function that traces the hook as torch does, for each tensor that a graph saves. And the forward graph makes
    what is marked as `IN_FORWARD`, which torch leaves to backward where no result needs it, even if it must be saved.
    """
    with _TRACER.inside(), _DIVISION.inside():
        yield


def is_looked_at(values: Tensor) -> bool:
    """Whether torch looks at what a hook makes of a tensor, and neither traces the hook nor has values."""
    from torch._subclasses.fake_tensor import FakeTensor  # what knows graphs takes time to import
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return type(values) is FakeTensor and get_proxy_mode() is None


def shows_graphs() -> bool:
    """Whether this torch inlines hooks into the graphs that it compiles, and shows them the graphs."""
    try:
        compile_graphs = importlib.import_module(_GRAPHS)
    except ImportError:
        return False
    return hasattr(compile_graphs, "_get_saved_tensor_hook_context")
