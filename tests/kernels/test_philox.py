"""The random numbers are Philox4x32-10, in every backend and at any distance from the start."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from daf_kernels import Seed
from daf_kernels.cpu import philox
from daf_kernels.cpu.bits import u16_at
from daf_kernels.layout import BLOCK
from daf_kernels.reference import codec as reference
from tests.kernels.harness import SEED, plain_noise
from tests.kernels.harness import philox as philox_words

Words = tuple[int, int, int, int]

ONES = 0xFFFFFFFF
# Random123's kat_vectors: counter, key, result.
KNOWN_ANSWERS = [
    pytest.param((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8), id="zeros"),
    pytest.param((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD), id="ones"),
    pytest.param(
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        id="pi",
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers_of_the_plain_generator(counter: Words, key: tuple[int, int], words: Words) -> None:
    """What the tests compare with is Philox itself."""
    assert philox_words(counter, key) == words


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers_of_the_reference(counter: Words, key: tuple[int, int], words: Words) -> None:
    found = [torch.tensor([word]) for word in counter]
    for turn in range(10):
        found = reference._philox_round(found, tuple((k + turn * w) & ONES for k, w in zip(key, WEYL, strict=True)))
    assert tuple(word.item() for word in found) == words


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers_of_the_cpu_kernel(counter: Words, key: tuple[int, int], words: Words) -> None:
    assert philox._philox(*np.array([*counter, *key], np.uint64)) == words


WEYL = (0x9E3779B9, 0xBB67AE85)

SEEDS = [
    pytest.param(SEED, id="mixed"),
    pytest.param((0, 0, 0, 0), id="zeros"),
    pytest.param((ONES,) * 4, id="ones"),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_of_the_reference(seed: Seed) -> None:
    """One call for each column of a block, two numbers of 14 bits from each word, for rows in order."""
    assert torch.equal(reference.noise(3, seed), plain_noise(0, 3, seed))


@njit
def _fill(address, first_block, blocks, seed):
    philox.fill_noise(u16_at(address), first_block, blocks, seed)


@pytest.mark.parametrize("first_block", [0, 5, (1 << 27) - 1, (1 << 40) + 3], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_noise_of_the_cpu_kernel(seed: Seed, first_block: int) -> None:
    """Blocks are counted from the start of the tensor, past 32 bits of lanes too."""
    noise = np.zeros(2 * BLOCK, np.uint16)
    _fill(noise.ctypes.data, first_block, 2, np.array(seed, np.uint64))
    assert noise.tolist() == plain_noise(first_block, 2, seed).tolist()
