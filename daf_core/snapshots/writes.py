"""Tensors that are written in place: kept as they were from the moment before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from daf_core.autograd.torch_private import storage_id


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

    is_possible = hasattr(TorchDispatchMode, "ignore_compile_internals")  # an older torch does not ask for it

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tells torch.compile to compile inside as it does outside."""
        return True


class Copy:
    """What a tensor's whole storage holds now."""

    def __init__(self, tensor: Tensor) -> None:
        # A tensor of another class has its values elsewhere than it says.
        self._has_bytes = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        self._held: Any = tensor.untyped_storage() if self._has_bytes else tensor.detach()
        self._before: Any = self._held.clone()

    @property
    def is_changed(self) -> bool:
        """Whether it holds something else than before, as far as that is known: not of a tensor of another class."""
        return self._has_bytes and not torch.equal(_bytes(self._held), _bytes(self._before))

    def restore(self) -> None:
        """Puts it back."""
        if self._has_bytes and self._held.nbytes() != self._before.nbytes():
            self._held.resize_(self._before.nbytes())
        self._held.copy_(self._before)


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor's values lie in a storage, as those of sparse ones do not, or of what FSDP has freed."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return False
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors among an operator's arguments that it writes to."""
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        yield from (
            each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, Tensor)
        )
