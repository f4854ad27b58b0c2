"""What one would use instead of DAF: saved tensors in bfloat16, in main memory, or in few bits by torch operators."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from daf_core.errors import ConfigError

LEAST_ELEMENTS = 1024
"""Tensors with fewer stay as they are: nothing is gained with them."""

GROUP = 256
"""Elements that share a minimum and a maximum, as in GACT (ICML 2022)."""


@dataclass(frozen=True)
class Stored:
    """A saved tensor in another form.

    Attributes:
        restore: Returns it.
        size: Bytes that are held.
    """

    restore: Callable[[], Tensor]
    size: int


Form = Callable[[Tensor], Stored]


class Stores:
    """Has autograd keep floating-point activations in another form, each of them once however often it is saved.

    Args:
        model: The model; its weights, and casts of them that autocast makes, stay as they are.
        form: Brings a tensor into the other form.
    """

    def __init__(self, model: nn.Module, form: Form) -> None:
        self._form = form
        weights = [*model.parameters(), *model.buffers()]
        self._weights = {_identity(weight) for weight in weights}
        self._shapes = {weight.shape for weight in weights if weight.dim() > 1}
        self._known: dict[tuple[Any, ...], Any] = {}
        self._untouched: dict[StorageWeakRef, int] = {}
        self._held = 0

    @contextmanager
    def storing(self) -> Generator[None]:
        """What is saved inside is stored; what was stored before is no longer looked at."""
        self._known.clear()
        self._untouched.clear()
        self._held = 0
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    @property
    def held_bytes(self) -> int:
        """Bytes that the last step held."""
        return self._held + sum(self._untouched.values())

    def _pack(self, tensor: Tensor) -> Stored | Tensor:
        if not tensor.is_floating_point() or tensor.numel() < LEAST_ELEMENTS or self._is_weight(tensor):
            if _identity(tensor) not in self._weights:
                self._untouched[_identity(tensor)] = tensor.untyped_storage().nbytes()
            return tensor
        place = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
        key = _identity(tensor), place
        known = self._known.get(key)
        stored = None if known is None else known()
        if stored is None:
            stored = self._form(tensor.detach())
            self._held += stored.size
            self._known[key] = ref(stored)
        return stored

    def _is_weight(self, tensor: Tensor) -> bool:
        if _identity(tensor) in self._weights:
            return True
        cast = torch.is_autocast_enabled(tensor.device.type) and not tensor.requires_grad
        return cast and (tensor.shape in self._shapes or tensor.mT.shape in self._shapes if tensor.dim() > 1 else False)


def _identity(tensor: Tensor) -> StorageWeakRef:
    """Returns what tells storages apart: one that is weakly referred to gives its address to no other, even if gone."""
    return StorageWeakRef(tensor.untyped_storage())


def _unpack(stored: Stored | Tensor) -> Tensor:
    return stored if isinstance(stored, Tensor) else stored.restore()


def in_bfloat16(tensor: Tensor) -> Stored:
    """Stores a tensor in 16 bits."""
    small = tensor.to(torch.bfloat16)
    return Stored(partial(small.to, tensor.dtype), small.numel() * small.element_size())


def in_bits(bits: int) -> Form:
    """Returns what stores a tensor in few bits as GACT does, in torch operators.

    Minimum and maximum of each group of 256 elements are stored in its own type, and elements in steps between them,
    rounded up or down at random so that the mean is right.

    Args:
        bits: 8, 4 or 2.
    """
    return partial(_in_bits, bits=bits)


def _in_bits(tensor: Tensor, bits: int) -> Stored:
    flat = tensor.flatten()
    groups = torch.nn.functional.pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)  # on a CPU aminmax takes ten times as long
    step = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(groups.dtype).tiny)
    codes = (groups - low).div_(step).add_(torch.rand_like(groups)).clamp_(0, 2**bits - 1).to(torch.uint8)
    packed = _pack(codes, bits)
    size = packed.numel() + 2 * low.numel() * low.element_size()
    return Stored(partial(_from_bits, packed, low, step, bits, tensor.shape), size)


def _from_bits(packed: Tensor, low: Tensor, step: Tensor, bits: int, shape: torch.Size) -> Tensor:
    values = _unpacked(packed, bits).to(step.dtype).view(-1, GROUP).mul_(step).add_(low)
    return values.flatten()[: shape.numel()].view(shape)


def _pack(codes: Tensor, bits: int) -> Tensor:
    lanes = codes.view(-1, 8 // bits)
    packed = lanes[:, 0].clone()
    for lane in range(1, 8 // bits):
        packed |= lanes[:, lane] << (lane * bits)
    return packed


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts) & (2**bits - 1)


class Offload:
    """Has autograd keep what it saves in main memory, as `torch.autograd.graph.save_on_cpu` does.

    Args:
        model: The model.

    Raises:
        ConfigError: It is in main memory already.
    """

    held_bytes = 0

    def __init__(self, model: nn.Module) -> None:
        if next(model.parameters()).device.type == "cpu":
            raise ConfigError(
                "the method 'offload' moves what autograd saves from a GPU to main memory, and the model runs on the "
                "CPU; leave it out"
            )

    @contextmanager
    def storing(self) -> Generator[None]:
        """What is saved inside is moved."""
        with save_on_cpu(pin_memory=True):
            yield
