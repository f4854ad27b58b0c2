"""A tensor that a worker packs, and what autograd keeps of it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor
from typing_extensions import override

from daf_core.autograd.torch_private import Node, packed_for, version_counter
from daf_core.codecs.base import StoredActivation
from daf_core.codecs.raw import RawActivation, modified_in_place
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.memory.pending import Pending, Signal
from daf_core.readers.waiting import Unpack
from daf_core.saved_tensors.handle import Handle, Packed


class PackJob(Pending):
    """What the worker does with a saved tensor."""

    def __init__(self, saved: SavedTensor, time: int) -> None:
        # The tensor; its memory goes when it is packed. Its autograd node goes when the saving thread settles the job:
        # what else goes with a node must not depend on the clock.
        self.saved: SavedTensor | None = saved
        self.time = time  # when it was saved, by the clock of its thread (`ReleaseClock`)
        self.size = saved.tensor.untyped_storage().nbytes()
        # What it was packed as; None until then, and when nobody wants it any more.
        self.packed: Handle | RawActivation | None = None
        # Has the version of the tensor, where that is not kept; None until it is packed.
        self.counter: Tensor | None = None
        self.held_bytes = 0  # bytes that were held when it was packed
        self.error: BaseException | None = None  # what packing it failed with
        self.done = Signal()  # set when it is packed, or has failed

    def run(self, store: Callable[[SavedTensor], Handle | RawActivation]) -> None:
        """Packs the tensor. It may go then, and is watched for changes in place all the same."""
        assert self.saved is not None
        try:
            with self.saved.ordered():
                packed = store(self.saved)
            if isinstance(packed, Handle):  # what stays raw watches itself
                self.counter = version_counter(self.saved.tensor)
            self.packed = packed
        finally:
            del self.saved.tensor

    def drop(self) -> None:
        """Gives up what it was packed as: autograd has let go of it."""
        self.packed = None

    @override
    def settle(self) -> None:
        self.done.wait()
        self.saved = None


class PendingActivation:
    """Stands for what a tensor is going to be packed as.

    It is read at some time after it was saved. Whether a change in place came before or after that depends on the
    clock, so all changes until the forward pass ends are errors, as they are without DAF.
    `wait` returns when the job is done, and the tensor may be read.
    """

    __slots__ = ("__weakref__", "_job", "_last", "_version", "_wait", "elements", "place")

    def __init__(self, job: PackJob, wait: Callable[[PackJob], None]) -> None:
        assert job.saved is not None
        self._job = job
        self._wait: Callable[[PackJob], None] | None = wait
        self._version = self._last = job.saved.version
        self.place = job.saved.place  # where the tensor was saved; None where that is of no use
        self.elements = job.saved.tensor.numel()  # number of its elements

    @property
    def packed(self) -> Handle | RawActivation | None:
        """What it was packed as; None before that, and where it was changed: perhaps before it was read."""
        counter = self._job.counter
        return self._job.packed if counter is None or counter._version == self._version else None

    @property
    def stored(self) -> StoredActivation:
        """What is stored of it, which may have to be waited for; the errors are those of `result`."""
        return self.result().stored

    def end_pass(self) -> None:
        """Ends the forward pass: from now on, changes in place do no harm."""
        if self._job.counter is not None:
            self._last, self._job.counter = self._job.counter._version, None
        self._wait = None
        job, self._job = self._job, copy(self._job)
        job.drop()  # only this object keeps what it was packed as, whoever still knows the job

    def result(self) -> Handle | RawActivation:
        """Returns what it was packed as, and waits for that if need be.

        Raises:
            ModifiedInPlaceError: The tensor was changed in the forward pass that saved it.
            Exception: Packing it failed.
        """
        job = self._job
        if (wait := self._wait) is not None:
            wait(job)
        if job.error is not None:
            raise job.error
        assert job.packed is not None
        now = self._last if job.counter is None else job.counter._version
        if now != self._version and isinstance(job.packed, Handle):
            raise modified_in_place(job.packed.shape, self._version, now)
        return job.packed


def packed_of(node: Node, name: str, unpack: Unpack) -> Packed | None:
    """Returns what autograd keeps in place of a node's saved tensor; None where `unpack` does not give it back."""
    return packed_now(packed_for(node, name, unpack))


def packed_now(packed: Any) -> Any:
    """Returns what a tensor was packed as, if it is, for what a pack hook returned."""
    return packed.packed if isinstance(packed, PendingActivation) else packed
