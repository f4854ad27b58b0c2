"""Tensors that are written in place: kept as they were from the moment before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from daf_core.autograd.torch_private import storage_id

PLAIN = Tensor, nn.Parameter, nn.Buffer  # a tensor of another class may have its values elsewhere than it says

PART_BYTES = 16 << 20  # bytes of two storages that are compared at once


class Writes(TorchDispatchMode):
    """Copies those of some tensors with storages that an operator inside writes to, just before it does.

    Each operator takes about 10 us more. Kernels that write to tensors without saying so in their schema are not seen,
    such as those of batch normalization, which write to buffers, and those that get addresses. Nothing is compiled
    inside, and what was to be compiled there then never is.
    """

    # Operators such as flex_attention call others, and pass through.
    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._names = {storage_id(tensor): name for name, tensor in tensors}
        self._copies: dict[int, Copy] = {}

    @property
    def written(self) -> set[str]:
        """The names of the tensors that were written to."""
        return {self._names[number] for number in self._copies}

    def restore(self) -> None:
        """Puts back what the tensors held."""
        for copy in self._copies.values():
            copy.restore()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for tensor in _written(schema, args, kwargs or {}):
                number = storage_id(tensor) if has_storage(tensor) else None
                if number in self._names and number not in self._copies:
                    self._copies[number] = Copy(tensor)
        return func(*args, **(kwargs or {}))


class WritesBesideGraphs(Writes):
    """The same where graphs of torch.compile run as they were compiled: what they write is not seen."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tells torch.compile to compile inside as it does outside."""
        return True


class Copy:
    """What a tensor holds now: its whole storage, but of a tensor of another class, whose values lie elsewhere."""

    def __init__(self, tensor: Tensor) -> None:
        self.is_whole = type(tensor) in PLAIN
        self._held: Any = tensor.untyped_storage() if self.is_whole else tensor.detach()
        self._before: Any = self._held.clone()

    def restore(self) -> bool:
        """Puts it back; returns whether it was another, as far as that is known: not of another class."""
        if not self.is_whole:
            self._held.copy_(self._before)
            return False
        if _equal(self._held, self._before):  # what is only read may be memory that cannot be written
            return False
        if self._held.nbytes() != self._before.nbytes():
            self._held.resize_(self._before.nbytes())
        self._held.copy_(self._before)
        return True


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor's values lie in a storage, as those of sparse ones do not, or of what FSDP has freed."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return False
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def _equal(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Compares in parts: on a GPU a comparison takes a byte for each of those compared."""
    parts = [
        torch.empty(0, dtype=torch.uint8, device=each.device).set_(each).split(PART_BYTES) for each in (one, other)
    ]
    return one.nbytes() == other.nbytes() and all(map(torch.equal, *parts))


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors among an operator's arguments that it writes to."""
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        yield from (
            each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, Tensor)
        )
