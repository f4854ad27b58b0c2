"""What autograd saves in a training step, by the class of the module and the operator that save it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from daf_core.autograd.torch_private import packed_for, storage_id

PREFIX = "_raw_saved_"


@dataclass
class Saved:
    """A tensor that was saved, and for whom."""

    tensor: Tensor
    module: str
    size: int
    operator: str = "Function"


def saved_bytes(model: nn.Module, inputs: dict[str, Tensor]) -> Counter[tuple[str, str]]:
    """Returns bytes by module class and operator; each storage counts once, for who saves it first.

    Args:
        model: Returns its loss.
        inputs: Its arguments.
    """
    known = {storage_id(tensor) for tensor in (*model.parameters(), *model.buffers(), *inputs.values())}
    path, notes = ["model"], list[Saved]()

    def pack(tensor: Tensor) -> Saved:
        fresh = storage_id(tensor) not in known
        known.add(storage_id(tensor))
        notes.append(Saved(tensor, path[-1], tensor.untyped_storage().nbytes() if fresh else 0))
        return notes[-1]

    def enter(module: nn.Module, *_: Any) -> None:
        path.append(type(module).__name__)

    def leave(*_: Any) -> None:
        path.pop()

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
        loss: Tensor = model(**inputs).loss
    _name_operators(loss.grad_fn)
    counts: Counter[tuple[str, str]] = Counter()
    for note in notes:
        counts[note.module, note.operator] += note.size
    return counts


def unpack(saved: Saved) -> Tensor:
    """Returns the tensor."""
    return saved.tensor


def _name_operators(root: Any) -> None:
    for node in _nodes(root):
        for name in dir(node):
            saved = packed_for(node, name.removeprefix(PREFIX), unpack) if name.startswith(PREFIX) else None
            if isinstance(saved, Saved):
                saved.operator = node.name().removesuffix("Backward0")


def _nodes(root: Any) -> Iterator[Any]:
    waiting, seen = [root], {root}
    while waiting:
        node = waiting.pop()
        yield node
        following = {found for found, _ in node.next_functions if found is not None} - seen
        seen |= following
        waiting.extend(following)
