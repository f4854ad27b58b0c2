"""The loss that a model returns, and whether it is the one that is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from daf_core import AuditError
from daf_core.autograd.torch_private import all_nodes
from daf_core.batch.rows import attributes_of, tensors_in

ELEMENTS = 1 << 14  # elements of a gradient that are compared
TOLERANCE = 1e-2  # relative difference that rounding explains, in half precision, too


def loss_in(output: Any, name: str | None = None) -> Tensor:
    """Finds the loss in what a model returns: that of a name among `losses_in`, or "loss", or the first number.

    Raises:
        AuditError: There is none.
    """
    found = losses_in(output)
    chosen = _chosen(found, name)
    if chosen is None:
        raise AuditError(
            "the model returns no loss (a number, one in `loss`, or one in a tuple), so what its loss is, is unknown. "
            "daf_integrations.step(model, batch, loss_function) runs a step with any other"
        )
    return found[chosen]


def losses_in(output: Any) -> dict[str, Tensor]:
    """Returns the numbers with a gradient that a model returns, by key or index."""
    return {name: value for name, value in _named(output) if _is_loss(value)}


def _named(output: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(output, Mapping):
        yield from ((str(key), value) for key, value in output.items())
    elif isinstance(output, tuple | list) and not hasattr(output, "loss"):
        yield from ((str(place), value) for place, value in enumerate(output))
    elif isinstance(output, Tensor):
        yield "", output
    else:
        yield "loss", getattr(output, "loss", None)


def _chosen(losses: Mapping[str, Tensor], name: str | None) -> str | None:
    if name is None:
        name = "loss" if "loss" in losses else next(iter(losses), None)
    return name if name in losses else None


def _is_loss(value: Any) -> bool:
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or value.numel() != 1:
        return False
    return value.grad_fn is not None or not torch.is_grad_enabled()


class LossWatch:
    """Sees in backward what of a model's result is trained on.

    `name` is as for `loss_in`, whose result is taken for the loss that is trained on.
    """

    def __init__(self, output: Any, name: str | None) -> None:
        losses = losses_in(output)
        contents = output if isinstance(output, Mapping | tuple | list | Tensor) else attributes_of(output)
        found = {id(tensor): tensor for tensor in (*losses.values(), *tensors_in(contents))}
        # Not logits that wait until they are read: they are of another class.
        tensors = [tensor for tensor in found.values() if type(tensor) is Tensor and tensor.grad_fn is not None]
        self._roots = {known: _Root(loss, tensors) for known, loss in losses.items()}
        self._name = _chosen(losses, name)

    @property
    def seen(self) -> bool:
        """Whether a backward pass has come to anything that the model has returned."""
        return any(root.seen or any(other.seen for other in root.others) for root in self._roots.values())

    @property
    def is_trained(self) -> bool:
        """Whether the loss is trained on, and nothing else of what the model has returned but by way of it."""
        return self._name is not None and self._roots[self._name].is_trained

    @property
    def instead(self) -> str | None:
        """The loss that is trained on in place of the other; None where there is none."""
        return next((name for name, root in self._roots.items() if root.is_trained), None)


class _Root:
    """Sees whether a loss is trained on, and no other result of the model but by way of it."""

    def __init__(self, loss: Tensor, tensors: Iterable[Tensor]) -> None:
        self.seen = False
        loss.register_hook(self._see)
        nodes = all_nodes(loss.grad_fn)
        self.others = [_Beside(tensor, nodes) for tensor in tensors if tensor is not loss]

    @property
    def is_trained(self) -> bool:
        return self.seen and not any(other.is_used for other in self.others)

    def _see(self, gradient: Tensor | None) -> None:
        self.seen |= gradient is not None


class _Beside:
    """Sees whether a tensor's gradient comes from a loss alone.

    What the nodes pass on that lead from the loss to the tensor is compared with what it gets, in some elements.
    """

    def __init__(self, tensor: Tensor, nodes: Iterable[Any]) -> None:
        self._passed = self._got = torch.zeros((), dtype=torch.float32, device="cpu")
        self.seen = False
        tensor.register_hook(self._get)
        source = (tensor.grad_fn, tensor.output_nr)
        for node in nodes:
            places = [place for place, edge in enumerate(node.next_functions) if edge == source]
            if places:
                node.register_hook(partial(self._pass, places))

    @property
    def is_used(self) -> bool:
        """Whether something else has a gradient for it."""
        got, passed = torch.broadcast_tensors(self._got, self._passed)
        if not self.seen or not got.isfinite().all():  # of a step that a gradient scaler skips
            return False
        return not torch.allclose(got, passed, rtol=TOLERANCE, atol=TOLERANCE * float(got.abs().max()))

    def _pass(self, places: list[int], gradients: tuple[Tensor | None, ...], _outer: object) -> None:
        for place in places:
            if (found := gradients[place]) is not None:
                self._passed = self._passed + _some(found)

    def _get(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # a node that nothing reached runs with none, as that of DistributedDataParallel does
            self.seen = True
            self._got = self._got + _some(gradient)


def _some(gradient: Tensor) -> Tensor:
    """Returns elements of a gradient, evenly spread."""
    elements = gradient.detach().reshape(-1)
    return elements[:: max(elements.numel() // ELEMENTS, 1)].float().cpu()
