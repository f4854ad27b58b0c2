"""The tier below a device's memory: where activations lie that do not fit in the budget."""

from __future__ import annotations

from typing import Protocol

from daf_kernels import PageMemory, Pages


class Tier(Protocol):
    """Keeps pages until they are wanted again, each in a slot. Thread-safe.

    Attributes:
        queued: Whether `write` and `read` only queue a copy, and return before it is made. Pages may be given back and
            taken again at once all the same: later copies come after it, and `wait` has all others do so.
    """

    queued: bool

    def write(self, memory: PageMemory, pages: Pages) -> Pages:
        """Copies pages into slots and returns these.

        Raises:
            SpillError: There is no room for them.
        """
        ...

    def read(self, slots: Pages, memory: PageMemory, pages: Pages) -> None:
        """Copies what lies in the slots back into pages.

        Raises:
            SpillError: It cannot be read.
        """
        ...

    def wait(self, slots: Pages | None = None) -> None:
        """Has what is computed from now on come after the last `read` of these slots; after all copies without any."""

    def free(self, slots: Pages) -> None:
        """Gives slots back."""
        ...

    def finish_step(self) -> None:
        """Ends a step: memory that slots no longer need goes back to the system."""
