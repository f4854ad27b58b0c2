"""Packs on a worker thread while the thread that saves activations computes on.

The worker packs in the order of saving. So bytes, drops and gradients are those of packing at once, and the saving
thread only captures what is known of a tensor at that moment alone. The values of a GPU's tensors are copied to a
buffer in host memory, and encoded by the kernels of the CPU, on pages that the GPU can read.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from queue import SimpleQueue

import torch
from torch import Tensor

from daf_core.codecs.raw import RawActivation
from daf_core.codecs.relu_signs import RELU
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.errors import DAFError
from daf_core.memory import forks
from daf_core.memory.devices import DevicePagers
from daf_core.memory.pager import Pager
from daf_core.memory.pending import PENDING_BYTES, PendingWindow, Signal
from daf_core.memory.system.mortal import at_death
from daf_core.saved_tensors.handle import Handle
from daf_core.saved_tensors.pending import PackJob, PendingActivation
from daf_kernels import HostBridge

CPU = torch.device("cpu")

Task = tuple[int, Callable[[], object]]
"""What the worker does, and the time of the saving thread at which it was asked for."""


class BackgroundPacker:
    """The worker of one forward pass.

    Nothing that is decided here depends on the clock. A pending tensor counts against the memory budget in full, and so
    do its pages; what is held besides is known as of the last job that was waited for. All pending tensors are of one
    device.
    `prepare` is called first on the worker.
    """

    def __init__(
        self,
        store: Callable[[SavedTensor], Handle | RawActivation],
        prepare: Callable[[], None],
        pagers: DevicePagers,
    ) -> None:
        self.seconds = 0.0  # time that the worker has packed
        self._store = store
        self._prepare = prepare
        self._clock = pagers.clock
        self._now: Callable[[], int] = partial(attrgetter("now"), pagers.clock)
        self._pagers = pagers
        self._pager: Pager | None = None
        self._staging: Tensor | None = None
        self._window: PendingWindow[PackJob] = PendingWindow()
        self._largest = self._held_bytes = 0
        self._last: PackJob | None = None
        self._sent: list[tuple[weakref.ref[PendingActivation], object]] = []
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._error: BaseException | None = None
        forks.follow(self)

    def admits(self, saved: SavedTensor) -> bool:
        """Says whether the worker may pack a tensor, after waiting for others if need be; if not, none is pending.

        What a ReLU saves is recognized by what exists at that moment, and a dropout's argument is read then.

        Raises:
            Exception: Packing one of the others failed.
        """
        size, device = saved.tensor.untyped_storage().nbytes(), saved.tensor.device
        possible = (device == CPU or device in self._pagers.links) and saved.site.op != RELU and saved.argument is None
        pager = self._pagers.on(device)
        while self._window and possible and not self._fits(size, pager):
            self._settle_oldest()
        admitted = possible and self._fits(size, pager)
        if not admitted:
            self.drain()
        self._raise_error()
        self._pager = pager
        return admitted

    def send(self, saved: SavedTensor) -> PendingActivation:
        """Has the worker pack a tensor, for which `admits` said yes."""
        link = self._pagers.links.get(saved.tensor.device)
        if link is not None:
            saved.ordered, saved.fetch = partial(link.after, link.mark()), partial(self._fetch, link)
        self._last = job = PackJob(saved, self._tick())
        self._window.add(job, lambda: job)
        self._largest = max(self._largest, job.size)
        sent = PendingActivation(job, self._await_reading)  # looks at the tensor, which goes when it is packed
        self._put(job.time, partial(self._pack, job))
        # What autograd lets go of goes once all is packed that was saved before.
        self._sent.append((weakref.ref(sent), at_death(sent, self._now, job.drop, self._tasks.put)))
        return sent

    def finish(self) -> None:
        """Returns when all is packed.

        Raises:
            Exception: The first error of the worker.
        """
        self.drain()
        self._raise_error()

    def drain(self) -> None:
        """Returns when all is packed, and what was dropped is gone; errors are kept."""
        if self._closed:
            return
        while self._window:
            self._settle_oldest()
        if self._sent:  # what was packed last may have been the last to need a graph
            done = Signal()
            self._put(self._tick(), done.set)
            done.wait()

    def close(self) -> None:
        """Ends the pass, also one that failed: what is not packed yet is given up. May be called again."""
        self._closed = True
        self._tasks.put(None)
        if self._thread is not None and self._thread.is_alive():  # starting it may have failed
            self._thread.join()
        while self._window:
            job = self._window.oldest
            assert job is not None
            job.done.set()
            self._window.settle_oldest()
        for reference, _ in self._sent:
            if (sent := reference()) is not None:
                sent.end_pass()
        self._sent.clear()

    def rest(self, seconds: float) -> None:
        """See `Worker.rest`."""
        if self._thread is not None and self._thread.is_alive():
            resting = threading.Event()
            self._tasks.put((0, resting.set))
            resting.wait(seconds)

    def revive(self) -> None:
        """See `Worker.revive`; all is packed, and what autograd lets go of is still put into the same queue."""
        self._thread = None

    def _fits(self, size: int, pager: Pager) -> bool:
        pending = self._window.size + size
        if pending > PENDING_BYTES or (self._window and pager is not self._pager):
            return False
        if pager.budget is None:
            return True
        if not self._window:
            self.drain()
            self._held_bytes = pager.settle()
        return self._held_bytes + pending + max(self._largest, size) <= pager.budget

    def _settle_oldest(self) -> None:
        job = self._window.settle_oldest()
        assert job is not None
        self._held_bytes = job.held_bytes

    def _tick(self) -> int:
        """Returns the time; what is released from now on counts after what was saved up to now."""
        self._clock.now += 1
        return self._clock.now - 1

    def _put(self, now: int, task: Callable[[], object]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="daf-pack", daemon=True)
            self._thread.start()
        self._tasks.put((now, task))

    def _await_reading(self, job: PackJob) -> None:
        """Returns when a tensor may be read: when it is packed, and, except on the worker, when all others are.

        A backward inside the pass runs on a thread of torch's for a GPU, and lets go of nodes that packing looks at.
        """
        last = job if threading.current_thread() is self._thread or self._last is None else self._last
        last.done.wait()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        """What the worker does."""
        self._prepare()
        while (item := self._tasks.get()) is not None:
            started = time.perf_counter()
            now, task = item
            self._clock.now = self._clock.horizon = now  # when what is packed now was saved
            task()
            self.seconds += time.perf_counter() - started

    def _pack(self, job: PackJob) -> None:
        try:
            if self._closed:
                job.error = RuntimeError("the forward pass that saved this tensor ended with an error")
            else:
                assert self._pager is not None
                job.run(self._store)
                job.held_bytes = self._pager.held_bytes
        except BaseException as error:  # the saving thread raises it
            if isinstance(error, DAFError):
                error.__traceback__ = None  # its frames would keep the tensor
            job.error = error
            self._error = self._error or error
        job.done.set()

    def _fetch(self, link: HostBridge, values: Tensor) -> Tensor:
        """Returns a copy of values in host memory; the next one takes its place."""
        if self._staging is None:
            self._staging = link.reserve(PENDING_BYTES)
        copy = self._staging[: values.nbytes].view(values.dtype).view(values.shape)
        link.copy(values, copy).synchronize()
        return copy
