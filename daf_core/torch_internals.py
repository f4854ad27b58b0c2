"""What DAF uses of torch's private interface, all of it, each with the reason. Tested against torch 2.13."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# Private by their underscore, and partly missing from torch's stubs: that is what this file is for.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HookPair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def innermost_hooks() -> HookPair | None:
    """Returns the pair of saved-tensor hooks that applies in this thread: torch has no public way to see others'."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def drop_innermost_hooks() -> None:
    """Takes the innermost pair off the stack: whoever entered it can no longer."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def in_backward() -> bool:
    """Says whether this thread is running a backward pass."""
    return torch._C._current_graph_task_id() != -1


def storage_id(tensor: Tensor) -> int:
    """Returns the address of the control block of a tensor's storage.

    Unlike the address of its data it is not reused while a weak reference to the storage exists.
    """
    return tensor.untyped_storage()._cdata
