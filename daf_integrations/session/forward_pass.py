"""What a trainer is given for a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


def _ignore(result: object) -> None:
    """Takes the result of a pass that is not compressed."""


class ForwardPass(NamedTuple):
    """A forward pass; see `DAFSession.forward`."""

    audited: bool = False  # whether the error of the gradient was measured before it
    # To be told its result before it ends: the operators that have saved last may have other arguments than before.
    show: Callable[[object], None] = _ignore
