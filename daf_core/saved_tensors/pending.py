"""A tensor that is packed in the background, and what autograd keeps of it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

from torch import Tensor

from daf_core.autograd.torch_private import version_counter
from daf_core.codecs import RawActivation
from daf_core.codecs.raw import modified_in_place
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.saved_tensors.handle import Handle


class PackJob:
    """The way of a tensor from when it was saved until it has *landed*: until it is packed.

    Args:
        saved: The tensor.
        time: When it was saved, by the clock of its thread (`ReleaseClock`).

    Attributes:
        saved: The tensor, whose memory goes when it has landed. Its node goes when the saving thread lets go of it:
            what else goes with a node must not depend on the clock.
        time: See above.
        size: Bytes that it keeps alive meanwhile.
        packed: What it was packed as; None until it has landed, and when nobody wants it any more.
        counter: Has the version of the tensor, where that is not kept; None until it has landed.
        held_bytes: Bytes that were held when it landed.
        error: What packing it failed with.
    """

    __slots__ = ("counter", "error", "held_bytes", "packed", "saved", "size", "time")

    def __init__(self, saved: SavedTensor, time: int) -> None:
        self.saved: SavedTensor | None = saved
        self.time = time
        self.size = saved.tensor.untyped_storage().nbytes()
        self.packed: Handle | RawActivation | None = None
        self.counter: Tensor | None = None
        self.held_bytes = 0
        self.error: BaseException | None = None

    def land(self, packed: Handle | RawActivation, held_bytes: int) -> None:
        """Takes what the tensor was packed as; the tensor may go, and is watched for changes in place all the same."""
        assert self.saved is not None
        if isinstance(packed, Handle):  # what stays raw watches itself
            self.counter = version_counter(self.saved.tensor)
        del self.saved.tensor
        self.held_bytes = held_bytes
        self.packed = packed

    def fail(self, error: BaseException) -> None:
        """Takes what packing failed with."""
        assert self.saved is not None
        del self.saved.tensor
        self.error = error


class PendingActivation:
    """Stands for what a tensor is going to be packed as.

    It is read at some time after it was saved. Whether a change in place came before or after that depends on the
    clock, so all changes until the forward pass ends are errors, as they are without DAF.

    Args:
        flight: The way of the tensor.
        wait: Returns when a tensor has landed that is to be read.

    Attributes:
        place: Where the tensor was saved; None where that is of no use.
        elements: Elements of it.
    """

    __slots__ = ("__weakref__", "_flight", "_last", "_version", "_wait", "elements", "place")

    def __init__(self, flight: PackJob, wait: Callable[[PackJob], None]) -> None:
        assert flight.saved is not None
        self._flight = flight
        self._wait: Callable[[PackJob], None] | None = wait
        self._version = self._last = flight.saved.version
        self.place = flight.saved.place
        self.elements = flight.saved.tensor.numel()

    @property
    def packed(self) -> Handle | RawActivation | None:
        """What it was packed as; None where it has not landed, or was changed: perhaps before it was read."""
        counter = self._flight.counter
        return self._flight.packed if counter is None or counter._version == self._version else None

    def settle(self) -> None:
        """The forward pass has ended: from now on, changes in place do no harm."""
        if self._flight.counter is not None:
            self._last, self._flight.counter = self._flight.counter._version, None
        self._wait = None
        flight, self._flight = self._flight, copy(self._flight)
        flight.packed = None  # it goes with this object, whoever still knows its way

    def result(self) -> Handle | RawActivation:
        """Returns what it was packed as, and waits for that if need be.

        Raises:
            ModifiedInPlaceError: The tensor was changed in the forward pass that saved it.
            Exception: Packing it failed.
        """
        flight = self._flight
        if (wait := self._wait) is not None:
            wait(flight)
        if flight.error is not None:
            raise flight.error
        assert flight.packed is not None
        now = self._last if flight.counter is None else flight.counter._version
        if now != self._version and isinstance(flight.packed, Handle):
            raise modified_in_place(flight.packed.shape, self._version, now)
        return flight.packed
