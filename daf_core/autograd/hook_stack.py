"""Saved-tensor hooks as a strict stack: only the innermost pair applies, so DAF refuses to share it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from daf_core.autograd.torch_private import drop_innermost_hooks, innermost_hooks
from daf_core.errors import HooksActiveError

_REMEDIES = {
    "torch.utils.checkpoint": "DAF's scope was entered inside a checkpointed function, where it would switch the "
    "checkpoint off. Enter it outside: DAF then compresses the inputs that the checkpoint keeps",
}
_DEFAULT_REMEDY = (
    "Torch applies only the innermost pair, so one of the two would do nothing. Leave the other scope first "
    "(save_on_cpu, activation offloading, another DAF engine), or do not use DAF here"
)


def check_no_foreign_hooks() -> None:
    """Checks that no saved-tensor hooks are active.

    Raises:
        HooksActiveError: Some are; the message names their owner.
    """
    active = innermost_hooks()
    if active is not None:
        owner = getattr(active[0], "__module__", None) or type(active[0]).__module__
        raise HooksActiveError(
            f"saved-tensor hooks of {owner} ({getattr(active[0], '__qualname__', active[0])}) are already active. "
            f"{_REMEDIES.get(owner, _DEFAULT_REMEDY)}"
        )


@contextmanager
def installed(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Generator[None]:
    """Installs a pair of hooks; nothing of it or above it stays installed, whatever ends the scope.

    Raises:
        HooksActiveError: Hooks that were entered inside were not left.
    """
    leftover = None
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        try:
            yield
        finally:
            while (active := innermost_hooks()) is not None and active[0] != pack:
                leftover = active
                drop_innermost_hooks()
    if leftover is not None:
        raise HooksActiveError(
            f"saved-tensor hooks ({getattr(leftover[0], '__qualname__', leftover[0])}) were entered inside DAF's scope "
            "and not left before it ended. Use them as a with block inside the forward pass"
        )
