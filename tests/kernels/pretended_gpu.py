"""What a host does for a GPU, where there is none: tensors of the CPU count as a GPU's, and work is written down.

Kernels are interpreted at once, and copies made; that they are done is known later, as with a GPU.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from daf_kernels import backend as memory
from daf_kernels.triton import backend, direct, flags, launch, page_tables

VIEWS = {"aten.view", "aten.unbind", "aten.select", "aten.alias", "aten.detach", "aten._unsafe_view"}
"""Operations that a GPU is not given anything to do for."""


class Stream:
    """A stream with a number."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number


class Operations(TorchDispatchMode):
    """Writes down torch's operations that a GPU has something to do for, or memory to give.

    Attributes:
        names: Those so far.
        outside: Whether what is done now does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.outside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if name not in VIEWS and not self.outside:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class PretendedGpu:
    """Counts what a host gives a GPU to do.

    Attributes:
        graph: What captures that; None where it is done at once.
        launches: Names of the kernels that were launched.
        events: Numbers of the streams that events were recorded on.
        uploads: Bytes of each tensor that was put into pinned memory, to be copied to the GPU.
        done: Whether events have come.
    """

    def __init__(self) -> None:
        self.graph: PretendedGraph | None = None
        self.launches: list[str] = []
        self.events: list[int] = []
        self.uploads: list[int] = []
        self.done = True
        self._current = threading.local()

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """What ``torch.cuda.stream`` is."""
        before, self._current.stream = self.stream, stream
        try:
            yield
        finally:
            self._current.stream = before

    @property
    def stream(self) -> Stream:
        """The stream of the calling thread."""
        return getattr(self._current, "stream", _DEFAULT)

    def event(self) -> Event:
        """What ``torch.cuda.Event`` is; while a graph is captured, an event that is asked for would end it."""
        assert self.graph is None
        return Event(self)

    def given(self) -> tuple[int, int, int]:
        """Returns how many launches, events and uploads there were."""
        return len(self.launches), len(self.events), len(self.uploads)


class PretendedGraph(TorchDispatchMode):
    """What a CUDA graph is: it keeps what a GPU is given to do, with its memory, and does it again.

    It forbids what a capture forbids, as far as torch's operators show it: to look at a value.
    """

    FORBIDDEN = ("aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.nonzero", "aten.masked_select")

    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self._gpu = gpu
        self._work: list[Callable[[], object]] = []
        self._inside_kernel = False

    @contextmanager
    def capturing(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """What ``torch.cuda.graph`` is; memory that is allocated inside is the graph's."""
        with monkeypatch.context() as patch, self:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            patch.setattr(memory, "system_memory", lambda size, _: torch.empty(size, dtype=torch.uint8))
            self._gpu.graph = self
            try:
                yield
            finally:
                self._gpu.graph = None

    def replay(self) -> None:
        """Does all of it again; what operators give goes where it went."""
        with torch._C._AutoDispatchBelowAutograd():  # where they were noticed
            for work in self._work:
                work()

    def launch(self, run: Callable[[], object]) -> None:
        """Launches a kernel."""
        self._inside_kernel = True
        run()
        self._inside_kernel = False
        self._work.append(run)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func.overloadpacket), kwargs or {}
        if self._inside_kernel:
            return func(*args, **kwargs)
        assert name not in self.FORBIDDEN, f"{name} looks at a value"
        given = func(*args, **kwargs)

        def again() -> None:
            for old, new in zip(tree_leaves(given), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)

        self._work.append(again)
        return given


class Event:
    """Comes when the GPU is done, or when it is waited for."""

    def __init__(self, gpu: PretendedGpu) -> None:
        self._gpu = gpu
        self._waited = False

    def record(self, stream: Stream) -> None:
        assert stream is self._gpu.stream
        self._gpu.events.append(stream.cuda_stream)

    def query(self) -> bool:
        return self._waited or self._gpu.done

    def synchronize(self) -> None:
        self._waited = True


_DEFAULT = Stream(0)


def _at(address: int, dtype: torch.dtype) -> Tensor:
    """Returns a tensor that begins at an address, which is all that a kernel is told of it."""
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


def pretend(monkeypatch: pytest.MonkeyPatch, operations: Operations | None = None) -> PretendedGpu:
    """Has the Triton backend take this machine's CPU for a GPU; what launching does is not among the operations."""
    gpu, run = PretendedGpu(), launch.launch

    def counted(
        kernel: Any, programs: int, pointers: Sequence[Tensor], numbers: Sequence[int], **constants: Any
    ) -> None:
        gpu.launches += [kernel.__name__] * (programs > 0)
        if gpu.graph is not None:
            gpu.graph.launch(lambda: run(kernel, programs, pointers, numbers, **constants))
            return
        if operations is not None:
            operations.outside = True
        run(kernel, programs, pointers, numbers, **constants)
        if operations is not None:
            operations.outside = False

    def pin_memory(tensor: Tensor) -> Tensor:
        assert gpu.graph is None, "a graph would copy what the host has there by then"
        gpu.uploads.append(tensor.nbytes)
        return tensor

    def prepared(
        kernel: Any, programs: int, _: object, dtypes: Sequence[torch.dtype], nbytes: int, numbers: Sequence[int],
        **constants: Any,
    ) -> Callable[..., None]:  # fmt: skip
        def run_again(stream: int, *addresses: int) -> None:
            assert stream == gpu.stream.cuda_stream
            pointers = [_at(address, dtype) for address, dtype in zip(addresses, dtypes, strict=True)]
            counted(kernel, programs, pointers, numbers, **constants)

        return run_again

    for module in (backend, launch):
        monkeypatch.setattr(module, "launch", counted)
    for module in (flags, page_tables, direct):
        monkeypatch.setattr(module, "stream_number", lambda _: gpu.stream.cuda_stream)
    monkeypatch.setattr(flags, "stream_of", lambda _: gpu.stream)
    monkeypatch.setattr(direct, "is_current", lambda _: True)
    monkeypatch.setattr(backend, "prepared", prepared)
    monkeypatch.setattr(torch.cuda, "stream", gpu.on)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    return gpu
