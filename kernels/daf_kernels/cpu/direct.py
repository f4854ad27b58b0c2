"""Encodes tensors of one size with one call into compiled code, for callers that have decided all else before.

What `CpuBackend` does in ten functions of Python takes as long as the kernel itself where a tensor has 8,192 elements.
Bytes and answers are the same.
"""

from __future__ import annotations

import threading

import numpy as np
from numba import njit

from daf_kernels.backend import TwoValues
from daf_kernels.cpu.bits import I64, INLINE, i64_at
from daf_kernels.cpu.compile_cache import kernel
from daf_kernels.cpu.masks import probe
from daf_kernels.cpu.thread_team import FIRST, PAGES, RESULT, SCRATCH, STEP, STOP, STRIDE, WORDS, WORDS_BYTES, call_job
from daf_kernels.layout import BLOCK

TWO_VALUES, WORDS_OF_VALUES = -1, WORDS + 5
"""Answer where a tensor consists of two values, and where the values of a mask are among the words of a job."""


@njit(**INLINE)
def _fill(words, given, count, origin, scratch, pages, page_count):
    source = i64_at(given)
    for index in range(count):
        words[index] = source[index]
    words[WORDS], words[SCRATCH] = origin, scratch + WORDS_BYTES
    words[PAGES], words[PAGES + 1] = pages, page_count


@kernel
def encode_planes(job, given, count, size, origin, scratch, pages, page_count):
    """Encodes a tensor into planes; the answer is that of the job, or `TWO_VALUES` where it is one for a mask.

    Args:
        job: Address of the job.
        given: Address of its words, all filled in but for addresses.
        count: How many words there are.
        size: Bytes of an element.
        origin: Address of the elements.
        scratch: Address of scratch memory.
        pages: Address of the addresses of pages.
        page_count: How many pages there are.
    """
    words = i64_at(scratch)
    _fill(words, given, count, origin, scratch, pages, page_count)
    _, _, others = probe(origin, size, words[STOP], scratch + WORDS_BYTES)
    if others == 0:
        return I64(TWO_VALUES)
    call_job(job, scratch)
    return words[RESULT]


@kernel
def encode_mask(job, given, count, size, origin, scratch, pages, page_count):
    """Packs a tensor of two values; the arguments are those of `encode_planes`.

    Returns:
        How many others there are among its first elements, or beyond them; the bits of the two values.
    """
    words = i64_at(scratch)
    _fill(words, given, count, origin, scratch, pages, page_count)
    zero, one, others = probe(origin, size, words[STOP], scratch + WORDS_BYTES)
    if others == 0:
        words[WORDS_OF_VALUES], words[WORDS_OF_VALUES + 1] = I64(zero), I64(one)
        call_job(job, scratch)
        others = words[RESULT]
    return others, zero, one


class _Scratch(threading.local):
    """Memory of one thread for the words of a job and what it works on."""

    def __init__(self, size: int) -> None:
        self._buffer = np.empty(size + 64, np.uint8)
        self.address = -(-self._buffer.ctypes.data // 64) * 64


class DirectEncoder:
    """Encodes dense tensors of one size, on the calling thread alone.

    Args:
        job: Address of a kernel's job.
        words: The job's words, with zeros for addresses of elements and pages.
        elements: Elements of a tensor.
        size: Bytes of an element.
        page_bytes: Bytes of a page.
        scratch: Bytes of scratch memory that the job needs.
    """

    def __init__(self, job: int, words: np.ndarray, elements: int, size: int, page_bytes: int, scratch: int) -> None:
        self._words = words.copy()
        self._words[[FIRST, STOP, STEP, STRIDE]] = 0, elements, elements, scratch
        self._words[WORDS + 2] = page_bytes.bit_length() - 1
        self._size, self._elements = size, elements
        self._given = (job, self._words.ctypes.data, self._words.size, size)
        self._scratch = _Scratch(WORDS_BYTES + max(scratch, BLOCK))

    def planes(self, origin: int, pages: int, count: int) -> int:
        """Encodes the elements at an address into planes on `count` pages, whose addresses lie at `pages`.

        Returns:
            0, or the number of scaling groups that are not finite, or `TWO_VALUES`: nothing was written then.
        """
        return encode_planes(*self._given, origin, self._scratch.address, pages, count)

    def is_mask(self, origin: int) -> bool:
        """Says whether the elements at an address begin with two values alone."""
        return probe(origin, self._size, self._elements, self._scratch.address)[2] == 0

    def mask(self, origin: int, pages: int, count: int) -> TwoValues | None:
        """Packs the elements at an address at one bit each; None where they have more than two values."""
        others, zero, one = encode_mask(*self._given, origin, self._scratch.address, pages, count)
        return None if others else (zero, one)
