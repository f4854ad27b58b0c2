"""Sizes of tensors that are traced: numbers, or symbols."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_known(size: Any) -> bool:
    """Says whether a size is a number, and no symbol."""
    return isinstance(size, int)


def hint(size: Any) -> int:
    """Returns a size, or what a symbol stands for while it is traced, for what may be the same with other sizes."""
    return size if isinstance(size, int) else int(size.node.hint)


def elements_of(values: Tensor) -> int:
    """Returns the elements of a tensor, or what they are while it is traced."""
    return hint(values.numel())
