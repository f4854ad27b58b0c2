"""Packs on a thread of DAF's own, while the one that saves activations computes on.

That thread does all that packing takes, in the order of saving. So bytes, drops and gradients are those of packing at
once, and the saving thread only notes what there is to know of a tensor at that moment. The values of a GPU's tensors
are copied to a buffer in host memory, and encoded by the kernels of the CPU, on pages that the GPU can read.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from queue import SimpleQueue

import torch
from torch import Tensor

from daf_core.codecs import RawActivation
from daf_core.codecs.relu_signs import RELU
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.errors import ConfigError, DAFError, shown
from daf_core.memory import forks
from daf_core.memory.devices import DevicePagers
from daf_core.memory.pager import Pager
from daf_core.memory.system.mortal import at_death
from daf_core.saved_tensors.handle import Handle
from daf_core.saved_tensors.pending import PackJob, PendingActivation
from daf_kernels import HostBridge

IN_FLIGHT_BYTES = 64 << 20
"""Bytes of tensors that may be in flight: five of the largest of RoBERTa-base at batch 8 x 128."""

CPU = torch.device("cpu")

Store = Callable[[SavedTensor], Handle | RawActivation]
"""Packs one tensor."""


class BackgroundPacker:
    """The background of one forward pass. What is sent off *lands* when it is packed; all that flies is of one device.

    Nothing that is decided here depends on the clock. A tensor in flight counts against the memory budget in full, and
    its pages beside it; what is held besides is known as of the last landing that was waited for.

    Args:
        store: Packs a tensor.
        prepare: Is called first on the thread that packs.
        pagers: Where things are stored.

    Attributes:
        seconds: Time that the thread has packed.
    """

    def __init__(self, store: Store, prepare: Callable[[], None], pagers: DevicePagers) -> None:
        self.seconds = 0.0
        self._store = store
        self._prepare = prepare
        self._clock = pagers.clock
        self._pagers = pagers
        self._pager: Pager | None = None
        self._staging: Tensor | None = None
        self._window: deque[PackJob] = deque()
        self._window_bytes = 0
        self._largest = 0
        self._held_bytes = 0
        self._now: Callable[[], int] = partial(attrgetter("now"), pagers.clock)
        self._sent: list[tuple[weakref.ref[PendingActivation], object]] = []
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._landed = self._sent_until = -1
        self._landing = threading.Condition()
        self._thread: threading.Thread | None = None
        self._cancelled = False
        self._error: BaseException | None = None
        forks.follow(self)

    def admits(self, saved: SavedTensor) -> bool:
        """Says whether a tensor may be sent off, and waits for others first if need be; if not, nothing is in flight.

        What a ReLU saves is recognized by what exists at that moment.

        Raises:
            Exception: Packing one of the others failed.
        """
        size, device = saved.tensor.untyped_storage().nbytes(), saved.tensor.device
        background = (device == CPU or device in self._pagers.links) and saved.site.op != RELU
        pager = self._pagers.on(device)
        while self._window and background and not self._fits(size, pager):
            self._await_oldest()
        admitted = background and self._fits(size, pager)
        if not admitted:
            self.drain()
        self._raise_error()
        self._pager = pager
        return admitted

    def send(self, saved: SavedTensor) -> PendingActivation:
        """Has a tensor packed, for which `admits` said yes."""
        link = self._pagers.links.get(saved.tensor.device)
        if link is not None:
            saved.ordered, saved.fetch = partial(link.after, link.mark()), partial(self._fetch, link)
        flight = PackJob(saved, self._tick())
        self._sent_until = flight.time
        self._window.append(flight)
        self._window_bytes += flight.size
        self._largest = max(self._largest, flight.size)
        sent = PendingActivation(flight, self._await_reading)  # looks at the tensor, which goes when it lands
        self._put(flight)
        # What autograd lets go of goes once all is packed that was saved before.
        self._sent.append((weakref.ref(sent), at_death(sent, self._now, flight, self._queue.put)))
        return sent

    def finish(self) -> None:
        """Returns when all has landed.

        Raises:
            Exception: What the first that failed did so with.
        """
        self.drain()
        self._raise_error()

    def drain(self) -> None:
        """Returns when all has landed, and what was dropped is gone; errors are kept."""
        while self._window:
            self._await_oldest()
        if self._sent:  # what landed may have been the last to need a graph
            mark = _Mark(self._tick())
            self._put(mark)
            self._wait(mark.time)

    def close(self) -> None:
        """Ends the pass, also one that failed: what has not landed is given up."""
        self._cancelled = True
        self._queue.put(None)
        if self._thread is not None and self._thread.is_alive():  # starting it may have failed
            self._thread.join()
        while self._window:
            self._window.popleft().saved = None
        for reference, _ in self._sent:
            if (sent := reference()) is not None:
                sent.settle()

    def rest(self, seconds: float) -> None:
        """See `Worker.rest`."""
        if self._thread is not None and self._thread.is_alive():
            resting = threading.Event()
            self._queue.put(resting)
            resting.wait(seconds)

    def revive(self) -> None:
        """See `Worker.revive`; all has landed, and what autograd lets go of is still put into the same queue."""
        self._thread, self._landing = None, threading.Condition()

    def _fits(self, size: int, pager: Pager) -> bool:
        flying = self._window_bytes + size
        if flying > IN_FLIGHT_BYTES or (self._window and pager is not self._pager):
            return False
        if pager.budget is None:
            return True
        if not self._window:
            self.drain()
            self._held_bytes = pager.settle()
        return self._held_bytes + flying + max(self._largest, size) <= pager.budget

    def _await_oldest(self) -> None:
        flight = self._window[0]
        self._wait(flight.time)
        self._window.popleft().saved = None
        self._window_bytes -= flight.size
        self._held_bytes = flight.held_bytes

    def _tick(self) -> int:
        """Returns the time; what is released from now on counts after what was saved up to now."""
        self._clock.now += 1
        return self._clock.now - 1

    def _put(self, item: PackJob | _Mark) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="daf-pack", daemon=True)
            self._thread.start()
        self._queue.put(item)

    def _wait(self, landed: int) -> None:
        with self._landing:
            self._landing.wait_for(lambda: self._landed >= landed)

    def _await_reading(self, flight: PackJob) -> None:
        """Returns when a tensor may be read: when it has landed, and elsewhere than on the packing thread all others.

        A backward inside the pass runs on a thread of torch's for a GPU, and lets go of nodes that packing looks at.
        """
        packing = threading.current_thread() is self._thread
        self._wait(flight.time if packing else self._sent_until)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        """What the thread does."""
        self._prepare()
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            started = time.perf_counter()
            if isinstance(item, tuple):
                dropped_at, flight = item
                self._clock.set_back(dropped_at)
                flight.packed = None
            else:
                self._clock.set_back(item.time)
                if isinstance(item, PackJob):
                    self._pack(item)
            self.seconds += time.perf_counter() - started
            if not isinstance(item, tuple):  # another thread may drop, by its own clock
                with self._landing:
                    self._landed = item.time
                    self._landing.notify_all()

    def _pack(self, flight: PackJob) -> None:
        try:
            if self._cancelled or flight.saved is None:
                raise RuntimeError("the forward pass that saved this tensor ended with an error")
            assert self._pager is not None
            with flight.saved.ordered():
                flight.land(self._store(flight.saved), self._pager.held_bytes)
        except BaseException as error:  # the saving thread raises it
            if isinstance(error, DAFError):
                error.__traceback__ = None  # its frames would keep the tensor
            flight.fail(error)
            self._error = self._error or error

    def _fetch(self, link: HostBridge, values: Tensor) -> Tensor:
        """Returns a copy of values in host memory; the next one takes its place."""
        if self._staging is None:
            self._staging = link.reserve(IN_FLIGHT_BYTES)
        copy = self._staging[: values.nbytes].view(values.dtype).view(values.shape)
        link.copy(values, copy).synchronize()
        return copy


@dataclass(frozen=True)
class _Mark:
    """Everything before it is done.

    Attributes:
        time: Its time.
    """

    time: int


_Item = PackJob | tuple[int, PackJob] | _Mark | threading.Event
"""The pair is what autograd has let go of, and when."""


def idle_cores() -> int:
    """Returns the cores that this process may use and that torch does not."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # torchrun and accelerate start several processes on a machine, each of which sees all of its cores.
    return usable // local_processes() - torch.get_num_threads()


def local_processes() -> int:
    """Returns how many processes of this training run on this machine.

    Raises:
        ConfigError: LOCAL_WORLD_SIZE is no such number.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={shown(text)} is no number of processes; set it to that of this machine, or unset it"
        )
    return int(text)
