"""The CPU kernels as jobs of a team of threads: arguments from words, elements part by part until none is left."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import carray

from daf_kernels.backend import Pages
from daf_kernels.cpu import gelu_derivative as cpu_slopes
from daf_kernels.cpu import masks as cpu_masks
from daf_kernels.cpu import planes as cpu_planes
from daf_kernels.cpu.bits import F32, I64, U64, f32_at, u64_at
from daf_kernels.cpu.compile_cache import c_function
from daf_kernels.cpu.thread_team import JOB, PAGES, WORDS, add_result, array_at, own_scratch, parts
from daf_kernels.layout import BLOCK

TILE = 4096
"""Elements encoded at a time: 16 kB of float32 stay in the first-level cache, 32 kB do not beside the codes."""

MEMORY, KIND, SHIFT, STARTS, OWN = WORDS, WORDS + 1, WORDS + 2, WORDS + 3, WORDS + 5
"""Words of every kernel: address of the elements, their type or size, binary logarithm of the page size, address and
length of an array of where planes begin; then the kernel's own."""


def encode_planes(words):
    """See `cpu_planes.encode_planes`; own words: group, tile, planes, levels, bytes of noise, address of the seed."""
    pages, starts, seed = array_at(words, PAGES), array_at(words, STARTS), carray(u64_at(words[OWN + 5]), (4,))
    group, tile, noise_bytes = words[OWN], words[OWN + 1], words[OWN + 4]
    codes = own_scratch(words)
    noise, work = codes + tile if noise_bytes != 0 else I64(0), codes + tile + noise_bytes
    for first, stop in parts(words):
        bad = cpu_planes.encode_planes(
            words[MEMORY], words[KIND], first, stop, group, tile, words[OWN + 2], F32(words[OWN + 3]), seed, pages,
            starts, words[SHIFT], codes, noise, work,
        )  # fmt: skip
        add_result(words, bad)


def decode_planes(words):
    """See `cpu_planes.decode_planes`; own words: group, tile, planes."""
    pages, starts = array_at(words, PAGES), array_at(words, STARTS)
    group, tile = words[OWN], words[OWN + 1]
    codes = own_scratch(words)
    for first, stop in parts(words):
        cpu_planes.decode_planes(
            words[MEMORY], words[KIND], first, stop, group, tile, words[OWN + 2], pages, starts, words[SHIFT], codes,
            codes + tile,
        )  # fmt: skip


def encode_slopes(words):
    """See `cpu_slopes.encode_slopes`; own words: planes."""
    pages, starts, scratch = array_at(words, PAGES), array_at(words, STARTS), own_scratch(words)
    for first, stop in parts(words):
        bad = cpu_slopes.encode_slopes(
            words[MEMORY], words[KIND], first, stop, words[OWN], pages, starts, words[SHIFT], scratch
        )
        add_result(words, bad)


def decode_slopes(words):
    """See `cpu_slopes.decode_slopes`; own words: planes, address of the table."""
    pages, starts, scratch = array_at(words, PAGES), array_at(words, STARTS), own_scratch(words)
    table = carray(f32_at(words[OWN + 1]), (256,))
    for first, stop in parts(words):
        cpu_slopes.decode_slopes(
            words[MEMORY], words[KIND], first, stop, words[OWN], table, pages, starts, words[SHIFT], scratch
        )


def encode_mask(words):
    """See `cpu_masks.encode_mask`; own words: the two values."""
    pages, scratch = array_at(words, PAGES), own_scratch(words)
    for first, stop in parts(words):
        strangers = cpu_masks.encode_mask(
            words[MEMORY], words[KIND], U64(words[OWN]), U64(words[OWN + 1]), first, stop, pages, words[SHIFT], scratch
        )
        add_result(words, strangers)


def decode_mask(words):
    """See `cpu_masks.decode_mask`; own words: the two values."""
    pages, scratch = array_at(words, PAGES), own_scratch(words)
    for first, stop in parts(words):
        cpu_masks.decode_mask(
            words[MEMORY], words[KIND], U64(words[OWN]), U64(words[OWN + 1]), first, stop, pages, words[SHIFT], scratch
        )


def encode_nonzero(words):
    """See `cpu_masks.encode_nonzero`; no own words."""
    pages, scratch = array_at(words, PAGES), own_scratch(words)
    for first, stop in parts(words):
        cpu_masks.encode_nonzero(words[MEMORY], words[KIND], first, stop, pages, words[SHIFT], scratch)


def rectify(words):
    """See `cpu_masks.rectify`; own words: the smallest positive value."""
    pages, scratch = array_at(words, PAGES), own_scratch(words)
    for first, stop in parts(words):
        cpu_masks.rectify(words[MEMORY], words[KIND], words[OWN], first, stop, pages, words[SHIFT], scratch)


@lru_cache
def compiled(job: Callable[..., None]) -> Any:
    """Returns a job as numba's C function: compiled, or loaded from disk, when it is first asked for."""
    return c_function(job, JOB)


class Kernel:
    """A job with its arguments, but for the elements and the pages.

    Args:
        job: The job.
        kind: Type, or size in bytes, of the elements.
        own: Its own words.
        tile: Elements that it works on at a time; parts begin at multiples of it.
        scratch: Bytes of scratch memory that a thread needs.
        starts: Where the pages of planes start, if it has any.
    """

    __slots__ = ("address", "count", "job", "starts", "stride", "tile", "words")

    def __init__(
        self, job: Callable[..., None], kind: int, own: tuple[int, ...] = (), tile: int = TILE, scratch: int = BLOCK,
        starts: Pages | None = None,
    ) -> None:  # fmt: skip
        self.job: int = compiled(job).address
        self.tile = tile
        self.stride = -(-scratch // 64) * 64
        self.starts = starts  # whose address is among the words
        where = (0, 0) if starts is None else (starts.ctypes.data, starts.size)
        self.words = np.array((*(0,) * WORDS, 0, kind, 0, *where, *own), np.int64)
        self.address, self.count = self.words.ctypes.data, self.words.size
