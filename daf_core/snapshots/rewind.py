"""Takes plain objects back to an earlier moment."""

from __future__ import annotations

from collections import deque
from copy import copy
from typing import Any


class Attributes:
    """The attributes of objects as they are now, with what is in their collections, but not in collections in those.

    Args:
        owners: The objects.
    """

    def __init__(self, *owners: object) -> None:
        self._before = [(owner, _copied(vars(owner))) for owner in owners]

    def restore(self) -> None:
        """Takes the objects back, any number of times."""
        for owner, before in self._before:
            vars(owner).update(_copied(before))


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: copy(value) if isinstance(value, dict | set | list | deque) else value
        for name, value in attributes.items()
    }
