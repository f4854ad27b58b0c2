"""The CPU kernels as jobs of a team of threads: arguments from words, elements part by part until none is left."""

from __future__ import annotations

from typing import Any

from numba import carray, cfunc

from daf_kernels import cpu_masks, cpu_planes, cpu_slopes
from daf_kernels.cpu_bits import F32, I64, U64, f32_at, u64_at
from daf_kernels.cpu_team import JOB, WORDS, add_result, array_at, next_part, own_scratch

MEMORY, KIND, SHIFT, PAGES, STARTS, OWN = WORDS, WORDS + 1, WORDS + 2, WORDS + 3, WORDS + 5, WORDS + 7
"""Words of every kernel: address of the elements, their type or size, binary logarithm of the page size, address and
number of the pages' addresses, the same of where planes begin; then the kernel's own."""


@cfunc(JOB, cache=True)
def _encode_planes(words):
    pages, starts, seed = array_at(words, PAGES), array_at(words, STARTS), carray(u64_at(words[OWN + 5]), (4,))
    group, tile, noise_bytes = words[OWN], words[OWN + 1], words[OWN + 4]
    codes = own_scratch(words)
    noise, work = codes + tile if noise_bytes != 0 else I64(0), codes + tile + noise_bytes
    first, stop = next_part(words)
    while first < stop:
        bad = cpu_planes.encode_planes(
            words[MEMORY], words[KIND], first, stop, group, tile, words[OWN + 2], F32(words[OWN + 3]), seed, pages,
            starts, words[SHIFT], codes, noise, work,
        )  # fmt: skip
        add_result(words, bad)
        first, stop = next_part(words)


@cfunc(JOB, cache=True)
def _decode_planes(words):
    pages, starts = array_at(words, PAGES), array_at(words, STARTS)
    group, tile = words[OWN], words[OWN + 1]
    codes = own_scratch(words)
    first, stop = next_part(words)
    while first < stop:
        cpu_planes.decode_planes(
            words[MEMORY], words[KIND], first, stop, group, tile, words[OWN + 2], pages, starts, words[SHIFT], codes,
            codes + tile,
        )  # fmt: skip
        first, stop = next_part(words)


@cfunc(JOB, cache=True)
def _encode_slopes(words):
    pages, starts, scratch = array_at(words, PAGES), array_at(words, STARTS), own_scratch(words)
    first, stop = next_part(words)
    while first < stop:
        bad = cpu_slopes.encode_slopes(
            words[MEMORY], words[KIND], first, stop, words[OWN], pages, starts, words[SHIFT], scratch
        )
        add_result(words, bad)
        first, stop = next_part(words)


@cfunc(JOB, cache=True)
def _decode_slopes(words):
    pages, starts, scratch = array_at(words, PAGES), array_at(words, STARTS), own_scratch(words)
    table = carray(f32_at(words[OWN + 1]), (256,))
    first, stop = next_part(words)
    while first < stop:
        cpu_slopes.decode_slopes(
            words[MEMORY], words[KIND], first, stop, words[OWN], table, pages, starts, words[SHIFT], scratch
        )
        first, stop = next_part(words)


@cfunc(JOB, cache=True)
def _encode_mask(words):
    pages, scratch = array_at(words, PAGES), own_scratch(words)
    first, stop = next_part(words)
    while first < stop:
        strangers = cpu_masks.encode_mask(
            words[MEMORY], words[KIND], U64(words[OWN]), U64(words[OWN + 1]), first, stop, pages, words[SHIFT], scratch
        )
        add_result(words, strangers)
        first, stop = next_part(words)


@cfunc(JOB, cache=True)
def _decode_mask(words):
    pages, scratch = array_at(words, PAGES), own_scratch(words)
    first, stop = next_part(words)
    while first < stop:
        cpu_masks.decode_mask(
            words[MEMORY], words[KIND], U64(words[OWN]), U64(words[OWN + 1]), first, stop, pages, words[SHIFT], scratch
        )
        first, stop = next_part(words)


@cfunc(JOB, cache=True)
def _encode_nonzero(words):
    pages, scratch = array_at(words, PAGES), own_scratch(words)
    first, stop = next_part(words)
    while first < stop:
        cpu_masks.encode_nonzero(words[MEMORY], words[KIND], first, stop, pages, words[SHIFT], scratch)
        first, stop = next_part(words)


@cfunc(JOB, cache=True)
def _rectify(words):
    pages, scratch = array_at(words, PAGES), own_scratch(words)
    first, stop = next_part(words)
    while first < stop:
        cpu_masks.rectify(words[MEMORY], words[KIND], words[OWN], first, stop, pages, words[SHIFT], scratch)
        first, stop = next_part(words)


def _address(job: Any) -> int:
    return job.address  # numba's types allow for one that is not compiled


ENCODE_PLANES, DECODE_PLANES = _address(_encode_planes), _address(_decode_planes)
ENCODE_SLOPES, DECODE_SLOPES = _address(_encode_slopes), _address(_decode_slopes)
ENCODE_MASK, DECODE_MASK = _address(_encode_mask), _address(_decode_mask)
ENCODE_NONZERO, RECTIFY = _address(_encode_nonzero), _address(_rectify)
