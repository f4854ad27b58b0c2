"""What DAF uses of torch.compile's private interface, all of it, each with the reason. Tested against torch 2.13."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import gc
import importlib
import sys
from typing import Any

from torch import nn

from daf_core.autograd.torch_private import is_compiled


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether parts of a model are compiled, in place or by what torch.compile has made of them anywhere.

    A part does not know of the latter, so all objects are looked through, about 0.1 s, where anything was compiled.
    """
    modules = set(model.modules())
    if any(map(is_compiled, modules)):
        return True
    if not has_compiled_anything():
        return False
    made = sys.modules["torch._dynamo.eval_frame"].OptimizedModule
    return any(type(each) is made and getattr(each, "_orig_mod", None) in modules for each in gc.get_objects())


def has_compiled_anything() -> bool:
    """Whether torch.compile was used in this process; where it cannot be known, whether it was loaded."""
    loaded = sys.modules.get("torch._dynamo.eval_frame")
    if loaded is None:
        return False
    backends = getattr(loaded, "cached_backends", None)
    return backends is None or any(backend is not None for backend in backends.values())


def graph_hook_context() -> dict[str, Any] | None:
    """Returns what a hook is told of the graphs that it is inlined into, from torch 2.10 on; None outside of that."""
    compile_graphs = sys.modules.get("torch._functorch._aot_autograd.graph_compile")
    context = getattr(compile_graphs, "_get_saved_tensor_hook_context", None)
    return None if context is None else context()


def shows_graphs() -> bool:
    """Whether this torch inlines hooks into the graphs that it compiles, and shows them the graphs."""
    try:
        compile_graphs = importlib.import_module("torch._functorch._aot_autograd.graph_compile")
    except ImportError:
        return False
    return hasattr(compile_graphs, "_get_saved_tensor_hook_context")
