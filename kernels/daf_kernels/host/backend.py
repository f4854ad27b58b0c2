"""The kernels of a GPU together with those of its host: either encodes what lies in its memory, and the GPU decodes."""

from __future__ import annotations

from torch import Tensor

from daf_kernels.backend import Backend, DeviceFlag, PageMemory, Pages, Seed, TwoValues
from daf_kernels.host.link import HostBridge
from daf_kernels.layout import PlaneLayout


class HostPackedBackend:
    """Kernels of two devices that give the same bytes; see `daf_kernels.backend.Backend` for the contract.

    What the host encodes must lie on pages that the device can read.

    Args:
        device: Kernels of the device.
        host: Kernels for tensors in the memory of its host.
        link: What connects them.
    """

    def __init__(self, device: Backend, host: Backend, link: HostBridge) -> None:
        self._device = device
        self._host = host
        self._link = link

    def limit_threads(self, count: int) -> None:
        """See `Backend.limit_threads`."""
        self._host.limit_threads(count)

    def relative_range(self, values: Tensor, layout: PlaneLayout) -> float:
        """See `Backend.relative_range`."""
        return self._of(values).relative_range(values, layout)

    def encode(
        self, values: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages, seed: Seed | None
    ) -> bool | DeviceFlag:
        """See `Backend.encode`."""
        return self._of(values).encode(values, layout, planes, memory, pages, seed)

    def decode(self, out: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.decode`."""
        self._device.decode(out, layout, planes, memory, pages)
        self._link.note_reads()

    def encode_slopes(
        self, values: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages
    ) -> bool | DeviceFlag:
        """See `Backend.encode_slopes`."""
        return self._of(values).encode_slopes(values, layout, planes, memory, pages)

    def decode_slopes(self, out: Tensor, layout: PlaneLayout, planes: int, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.decode_slopes`."""
        self._device.decode_slopes(out, layout, planes, memory, pages)
        self._link.note_reads()

    def two_values(self, values: Tensor) -> TwoValues | None:
        """See `Backend.two_values`: what is no mask to the device is none to its host, or the bytes would differ."""
        return self._device.two_values(values)

    def encode_mask(self, values: Tensor, two: TwoValues, memory: PageMemory, pages: Pages) -> bool:
        """See `Backend.encode_mask`."""
        return self._of(values).encode_mask(values, two, memory, pages)

    def decode_mask(self, out: Tensor, two: TwoValues, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.decode_mask`."""
        self._device.decode_mask(out, two, memory, pages)
        self._link.note_reads()

    def encode_nonzero(self, values: Tensor, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.encode_nonzero`."""
        self._of(values).encode_nonzero(values, memory, pages)

    def rectify(self, out: Tensor, memory: PageMemory, pages: Pages) -> None:
        """See `Backend.rectify`."""
        self._device.rectify(out, memory, pages)
        self._link.note_reads()

    def _of(self, values: Tensor) -> Backend:
        return self._host if values.device.type == "cpu" else self._device
