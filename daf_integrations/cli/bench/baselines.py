"""The alternatives to DAF: saved tensors in bfloat16, in main memory, or in few bits by torch operators."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Generator as Numbers
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from daf_core.errors import ConfigError
from daf_core.saved_tensors.classify import Eligibility, TensorKind

GROUP = 256  # elements that share a minimum and a maximum, as in GACT (ICML 2022)


@dataclass(frozen=True)
class Stored:
    """A saved tensor in another form, which holds `size` bytes."""

    restore: Callable[[], Tensor]
    size: int


Coding = Callable[[Tensor], Stored]


class Stores:
    """Stores activations in another form, which `code` brings them into.

    It stores the same tensors as DAF: large floating-point tensors other than weights, casts of weights and
    statistics. It stores a tensor once that is saved several times, but each view of another shape by itself.
    """

    def __init__(self, model: nn.Module, code: Coding) -> None:
        self._code = code
        self._eligibility = Eligibility(model)
        self._known: WeakValueDictionary[tuple[Any, ...], Stored] = WeakValueDictionary()
        self._untouched: dict[StorageWeakRef, int] = {}
        self._held = self._largest = 0

    @contextmanager
    def storing(self) -> Generator[None]:
        """Stores what autograd saves inside, and forgets the tensors of the step before."""
        self._eligibility.refresh()
        self._known.clear()
        self._untouched.clear()
        self._held = self._largest = 0
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    @property
    def held_bytes(self) -> int:
        """Bytes that the last step held."""
        return self._held + sum(self._untouched.values())

    def _pack(self, tensor: Tensor) -> Stored | Tensor:
        form = self._eligibility.form(tensor, self._largest)
        # A storage that is weakly referred to gives its address to no other, even if it is gone.
        storage = StorageWeakRef(tensor.untyped_storage())
        if form is not TensorKind.LOSSY:
            if form is not TensorKind.PARAMETER:
                self._untouched[storage] = tensor.untyped_storage().nbytes()
            return tensor.detach()
        self._largest = max(self._largest, tensor.numel())
        key = storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
        stored = self._known.get(key)
        if stored is None:
            stored = self._known[key] = self._code(tensor.detach())
            self._held += stored.size
        return stored


def _unpack(stored: Stored | Tensor) -> Tensor:
    return stored if isinstance(stored, Tensor) else stored.restore()


def in_bfloat16(tensor: Tensor) -> Stored:
    """Stores a tensor in 16 bits; one that has no more stays as it is."""
    small = tensor if tensor.element_size() <= torch.bfloat16.itemsize else tensor.to(torch.bfloat16)
    return Stored(partial(small.to, tensor.dtype), small.numel() * small.element_size())


def in_bits(bits: int, device: torch.device) -> Coding:
    """Returns a coding that stores a tensor in few bits as GACT does, in torch operators.

    It stores minimum and step of each group of 256 elements in float32, and elements in steps above the minimum,
    rounded up or down at random so that the mean is right. It does not use the random numbers of the model.
    """
    return partial(_in_bits, bits=bits, numbers=Numbers(device).manual_seed(0))


def _in_bits(tensor: Tensor, bits: int, numbers: Numbers) -> Stored:
    flat = tensor.flatten()
    if flat.numel() % GROUP:
        flat = nn.functional.pad(flat, (0, -flat.numel() % GROUP))
    groups = flat.view(-1, GROUP).float()
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)  # on a CPU aminmax takes ten times as long
    step = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(groups.dtype).tiny)
    noise = torch.rand(groups.shape, generator=numbers, device=groups.device)
    lanes = (groups - low).div_(step).add_(noise).clamp_(0, 2**bits - 1).to(torch.uint8).view(-1, 8 // bits)
    packed = lanes[:, 0].clone()
    for lane in range(1, 8 // bits):
        packed |= lanes[:, lane] << (lane * bits)
    size = packed.numel() + 2 * low.numel() * low.element_size()
    return Stored(partial(_from_bits, packed, low, step, bits, tensor.shape, tensor.dtype), size)


def _from_bits(packed: Tensor, low: Tensor, step: Tensor, bits: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = (packed[:, None] >> shifts) & (2**bits - 1)
    values = codes.to(step.dtype).view(-1, GROUP).mul_(step).add_(low)
    return values.flatten()[: shape.numel()].view(shape).to(dtype)


class Offload:
    """Keeps saved tensors, weights too, in main memory, with `torch.autograd.graph.save_on_cpu`.

    Raises:
        ConfigError: The model is in main memory already.
    """

    held_bytes = 0  # on the GPU

    def __init__(self, model: nn.Module) -> None:
        if next(model.parameters()).device.type == "cpu":
            raise ConfigError(
                "the method 'offload' moves what autograd saves from a GPU to main memory, and the model runs on the "
                "CPU; leave it out"
            )

    def storing(self) -> AbstractContextManager[None]:
        """Moves what autograd saves inside."""
        return save_on_cpu(pin_memory=True)
