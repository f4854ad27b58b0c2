"""Launches what encodes and decodes tensors of one size by their addresses, for callers that have decided all else.

What `TritonBackend` does in twenty functions of Python takes ten times as long as the kernel. Bytes and answers are the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from daf_kernels.backend import Answer, PageAddresses, TwoValues
from daf_kernels.triton.flags import Flags
from daf_kernels.triton.launch import ALIGNMENT, Launch, is_current, stream_number
from daf_kernels.triton.page_tables import upload

DECLINED: Answer = (-1, 0, 0, None)
"""The answer where the kernels that are known do not fit."""

Launches = Sequence[Launch]


class _Table(NamedTuple):
    """Addresses of pages on a GPU, written on a stream."""

    stream: int
    address: int
    numbers: Tensor


class DirectCodec:
    """Launches the kernels for dense tensors of one size on the calling thread's stream.

    Args:
        device: The GPU.
        encodes: Launches with the addresses of the elements, of those of the pages, and of a flag if there are flags.
        decodes: Returns launches with the first two of these; None as long as no tensor like these was decoded.
        flags: Gets what kernels find; None for kernels that find nothing.
    """

    __slots__ = ("_alone", "_device", "_encodes", "_find_decodes", "_flags", "_known_decodes")

    def __init__(
        self, device: torch.device, encodes: Launches, decodes: Callable[[], Launches | None], flags: Flags | None
    ) -> None:
        self._device = device
        self._alone = torch.cuda.device_count() == 1  # then it is current
        self._encodes, self._find_decodes = encodes, decodes
        self._flags = flags
        self._known_decodes: Launches | None = None

    def encode(self, origin: int, pages: PageAddresses) -> Answer:
        """See `daf_kernels.DirectCodec`."""
        if origin % ALIGNMENT or not (self._alone or is_current(self._device)):
            return DECLINED
        stream, table = self._table(pages)
        if self._flags is None:
            for launch in self._encodes:
                launch(stream, origin, table)
            return 0, 0, 1, None
        flag = self._flags.take(self._device)
        for launch in self._encodes:
            launch(stream, origin, table, flag.address)
        answer = flag.unless()
        assert not isinstance(answer, bool)
        return 0, 0, 1, answer

    def decode(self, out: int, pages: PageAddresses, two: TwoValues) -> bool:
        """See `daf_kernels.DirectCodec`."""
        if self._known_decodes is None:
            self._known_decodes = self._find_decodes()
        if self._known_decodes is None or out % ALIGNMENT or not (self._alone or is_current(self._device)):
            return False
        stream, table = self._table(pages)
        for launch in self._known_decodes:
            launch(stream, out, table)
        return True

    def is_mask(self, origin: int) -> bool:
        """See `daf_kernels.DirectCodec`; a GPU's floats are not looked at."""
        return False

    def _table(self, pages: PageAddresses) -> tuple[int, int]:
        """Returns the calling thread's stream, and the address of the addresses of pages for its kernels."""
        stream, table = stream_number(self._device), pages.table
        assert stream is not None
        if type(table) is not _Table or table.stream != stream:
            numbers = upload(pages.numbers, self._device)
            table = pages.table = _Table(stream, numbers.data_ptr(), numbers)
        return stream, table.address
