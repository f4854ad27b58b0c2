"""Encodes and decodes tensors of one size with one call into compiled code, for callers that have decided all else.

What `CpuBackend` does in ten functions of Python takes as long as the kernel itself where a tensor has 8,192 elements.
Bytes and answers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numba import njit

from daf_kernels.backend import Answer, PageAddresses, TwoValues
from daf_kernels.cpu.bits import F32, I64, INLINE, i32_at, i64_at
from daf_kernels.cpu.compile_cache import kernel
from daf_kernels.cpu.jobs import Kernel
from daf_kernels.cpu.masks import probe
from daf_kernels.cpu.ranges import value_range
from daf_kernels.cpu.thread_team import (
    FIRST,
    PAGES,
    RESULT,
    SCRATCH,
    STEP,
    STOP,
    STRIDE,
    WORDS,
    WORDS_BYTES,
    Scratch,
    call_job,
)
from daf_kernels.layout import BLOCK, LARGEST_SPREAD_RATIO

DECLINED, WORDS_OF_VALUES = -1, WORDS + 5
"""Answer where a tensor has to take another form, and where the values of a mask are among the words of a job."""

_JOB, _COUNT, _SIZE, _PAGES, _ROW, _OWN = range(6)
"""Words before those of a job: its address, how many words follow, bytes of an element, how many pages there are, and
elements in a row of which the spreads are compared: 0 where they are not, `_MASK` where there are two values alone."""

_MASK = -1


@njit(**INLINE)
def _fill(words, known, origin, scratch, pages):
    for index in range(known[_COUNT]):
        words[index] = known[_OWN + index]
    words[WORDS], words[SCRATCH] = origin, scratch + WORDS_BYTES
    words[PAGES], words[PAGES + 1] = pages, known[_PAGES]


@njit(**INLINE)
def _spreads_differ(origin, count, row):
    """As `daf_core.codecs.planes.spreads_differ`, of float32."""
    least, most, known = F32(np.inf), F32(0.0), True
    for first in range(0, count, row):
        _, spread = value_range(i32_at(origin + 4 * first), row)
        known &= spread == spread
        least, most = min(least, spread), max(most, spread)
    return known and least * F32(LARGEST_SPREAD_RATIO) < most


@kernel
def encode(given, origin, scratch, pages):
    """Encodes a tensor.

    Args:
        given: Address of the words before those of a job, which follow, all filled in but for addresses.
        origin: Address of the elements.
        scratch: Address of scratch memory.
        pages: Address of the addresses of pages.

    Returns:
        0, or what the job answers, or `DECLINED`; the bits of the first two values.
    """
    words, known = i64_at(scratch), i64_at(given)
    _fill(words, known, origin, scratch, pages)
    row = known[_ROW]
    zero, one, others = probe(origin, known[_SIZE], words[STOP], scratch + WORDS_BYTES)
    if (others == 0) != (row == _MASK) or (row > 0 and _spreads_differ(origin, words[STOP], row)):
        return I64(DECLINED), zero, one
    if row == _MASK:
        words[WORDS_OF_VALUES], words[WORDS_OF_VALUES + 1] = I64(zero), I64(one)
    call_job(known[_JOB], scratch)
    return words[RESULT], zero, one


@kernel
def decode(given, out, scratch, pages, zero, one):
    """Decodes a tensor to address `out`: the arguments are those of `encode`, and its two values if it is a mask."""
    words, known = i64_at(scratch), i64_at(given)
    _fill(words, known, out, scratch, pages)
    if known[_ROW] == _MASK:
        words[WORDS_OF_VALUES], words[WORDS_OF_VALUES + 1] = zero, one
    call_job(known[_JOB], scratch)


_scratch = Scratch()


class DirectCodec:
    """Encodes and decodes dense tensors of one size, on the calling thread alone.

    Args:
        kernels: Those that encode and decode.
        elements: Elements of a tensor.
        size: Bytes of an element.
        page_bytes: Bytes of a page.
        pages: How many pages it takes.
        row: Elements in the rows of which the spreads are compared; None for a tensor of two values.
    """

    __slots__ = ("_count", "_decodes", "_encodes", "_kernels", "_scratch", "_size", "_words")

    def __init__(
        self,
        kernels: Sequence[Kernel],
        elements: int,
        size: int,
        page_bytes: int,
        pages: int,
        row: int | None,
    ) -> None:
        self._kernels = kernels  # whose words refer to what they keep
        self._words: list[npt.NDArray[np.int64]] = []
        for each in kernels:
            head = np.array([each.job, each.count, size, pages, _MASK if row is None else row])
            given = np.concatenate([head, each.words])
            own = given[_OWN:]
            own[[FIRST, STOP, STEP, STRIDE]] = 0, elements, elements, each.stride
            own[WORDS + 2] = page_bytes.bit_length() - 1
            self._words.append(given)
        self._encodes, self._decodes = (int(given.ctypes.data) for given in self._words)
        self._scratch = WORDS_BYTES + max(BLOCK, *(each.stride for each in kernels))
        self._size, self._count = size, elements

    def encode(self, origin: int, pages: PageAddresses) -> Answer:
        """See `daf_kernels.DirectCodec`."""
        if _scratch.size < self._scratch:
            _scratch.reserve(self._scratch)
        answer, zero, one = encode(self._encodes, origin, _scratch.address, pages.origin)
        return answer, zero, one, None

    def decode(self, out: int, pages: PageAddresses, two: TwoValues) -> bool:
        """See `daf_kernels.DirectCodec`."""
        if _scratch.size < self._scratch:
            _scratch.reserve(self._scratch)
        decode(self._decodes, out, _scratch.address, pages.origin, *two)
        return True

    def is_mask(self, origin: int) -> bool:
        """See `daf_kernels.DirectCodec`."""
        if _scratch.size < self._scratch:
            _scratch.reserve(self._scratch)
        return probe(origin, self._size, self._count, _scratch.address)[2] == 0
