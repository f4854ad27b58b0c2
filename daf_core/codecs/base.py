"""The contract of a codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from daf_core.memory.lease import Lease
from daf_core.memory.pager import Pager
from daf_core.readers.table import Kind, Reading


class StoredActivation(ABC):
    """The values of one activation, encoded. Its bytes are held as long as the object lives, and freed with it.

    A codec is a subclass with a class method ``encode(values, ...)`` that returns None where it cannot hold the values.

    Attributes:
        codec: Its name.
        whole: Whether it gives the values to whoever asks, or only what the operator that saved them makes of them.
        lossy: Whether what it gives is not bit by bit what was stored.
    """

    codec: ClassVar[str]
    whole: bool = True
    lossy: bool = True

    def serves(self, reading: Reading) -> bool:
        """Says whether it gives an operator what that reads."""
        return not self.lossy or reading.kind is Kind.SHAPE or (self.whole and reading.takes_approximations)

    @abstractmethod
    def decode_into(self, out: Tensor) -> None:
        """Writes the values into a tensor of the shape and type that was encoded. May be called any number of times."""


class PagedActivation(StoredActivation):
    """An activation that lies on pages of the pool, or in the next tier."""

    def __init__(self, pager: Pager, lease: Lease) -> None:
        self.pager = pager
        self.lease = lease
        pager.release(lease, owner=self)

    @override
    def decode_into(self, out: Tensor) -> None:
        with self.pager.reading(self.lease) as lease:
            self._decode(out, lease)

    @abstractmethod
    def _decode(self, out: Tensor, lease: Lease) -> None:
        """Writes the values, while the lease keeps its pages."""
