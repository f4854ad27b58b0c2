"""What DAF uses of torch's private interface, all of it, each with the reason. Tested against torch 2.13."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# Private by their underscore, and partly missing from torch's stubs: that is what this file is for.

from __future__ import annotations

from collections.abc import Callable, Collection
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


def skip_nodes(node: Any, names: Collection[str]) -> Any:
    """Returns the first autograd node from `node` on, towards the leaves, with none of the names; None at the end."""
    while node is not None and node.name() in names:
        node = node.next_functions[0][0]
    return node


def packed_for(node: Any, name: str, unpack: Callable[[Any], Tensor]) -> object:
    """Returns what was put in place of an autograd node's saved tensor by the pack hook that belongs to `unpack`.

    None where the node saved nothing of that name, has released it, or other hooks or none were active, and on a torch
    that does not tell. No unpack hook is called: that of a checkpoint would recompute a block.
    """
    try:
        saved: Any = getattr(node, f"_raw_saved_{name}", None)
        # In this order: torch 2.13 crashes where data is asked for without hooks.
        return saved.data if getattr(saved, "unpack_hook", None) == unpack else None
    except RuntimeError:
        return None


def storage_id(tensor: Tensor) -> int:
    """Returns the address of the control block of a tensor's storage.

    Unlike the address of its data it is not reused while a weak reference to the storage exists.
    """
    return tensor.untyped_storage()._cdata
