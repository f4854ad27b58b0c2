"""What of this the torch that is installed can do."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from daf_core.autograd.torch_compile import graphs_made_with_hooks, shows_graphs
from daf_core.compiled.partition import with_hints

LEAST_SHARED_BYTES = 1 << 16
"""Inductor puts two loops into one where both read so many bytes of the same tensor. At its own 10 bytes a loop decodes
what belongs to another layer, since both read the same small vector: the result is then held from one to the other."""

_MODE = "saved_tensors_hooks_filtering_mode"
_PASS = "joint_custom_pass"
_ORDER = "_post_fusion_custom_pass"
_EAGERLY = "force_non_lazy_backward_lowering"


@cache
def missing() -> str | None:
    """Returns why saved activations of compiled graphs cannot be stored inside of them; None where they can be."""
    if shows_graphs():
        return None
    return f"torch {torch.__version__} does not show its compiled graphs to hooks, as torch 2.10 and later do"


@cache
def digest() -> str:
    """Returns a hash of all that decides what graphs save: a graph of other code would be wrong, or of another size."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


@contextmanager
def compiling() -> Generator[None]:
    """Has graphs that are compiled inside get the hooks for all that they save but parameters."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    from daf_core.compiled.placement import Late  # Inductor takes time to import

    values: dict[str, Any] = {_MODE: "no_static"}
    if hasattr(functorch, _EAGERLY):  # otherwise the backward graph is compiled where these settings have gone
        values[_EAGERLY] = True
    if hasattr(functorch, _PASS):
        values[_PASS] = partial(with_hints, before=getattr(functorch, _PASS))
    order: dict[str, Any] = {"score_fusion_memory_threshold": LEAST_SHARED_BYTES}
    if getattr(inductor, _ORDER, 0) is None:  # nobody else's
        order[_ORDER] = Late(digest())
    with functorch.patch(values), inductor.patch(order), graphs_made_with_hooks():
        yield
