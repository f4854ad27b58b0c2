"""What the engine asks of a kernel backend, and what a backend asks of the memory that holds its pages."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from daf_kernels.layout import PlaneLayout


class WrongBytesError(RuntimeError):
    """Kernels do not give what they have to."""


Seed = tuple[int, int, int, int]
"""Words of 32 bits that select a stream of random numbers: (key low, key high, counter low, counter high)."""

Pages = np.ndarray[Any, np.dtype[np.int64]]
"""Page numbers of one activation, in the order of `PlaneLayout`: header, plane 0, plane 1 and so on."""

TwoValues = tuple[int, int]
"""The bits of the two values of a mask, as unsigned integers of the element's size: for bit 0 and for bit 1."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_capturing() -> bool:
    """Says whether what the calling thread gives a GPU is captured in a CUDA graph, which runs it again and again.

    Meanwhile no value can be looked at, and nothing of the host's is part of what runs.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def bits_of_elements(values: Tensor) -> Tensor:
    """Returns the bits of all elements as integers of their width, of shape (elements,)."""
    return values.reshape(-1).view(_INTEGERS[values.element_size()])


def bits_of_number(number: float, dtype: torch.dtype) -> int:
    """Returns the bits of a number as an integer; those of a negative one are negative."""
    return int(bits_of_elements(torch.tensor(number, dtype=dtype, device="cpu")))


def signed_words(two: TwoValues) -> tuple[int, int]:
    """Returns the bits of two values as kernels take integers: 64 bits with a sign."""
    zero, one = (bits - (1 << 64) if bits >> 63 else bits for bits in two)
    return zero, one


class PageMemory(Protocol):
    """Memory cut into pages of one size."""

    @property
    def page_bytes(self) -> int:
        """Bytes in a page."""
        ...

    def addresses(self, pages: Pages) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Returns the memory address of each page."""
        ...

    def read(self, pages: Pages) -> Tensor:
        """Returns a copy of the pages, uint8 of shape (pages, page_bytes)."""
        ...

    def write(self, pages: Pages, content: Tensor) -> None:
        """Fills the pages with uint8 content of shape (pages, page_bytes)."""
        ...


