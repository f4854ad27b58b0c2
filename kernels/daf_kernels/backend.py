"""What the engine asks of a kernel backend, and what a backend asks of the memory that holds its pages."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from daf_kernels.layout import PlaneLayout
from daf_kernels.reference import Seed

Pages = npt.NDArray[np.int64]
"""Page numbers of one activation, in the order of `PlaneLayout`: header, plane 0, plane 1 and so on."""

TwoValues = tuple[int, int]
"""The bits of the two values of a mask, as unsigned integers of the element's size: for bit 0 and for bit 1."""


class PageMemory(Protocol):
    """Memory cut into pages of one size."""

    @property
    def page_bytes(self) -> int:
        """Bytes in a page."""
        ...

    def addresses(self, pages: Pages) -> npt.NDArray[np.int64]:
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
    """

    def __init__(self, count: int, page_bytes: int, device: torch.device | None = None) -> None:
        self.page_bytes = page_bytes
        self._region = torch.empty((count, page_bytes), dtype=torch.uint8, device=device)

    def addresses(self, pages: Pages) -> npt.NDArray[np.int64]:
        """See `PageMemory.addresses`."""
        return pages * self.page_bytes + self._region.data_ptr()

    def read(self, pages: Pages) -> Tensor:
        """See `PageMemory.read`."""
        return self._region[torch.from_numpy(pages).to(self._region.device)]

    def write(self, pages: Pages, content: Tensor) -> None:
        """See `PageMemory.write`."""
        self._region[torch.from_numpy(pages).to(self._region.device)] = content


class Backend(Protocol):
    """Kernels for one kind of device. Tensors are taken in row-major order of their shape, whatever their strides."""

    def encode(
        self, values: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages, seed: Seed | None
    ) -> bool:
        """Encodes `values` into `pages`; False where a scaling group is not finite and will decode to NaN."""
        ...

    def decode(self, out: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages) -> None:
        """Decodes the first `planes` planes in `pages` into `out`."""
        ...

    def two_values(self, values: Tensor) -> TwoValues | None:
        """Returns the two values that `values` may consist of, or None where its beginning holds a third."""
        ...

    def encode_mask(self, values: Tensor, two: TwoValues, memory: PageMemory, pages: Pages) -> bool:
        """Packs `values` at one bit each; False where one of them is neither of the `two`, compared bit by bit."""
        ...

    def decode_mask(self, out: Tensor, two: TwoValues, memory: PageMemory, pages: Pages) -> None:
        """Unpacks a mask into `out`."""
        ...

    def encode_nonzero(self, values: Tensor, memory: PageMemory, pages: Pages) -> None:
        """Packs where float `values` are not zero, of either sign, at one bit each."""
        ...

    def rectify(self, out: Tensor, memory: PageMemory, pages: Pages) -> None:
        """Sets `out` to 0 where `encode_nonzero` saw 0, and to at least the smallest normal number elsewhere."""
        ...
