"""Operators of DAF's own, each with a backward of its own."""

from __future__ import annotations

from typing import Any

from torch.autograd import Function


def apply(cls: type[Function], *arguments: Any) -> Any:
    """Calls ``cls.apply``, and has a frame while it saves: from torch 2.14 on torch's own is written in C.

    The frame tells who is saving. Without it values wait until the graph does, and the first step takes more memory.
    """
    return cls.apply(*arguments)
