"""What the rows of an activation have in common: multiples of one row, which are kept beside the codes of the rest.

The keys of a trained attention, say, are a vector that all tokens share, and small differences. The range of a scaling
group is that of the vector, and so is the error of its codes; the gradient is that of the differences, as a softmax
takes no notice of what all its scores share. With a shared vector of 5 deviations the gradient of the query's weight
had an error of .69 at 4 bits; without it, as where nothing is shared, of .15. A few channels that are large in all
tokens, as in the hidden states of language models, spoil the groups that they are in likewise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf_core.autograd.sites import Site
from daf_core.codecs.tensor_layout import Geometry
from daf_core.readers.sharpness import some_of
from daf_core.state_checks import as_a_whole, count, flag, number
from daf_kernels import is_capturing

LEAST_GAIN = 1.0
"""Bits by which codes have to be more exact, beyond those that it takes: the rest of 3 MB takes 1 ms to make, and codes
take .4. Nor can what rows share be dropped within a budget: with half a bit the least that MiniLM needs was 1% more."""

MOST_LOST = 2.0**-20
"""Smallest range, beside the largest, that is told from 0."""

BYTES = 2
"""Of each factor and of each element of what rows share. The rest is what these, rounded, leave."""

SOME_BLOCKS, SOME_ROWS = 4, 32
"""Blocks that are looked at, and rows of each: so many show what they share as well as all do, and sooner."""

LEAST_ROWS, LONGEST = 64, 1 << 14
"""What fewer rows share takes more than .25 bits an element. Longer ones are no heads of a token, and what is looked at
stays small."""

ITERATIONS = 2
"""Of these, two find what rows share also where half of them have it with the other sign, and their mean is small."""

CHUNK = 1 << 22
"""Elements that are made float32 at a time."""

TINY = torch.finfo(torch.float32).tiny

EVERY = 61
"""Passes after which all sites are measured again: what rows share changes while a model trains. An odd number, as
passes of two kinds may take turns, of which the same would be measured each time."""

MOST_SITES = 1 << 14
"""Sites that are remembered at most: a program with loops of ever more steps has new ones in every pass."""


class Common(NamedTuple):
    """What the rows of each block share."""

    row: Tensor  # bfloat16, of shape (blocks, 1, length)
    factors: Tensor  # bfloat16, of shape (blocks, rows, 1): how much of it is in each row

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.row.nbytes + self.factors.nbytes

    def restore(self, rest: Tensor) -> None:
        """Adds it to the rest, which has no holes, in place; a host may have packed what a device decodes."""
        rows = rest.view(len(self.row), -1, self.row.shape[2])
        rows.addcmul_(self.factors.to(rest), self.row.to(rest))


@dataclass(frozen=True)
class RowBlocks:
    """Values in the order of memory as blocks of rows, of which those of a block have much in common."""

    blocks: int
    rows: int  # in each block
    length: int  # elements of a row
    group: int  # elements of a scaling group: a piece of a row, or some rows

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of values as blocks of rows."""
        return self.blocks, self.rows, self.length

    @property
    def is_worth_a_look(self) -> bool:
        """Whether rows are neither too few nor too long."""
        return self.rows >= LEAST_ROWS and 0 < self.length <= LONGEST

    @property
    def nbytes(self) -> int:
        """Bytes of what rows share."""
        return BYTES * self.blocks * (self.rows + self.length)

    @property
    def bits(self) -> float:
        """The same in bits an element."""
        return 8 * BYTES * (1 / self.length + 1 / self.rows)

    def split(self, values: Tensor) -> tuple[Common, Tensor]:
        """Returns what rows share, and the rest, which is flat.

        No group deviates more than before, but for rounding: the rest is at right angles to what is taken away.
        """
        rows = values.reshape(self.shape)
        common = self._common_of(rows)
        rest = torch.addcmul(rows, common.factors.to(rows.dtype), common.row.to(rows.dtype), value=-1)
        return common, rest.view(-1)

    def gain(self, values: Tensor) -> float:
        """Returns the bits an element by which codes are more exact without what rows share."""
        rows = some_of(some_of(values.reshape(self.shape), 0, SOME_BLOCKS), 1, SOME_ROWS).float()
        rest = rows.clone()
        self._common_of(rows).restore(rest.neg_())
        before, after = self._ranges(rows), self._ranges(rest)
        least = before.amax().clamp_min(TINY) * MOST_LOST
        bits = float((before.clamp_min(least) / after.clamp_min(least)).log2().mean())
        return bits if math.isfinite(bits) else 0.0  # of zeros, or of what is not finite

    def _common_of(self, rows: Tensor) -> Common:
        with torch.autocast(rows.device.type, enabled=False):  # whose products of 16 bits overflow
            row = self._direction(some_of(rows, 1, SOME_ROWS).float())
            common = row.float()
            parts = rows.split(max(1, CHUNK // (self.blocks * self.length)), 1)
            products = torch.cat([part.float() @ common.mT for part in parts], 1)
            squares = common.square().sum(2, keepdim=True).clamp_min(TINY)
            return Common(row, (products / squares).bfloat16())

    def _direction(self, rows: Tensor) -> Tensor:
        """Returns the row whose multiples are closest to the rows of each block, all of which count alike.

        It is found by power iterations from their mean, which may be small where signs differ. Where groups are pieces
        of rows, they keep their means themselves.
        """
        if self.length % self.group == 0:
            pieces = rows.unflatten(2, (-1, self.group))
            rows = (pieces - pieces.mean(3, keepdim=True)).flatten(2)
        rows = rows / rows.norm(dim=2, keepdim=True).clamp_min(TINY)
        row = rows.mean(1, keepdim=True)
        for _ in range(ITERATIONS):
            row = row @ rows.mT @ rows
        return (row * (self.length**0.5 / row.norm(dim=2, keepdim=True).clamp_min(TINY))).bfloat16()

    def _ranges(self, rows: Tensor) -> Tensor:
        """Returns the range of each scaling group: of a piece of a row, or of rows that share one."""
        length, group = self.length, self.group
        if group > length:
            together = min(group // length, rows.shape[1])
            rows = rows[:, : rows.shape[1] // together * together].unflatten(1, (-1, together)).flatten(2)
            group = length = rows.shape[2]
        low, high = rows[..., : length // group * group].unflatten(-1, (-1, group)).aminmax(dim=-1)
        return high - low


class Gain(NamedTuple):
    """The best way to see the tensors of a site as blocks of rows."""

    way: int  # its place among `possible_blocks`; -1 where there is none
    bits: float  # the gain that was measured, but for what it takes


_NOTHING = Gain(-1, 0.0)


class CommonRows:
    """Knows at which sites rows have much in common."""

    def __init__(self) -> None:
        self.passes = 0  # forward passes that have ended
        # Of sites whose rows share groups, or do not, the best of the last two that were measured, with the latest and
        # its epoch.
        self._found: dict[tuple[Site, bool], tuple[int, Gain, Gain]] = {}

    def state(self) -> dict[str, Any]:
        """Returns what was measured, as JSON-able values."""
        found = [[*site, shared, epoch, *gain, *last] for (site, shared), (epoch, gain, last) in self._found.items()]
        return {"passes": self.passes, "gains": found}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned.

        Raises:
            StateError: It is something else.
        """
        with as_a_whole(self, vars(self), "what rows share"):
            self.passes, self._found = count(state["passes"]), {}
            for *site, shared, epoch, way, bits, last_way, last_bits in state["gains"]:
                gain, last = Gain(count(way, -1), number(bits)), Gain(count(last_way, -1), number(last_bits))
                self._found[Site.from_state(site), flag(shared)] = count(epoch, -1), gain, last

    @property
    def epoch(self) -> int:
        """What is measured in passes of the same epoch stays."""
        return self.passes // EVERY

    def blocks(self, site: Site, geometry: Geometry, group: int, values: Tensor) -> RowBlocks | None:
        """Returns the blocks of rows that share much; None where they do not.

        Args:
            site: Where they are saved.
            geometry: How the tensor lies in memory.
            group: Elements of a scaling group.
            values: Its compact form, which is looked at now and then.
        """
        possible, gain = possible_blocks(geometry, group), self._gain(site, geometry, group, values)
        found = possible[gain.way] if 0 <= gain.way < len(possible) else None
        pays = found is not None and found.is_worth_a_look and gain.bits - found.bits >= LEAST_GAIN
        return found if pays else None

    def may_pay(self, site: Site, geometry: Geometry, group: int, values: Tensor) -> bool:
        """Says whether rows share so much at a site that `blocks` may return some for tensors of another shape."""
        return self._gain(site, geometry, group, values).bits >= LEAST_GAIN

    def _gain(self, site: Site, geometry: Geometry, group: int, values: Tensor) -> Gain:
        """Returns what was measured at a site in this epoch or the one before; for the arguments see `blocks`.

        Passes of two kinds may take turns: what rows share in the one takes few bytes in the other, and without it the
        error of the first was 1.9 at 4 bits.
        """
        key = site, group > geometry.row
        measured, gain, latest = self._found.get(key, (-1, _NOTHING, _NOTHING))
        if measured != self.epoch and not is_capturing():
            if len(self._found) >= MOST_SITES:
                self._found = {}
            possible = possible_blocks(geometry, group)
            found = _best(possible, values)
            gain = max(found, latest, key=lambda each: _worth(each, possible))
            self._found[key] = self.epoch, gain, found
        return gain


@lru_cache(maxsize=4096)
def possible_blocks(geometry: Geometry, group: int) -> tuple[RowBlocks, ...]:
    """Returns the ways to see a tensor with groups of so many elements as blocks of rows, always in the same order.

    All rows are one block; or rows of two dimensions are, such as the heads of each token; or there is a block for each
    index of the dimensions before the last two, such as a head. With two dimensions in memory only the first is one.
    """
    dims = geometry.memory_shape
    if len(dims) < 2 or math.prod(dims) != math.prod(geometry.compact_shape):  # elements overlap
        return ()
    rows, length = dims[-2:]
    blocks = math.prod(dims[:-2])
    shapes = [(1, blocks * rows, length), (1, blocks, rows * length), (blocks, rows, length)]
    return tuple(RowBlocks(*shape, group) for shape in shapes[: 1 if len(dims) == 2 else None])


def _best(possible: Sequence[RowBlocks], values: Tensor) -> Gain:
    """Returns the way that gains most."""
    if values.is_meta:
        return _NOTHING
    gains = [Gain(way, blocks.gain(values)) for way, blocks in enumerate(possible) if blocks.is_worth_a_look]
    return max(gains, key=lambda gain: _worth(gain, possible), default=_NOTHING)


def _worth(gain: Gain, possible: Sequence[RowBlocks]) -> float:
    """Returns the bits that are gained beyond those that it takes."""
    return gain.bits - possible[gain.way].bits if 0 <= gain.way < len(possible) else -math.inf
