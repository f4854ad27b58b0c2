"""Values of saved tensors that wait until it is known who reads them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from daf_core.autograd.torch_private import Node, node_number, saving_node
from daf_core.readers.places import Place
from daf_core.readers.table import Kind, Reading

NEWEST = 8
"""Tensors of a first pass whose values wait although their reader is known: what follows may have a pole."""

PATIENCE = 16
"""Tensors of a first pass that wait at most. One whose reader is not known by then stays exact in this pass."""

WAITING_BYTES = 128 << 20
"""Bytes of values that wait at most, besides those of the last one: ten times RoBERTa-base's largest at 8 x 128."""

_CLONE = "CloneBackward0"
"""An operator in place saves a clone, which has a node of its own, made after that of the operator."""

Unpack = Callable[[Any], Tensor]


class Saved(Protocol):
    """What learning needs of a tensor that is being saved, and of the autograd node that made it."""

    tensor: Tensor
    node: Node


StoreAgain = Callable[[Any, Any, Reading | None], None]
"""Stores a tensor again, which autograd has got something for, as its reader needs it; None keeps it as it is."""


class Sighting(NamedTuple):
    """What is known of a tensor when it is saved."""

    place: Place | None  # where; None where nothing has to be learned of it
    number: int  # the number of the autograd node that saves it
    reading: Reading | None  # what that reads; None where it is not known yet
    fresh: bool  # whether the place was not known before, or its reader may read otherwise this time

    @property
    def is_expected(self) -> bool:
        """Whether the reader is known, though its arguments may be others this time."""
        return not self.fresh or (self.reading is not None and self.reading.varies)


EXACT_MODE = Sighting(None, 0, None, False)


class Waiting:
    """A tensor whose values wait."""

    __slots__ = ("again", "exact", "packed", "resolved", "saved", "sighting", "size", "unpack")

    def __init__(self, saved: Saved, sighting: Sighting, packed: object, unpack: Unpack, again: StoreAgain) -> None:
        self.saved: Saved | None = saved  # the tensor; None where its values are not needed any more
        self.sighting = sighting  # what was known of it
        self.size = saved.tensor.untyped_storage().nbytes()  # bytes that wait
        self.packed = weakref.ref(packed)  # what autograd has got
        self.unpack = unpack  # the unpack hook that belongs to it
        self.again = again  # stores it otherwise
        self.resolved = sighting.reading is not None and not sighting.reading.varies  # whether the reader is known
        self.exact = False  # whether it stays exact whoever reads it

    def settle(self, reading: Reading | None) -> None:
        """Takes what reads it; None has it stay as it is, whoever reads it."""
        self.resolved = True
        if self.exact or (reading is not None and reading == self.sighting.reading):
            return
        if self.saved is not None and (packed := self.packed()) is not None:
            self.again(self.saved, packed, reading)
        if reading is None or reading.kind is Kind.EXACT:
            self.exact = True
            self.let_go()

    def let_go(self) -> None:
        """Lets go of the values: they are not needed any more."""
        self.saved, self.size = None, 0


def saver_of(tensor: Tensor, op: str) -> int:
    """Returns the number of the autograd node that is saving a tensor which a node named `op` has made."""
    number = saving_node()
    return number - 1 if op == _CLONE and node_number(tensor.grad_fn) == number else number


class ThreadState(threading.local):
    """What a thread's forward pass has saved that is not known yet.

    Attributes:
        unknown: Whether a place was new in the last pass: others may be in the next one.
        barren: Passes in a row that were watched and have found nothing.
        showing: Whether a graph is being looked through.
        cancelling: Whether a function of `CANCELLING` is running.
        waiting: It, in order.
        unresolved: By the number of the node that has saved it.
        newest: The newest results that the watch has seen.
        looked: The number of the newest node that was looked at for a pole.
        unpack: The unpack hook of what it has saved; None before it has saved anything.
    """

    def __init__(self) -> None:
        self.unknown, self.showing, self.cancelling = True, False, False
        self.barren = 0
        self.waiting: deque[Waiting] = deque()
        self.unresolved: dict[int, list[Waiting]] = {}
        self.newest: deque[weakref.ref[Tensor]] = deque(maxlen=NEWEST)
        self.looked = -1
        self.unpack: Unpack | None = None
