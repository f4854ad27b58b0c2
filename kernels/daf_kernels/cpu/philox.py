"""Random bits for stochastic rounding: a counter-based generator, so that they depend on nothing but their position."""

from numba import njit

from daf_kernels.cpu.bits import INLINE, U16, U64
from daf_kernels.layout import BLOCK, COLUMNS


@njit(**INLINE)
def _philox(counter0, counter1, counter2, counter3, key0, key1):
    """Philox-4x32-10 (Salmon et al., SC 2011): four random words of 32 bits, in 64-bit registers."""
    low = U64(0xFFFFFFFF)
    for _ in range(10):
        first, second = U64(0xD2511F53) * counter0, U64(0xCD9E8D57) * counter2
        counter0 = (second >> U64(32)) ^ counter1 ^ key0
        counter2 = (first >> U64(32)) ^ counter3 ^ key1
        counter1, counter3 = second & low, first & low
        key0, key1 = (key0 + U64(0x9E3779B9)) & low, (key1 + U64(0xBB67AE85)) & low
    return counter0, counter1, counter2, counter3


@njit(**INLINE)
def fill_noise(noise, first_block, blocks, seed):
    """Writes 14 random bits for each element of whole blocks: one Philox call for each column of a block."""
    key0, key1, counter2, counter3 = seed[0], seed[1], seed[2], seed[3]
    for block in range(blocks):
        for column in range(COLUMNS):
            lane = U64(first_block + block) * U64(COLUMNS) + U64(column)
            words = _philox(lane & U64(0xFFFFFFFF), lane >> U64(32), counter2, counter3, key0, key1)
            for word in range(4):
                noise[BLOCK * block + 64 * word + column] = U16((words[word] >> U64(2)) & U64(0x3FFF))
                noise[BLOCK * block + 64 * word + 32 + column] = U16(words[word] >> U64(18))