class FixedPages:
    """A `PageMemory` of one region.

    Args:
        count: Number of pages.
        page_bytes: Bytes in a page.
        device: Where the region lies.
        reserve: Returns so many uninitialized bytes there; by default as suits the device.
    """

    def __init__(
        self,
        count: int,
        page_bytes: int,
        device: torch.device | None = None,
        reserve: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.page_bytes = page_bytes
        size = count * page_bytes
        region = system_memory(size, device or torch.device("cpu")) if reserve is None else reserve(size)
        self._region = region.view(count, page_bytes)
        # Torch copies element by element: 8 MB of pages took 13 ms as bytes, and take 1.
        self._words = self._region.view(torch.int64)

    def addresses(self, pages: Pages) -> np.ndarray[Any, np.dtype[np.int64]]:
        """See `PageMemory.addresses`."""
        return pages * self.page_bytes + self._region.data_ptr()

    def read(self, pages: Pages) -> Tensor:
        """See `PageMemory.read`."""
        return self._words.index_select(0, self._rows(pages)).view(torch.uint8)

    def write(self, pages: Pages, content: Tensor) -> None:
        """See `PageMemory.write`."""
        self._words[self._rows(pages)] = content.view(torch.int64)

    def run(self, first: int, stop: int) -> Tensor:
        """Returns the memory of neighbouring pages, uint8 of shape (stop - first, page_bytes)."""
        return self._region[first:stop]

    def _rows(self, pages: Pages) -> Tensor:
        """Returns which rows of the region are meant, where it lies; what copies them may do so on any stream."""
        region = self._region
        if region.is_cuda:  # freed earlier, it would be used for something else before they are copied
            region.record_stream(torch.cuda.current_stream(region.device))
        return torch.from_numpy(pages).to(region.device, non_blocking=True)


def system_memory(size: int, device: torch.device) -> Tensor:
    """Returns uninitialized bytes of a device.

    On a CPU they are a mapping of their own, which takes memory when it is written to and gives all of it back when it
    dies. An allocator may keep what is freed: glibc does, below 32 MB.

    Raises:
        MemoryError: The system has no memory for it.
    """
    if device.type != "cpu" or os.name != "posix":
        return torch.empty(size, dtype=torch.uint8, device=device)
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system gives no {size / 1e6:.0f} MB for pages: {error}") from error
    return torch.frombuffer(mapping, dtype=torch.uint8)


class DeviceFlag(Protocol):
    """A yes or no that a device is working out."""

    def ask(self) -> None:
        """Has the device send it, without waiting, together with all that it has not sent yet."""
        ...

    @property
    def is_known(self) -> bool:
        """Whether it was asked for and can be had without waiting."""
        ...

    def __bool__(self) -> bool:
        """Returns it; asks and waits for it if need be."""
        ...


class PageAddresses:
    """Where the pages of one activation lie, which they do as long as this exists.

    Attributes:
        numbers: The address of each page, int64 of shape (pages,).
        origin: The address of `numbers`.
        table: For a GPU's backend, which keeps here what its kernels read instead.
    """

    __slots__ = ("numbers", "origin", "table")

    def __init__(self, numbers: Pages) -> None:
        self.numbers = numbers
        self.origin: int = numbers.ctypes.data
        self.table: object = None


Answer = tuple[int, int, int, DeviceFlag | None]
"""Of an encoding by address: 0, or what tells that the elements need another form; the bits of the two values that they
have, if it is for masks; and what the device will say, whether the codes stand for them, where it works that out."""


class DirectCodec(Protocol):
    """Encodes and decodes dense tensors of one size and type by address."""

    def encode(self, origin: int, pages: PageAddresses) -> Answer:
        """Encodes the elements at an address."""
        ...

    def decode(self, out: int, pages: PageAddresses, two: TwoValues) -> bool:
        """Decodes to an address, unless it answers False; `two` are the two values of a mask."""
        ...

    def is_mask(self, origin: int) -> bool:
        """Says whether the elements at an address begin with two values alone."""
        ...


class Backend(Protocol):
    """Kernels for one kind of device. Tensors are taken in row-major order of their shape, whatever their strides."""

    def limit_threads(self, count: int) -> None:
        """Has kernels that the calling thread starts run on so many threads at most, instead of torch's number."""

    def relative_range(self, values: Tensor, layout: PlaneLayout) -> float:
        """Returns the squared range of scaling groups over their variance, both summed over `layout.sampled_groups`.

        It is 12 for evenly spread values, 30 to 40 for normal ones, more for heavier tails, 0 for constant groups,
        infinite or NaN where a sampled group is not finite.
        """
        ...

    def encode(
        self, values: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages, seed: Seed | None
    ) -> bool | DeviceFlag:
        """Encodes `values` into the header and the first `planes` planes in `pages`; `planes` may be 0.

        Answers False where a scaling group is not finite and will decode to NaN.
        """
        ...

    def decode(self, out: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages) -> None:
        """Decodes the first `planes` planes in `pages` into `out`."""

    def encode_slopes(
        self, values: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages
    ) -> bool | DeviceFlag:
        """Encodes GELU's derivative at `values` into the first `planes` planes in `pages`; the layout has no groups.

        Answers False where a value is not finite.
        """
        ...

    def decode_slopes(self, out: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages) -> None:
        """Decodes the first `planes` planes in `pages` into inputs that have these derivatives."""

    def two_values(self, values: Tensor) -> TwoValues | None:
        """Returns the two values that `values` may consist of, or None where its beginning holds a third."""
        ...

    def encode_mask(self, values: Tensor, two: TwoValues, memory: PageMemory, pages: Pages) -> bool:
        """Packs `values` at one bit each; False where one of them is neither of the `two`, compared bit by bit."""
        ...

    def decode_mask(self, out: Tensor, two: TwoValues, memory: PageMemory, pages: Pages) -> None:
        """Unpacks a mask into `out`."""

    def encode_nonzero(self, values: Tensor, memory: PageMemory, pages: Pages) -> None:
        """Packs where float `values` are not zero, of either sign, at one bit each."""

    def rectify(self, out: Tensor, memory: PageMemory, pages: Pages) -> None:
        """Sets `out` to 0 where `encode_nonzero` saw 0, and to at least the smallest normal number elsewhere."""


@runtime_checkable
class DirectBackend(Protocol):
    """A backend that also works by address."""

    def direct_planes(
        self, layout: PlaneLayout, planes: int, dtype: torch.dtype, row: int, device: torch.device
    ) -> DirectCodec | None:
        """Returns what encodes dense tensors as `Backend.encode` does, rounded to nearest, and decodes them.

        None where that takes more: on a CPU, where a tensor is so large that several threads encode it, and on a GPU,
        where no tensor like it was encoded yet. `row` are the elements in each of the rows that are normalized, and
        have to be alike; 0 where they need not.
        """
        ...

    def direct_mask(
        self, elements: int, dtype: torch.dtype, page_bytes: int, device: torch.device
    ) -> DirectCodec | None:
        """Returns what packs dense tensors as `two_values` and `encode_mask` do, in one call; None as above."""
        ...
