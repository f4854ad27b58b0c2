"""What passes of a training change before a step is finished, taken back or put aside."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage] what all have in common

from daf_core.autograd.torch_private import all_nodes, leaf_of
from daf_core.snapshots.random_numbers import RandomNumbers, generators_of
from daf_core.snapshots.writes import has_storage


def devices_of(model: nn.Module) -> set[torch.device]:
    """Returns the devices that parameters of the model are on."""
    return {parameter.device for parameter in model.parameters()}


NORMALIZATION = _NormBase
"""What batch and instance normalizations have in common: running statistics, which no pass of training reads."""


class Buffers:
    """The buffers of a model as they are now, such as running statistics.

    Up to `largest` bytes, if given, those are kept that are no statistics of normalizations.
    """

    def __init__(self, model: nn.Module, largest: int | None = None) -> None:
        self._buffers = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
            if largest is None
            or isinstance(module, NORMALIZATION)
            or not has_storage(buffer)
            or buffer.nbytes <= largest
        ]

    def restore(self) -> None:
        """Takes them back, any number of times."""
        for module, name, buffer, before in self._buffers:
            setattr(module, name, _restored(buffer, before))


class Snapshot:
    """What forward and backward passes of a model change, as it is now, before a step.

    That is: random generators, also those that modules have as attributes, gradients (those there are take as much
    memory once more), buffers such as running statistics, training flags, and DAF's own counts, which the function that
    `snapshot` returns takes back. Weights and the optimizer change only after it. What else a model or a loss counts in
    attributes of its own is not taken back.
    """

    def __init__(self, model: nn.Module, snapshot: Callable[[], Callable[[], None]] | None = None) -> None:
        self.devices = devices_of(model)  # those of the model's parameters
        found = [(each, each.grad) for each in model.parameters()]
        self._gradients = [(each, grad, None if grad is None else grad.detach().clone()) for each, grad in found]
        self._numbers = RandomNumbers(self.devices, generators_of(model))
        self._buffers = Buffers(model)
        self._modes = [(module, module.training) for module in model.modules()]
        self._restore_engine = None if snapshot is None else snapshot()

    def restore(self) -> None:
        """Takes everything back, any number of times; what the step has saved for backward must be gone by then."""
        for parameter, gradient, before in self._gradients:
            parameter.grad = gradient
            if gradient is not None and before is not None:
                gradient.detach().copy_(before)  # in the same tensor: others may have views of it, or it of them
        self._buffers.restore()
        for module, training in self._modes:
            module.training = training
        torch.clear_autocast_cache()
        if self._restore_engine is not None:
            self._restore_engine()
        self._numbers.restore()


def gradients_aside(model: nn.Module) -> AbstractContextManager[None]:
    """Puts gradients of zero in place of those there are, so that a pass adds none to them and none to memory.

    Hooks that wait for gradients see none of it: they may be those of an optimizer that steps in backward.
    """
    return _aside([parameter for parameter in model.parameters() if parameter.requires_grad])


def other_gradients_aside(loss: Tensor, own: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Does so for the leaves of a loss but some, such as the parameters of a head that is no part of the model."""
    known, leaves = set(map(id, own)), map(leaf_of, all_nodes(loss.grad_fn))
    return _aside([leaf for leaf in leaves if leaf is not None and id(leaf) not in known])


def backward_beside(loss: Tensor, own: Iterable[Tensor]) -> None:
    """Runs the backward pass of a loss beside training: it adds to the gradients of some leaves alone."""
    with other_gradients_aside(loss, own):
        loss.backward()


@contextmanager
def _aside(leaves: list[Tensor]) -> Generator[None]:
    before = [(leaf, leaf.grad) for leaf in leaves]
    # Torch has no public way to ask for hooks, and keeps the dictionary itself.
    hooks = [found for leaf in leaves if (found := getattr(leaf, "_post_accumulate_grad_hooks", None))]
    contents = [dict(found) for found in hooks]
    for found in hooks:
        found.clear()
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    try:
        yield
    finally:
        for found, content in zip(hooks, contents, strict=True):
            found.update(content)
        for leaf, gradient in before:
            leaf.grad = gradient


def _restored(buffer: Tensor, before: Tensor) -> Tensor:
    """Returns the buffer with its content of before, written where it has changed: a graph may need what has not.

    Contents are compared because batch normalization updates its running statistics without counting a version. They
    are written without counting one, too. A buffer without a storage of its own, such as a sparse one, is replaced.
    """
    if buffer.is_meta:
        return buffer
    if not has_storage(buffer):
        return before.clone()
    if buffer.shape != before.shape:
        buffer.data = before.clone()
    if not torch.equal(_bytes(buffer), _bytes(before)):
        buffer.data.copy_(before)
    return buffer


def _bytes(buffer: Tensor) -> Tensor:
    """Returns the content as bytes, in which a NaN equals itself and every type can be compared."""
    return buffer.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
