"""The contract of a codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from daf_core.memory.pool import PagePool
from daf_kernels import Pages


class StoredActivation(ABC):
    """The values of one activation, encoded. Its bytes are held as long as the object lives, and freed with it.

    A codec is a subclass with a class method ``encode(values, ...)`` that returns None where it cannot hold the values.
    """

    codec: ClassVar[str]

    @abstractmethod
    def decode_into(self, out: Tensor) -> None:
        """Writes the values into a tensor of the shape and type that was encoded. May be called any number of times."""


class PagedActivation(StoredActivation):
    """An activation that lies on pages of the pool."""

    def __init__(self, pool: PagePool, pages: Pages) -> None:
        self.pool = pool
        self.pages = pages

    def __del__(self) -> None:
        self.pool.release(self.pages)
