"""Picks a treatment for each block of a model: the least time in a budget of bytes.

Exact: a state is the bytes and seconds of some choices for the first blocks, and only those are followed that no other
beats in both, and that can still beat the best solution known. What the blocks that are left take at least is known
from the relaxation in which they may take parts of two choices.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MOST_STATES = 5_000
"""States that are followed. 48 blocks with 4 choices, all of other times and bytes, need some hundred. Where more are
left, as with times that are exactly in proportion to bytes, states of nearly the same time are taken for one: per block
at most 1 / `MOST_STATES` of the difference in time between all states is lost."""

ROUNDING = 1e-12
"""Relative difference in time that sums of floats in different orders may have."""

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, order=True)
class Choice:
    """A treatment of a block.

    Attributes:
        seconds: Time that it takes.
        held_bytes: Bytes that it holds from the block's forward pass to its backward pass.
        transient_bytes: Bytes that there are beside those of all blocks while the block runs.

    Raises:
        ValueError: One of them is negative, or the time not finite.
    """

    seconds: float
    held_bytes: int
    transient_bytes: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.seconds < math.inf and self.held_bytes >= 0 and self.transient_bytes >= 0):
            raise ValueError(f"time and bytes of a treatment are numbers of 0 or more, got {self}")


Block = tuple[Choice, ...]


def choose(blocks: Sequence[Sequence[Choice]], budget: int) -> list[int] | None:
    """Picks one choice for each block, so that held bytes and the largest transient fit and time is least.

    Of equal times the fewest bytes are taken. Among blocks with the same choices, those that hold less come first: what
    is recomputed near the input is recomputed when later blocks are gone.

    Args:
        blocks: The choices of each block, in forward order.
        budget: Bytes for what all blocks hold and the largest transient together.

    Returns:
        The index of each block's choice; None where nothing fits.

    Raises:
        ValueError: A block has no choice.
    """
    chains = [_Chain(allowed, budget - cap) for cap, allowed in _capped(blocks)]
    best: _Solution | None = None
    for chain in sorted(chains, key=lambda chain: chain.bound):
        if chain.bound <= (sys.float_info.max if best is None else best.seconds * (1 + ROUNDING)):
            found = chain.solve(math.inf if best is None else best.seconds)
            best = found if found is not None and found.is_better(best) else best
    return None if best is None else _cheapest_first(blocks, best.picked)


def least(blocks: Sequence[Sequence[Choice]]) -> int:
    """Returns the smallest budget that something fits in.

    Raises:
        ValueError: A block has no choice.
    """
    return min(cap + sum(min(c.held_bytes for c in block) for block in allowed) for cap, allowed in _capped(blocks))


def _capped(blocks: Sequence[Sequence[Choice]]) -> list[tuple[int, list[Block]]]:
    """Returns each bound on the transient that makes a difference, with the choices that keep it."""
    if not all(blocks):
        raise ValueError("each block needs one choice or more")
    unavoidable = max((min(c.transient_bytes for c in block) for block in blocks), default=0)
    caps = {unavoidable} | {c.transient_bytes for block in blocks for c in block if c.transient_bytes > unavoidable}
    return [(cap, [tuple(c for c in block if c.transient_bytes <= cap) for block in blocks]) for cap in sorted(caps)]


def _cheapest_first(blocks: Sequence[Sequence[Choice]], picked: Sequence[Choice]) -> list[int]:
    alike: dict[Block, list[int]] = defaultdict(list)
    for place, block in enumerate(blocks):
        alike[tuple(block)].append(place)
    chosen = [0] * len(blocks)
    for block, places in alike.items():
        inside = sorted((picked[place] for place in places), key=lambda choice: choice.held_bytes)
        for place, choice in zip(places, inside, strict=True):
            chosen[place] = block.index(choice)
    return chosen


class _Solution(NamedTuple):
    seconds: float
    total_bytes: int
    picked: list[Choice]

    def is_better(self, other: _Solution | None) -> bool:
        if other is None or self.seconds < other.seconds * (1 - ROUNDING):
            return True
        return self.seconds <= other.seconds * (1 + ROUNDING) and self.total_bytes < other.total_bytes


class _Chain:
    """Blocks of which only held bytes count.

    Args:
        blocks: The choices of each.
        room: Bytes that they may hold.

    Attributes:
        bound: Seconds that no solution is below; infinite where there is none.
    """

    def __init__(self, blocks: Sequence[Block], room: int) -> None:
        self._blocks = blocks
        self._room = room
        hulls = [_hull(block) for block in blocks]
        self._bases = np.array([(hull[0].held_bytes, hull[0].seconds) for hull in hulls]).reshape(-1, 2)
        steps = [(place, *step) for place, hull in enumerate(hulls) for step in pairwise(hull)]
        self._steps = sorted(steps, key=lambda step: _slope(step[1], step[2]))
        self._places = np.array([place for place, _, _ in self._steps], np.int64)
        changes = [
            (after.held_bytes - before.held_bytes, after.seconds - before.seconds) for _, before, after in self._steps
        ]
        self._changes = np.array(changes, np.float64).reshape(-1, 2)
        self.bound = float(self._least_seconds(0, np.array([room]))[0])

    def solve(self, limit: float) -> _Solution | None:
        """Returns the best solution of all in a finite `bound`; None where it takes more than `limit` seconds."""
        limit = min(limit, self._greedy_seconds()) * (1 + ROUNDING)
        held, seconds = np.zeros(1, np.int64), np.zeros(1)
        layers: list[tuple[Integers, Integers]] = []
        for place, block in enumerate(self._blocks):
            more, longer = np.array([c.held_bytes for c in block]), np.array([c.seconds for c in block])
            held, seconds = (held[:, None] + more).ravel(), (seconds[:, None] + longer).ravel()
            promising = np.flatnonzero(seconds + self._least_seconds(place + 1, self._room - held) <= limit)
            kept = promising[_undominated(held[promising], seconds[promising])]
            followed, lost = _thinned(seconds[kept])
            kept, limit = kept[followed], limit + lost
            held, seconds = held[kept], seconds[kept]
            layers.append(np.divmod(kept, len(block)))
        return self._walk_back(layers, seconds.size - 1) if seconds.size else None

    def _walk_back(self, layers: list[tuple[Integers, Integers]], state: int) -> _Solution:
        picked: list[Choice] = []
        for (parents, choices), block in zip(reversed(layers), reversed(self._blocks), strict=True):
            picked.append(block[int(choices[state])])
            state = int(parents[state])
        transient = max((choice.transient_bytes for choice in picked), default=0)
        total_bytes = transient + sum(choice.held_bytes for choice in picked)
        return _Solution(sum(choice.seconds for choice in picked), total_bytes, picked[::-1])

    def _least_seconds(self, first: int, room: Integers) -> Floats:
        """Returns seconds that the blocks from `first` on take at least, in each of several rooms."""
        base_held, base_seconds = self._bases[first:].sum(axis=0)
        changes = self._changes[self._places >= first].cumsum(axis=0)
        at = np.concatenate([[0.0], changes[:, 0]])
        seconds = np.concatenate([[0.0], changes[:, 1]]) + base_seconds
        return np.where(room < base_held, math.inf, np.interp(room - base_held, at, seconds))

    def _greedy_seconds(self) -> float:
        """Returns the seconds of a solution."""
        held, seconds = self._bases.sum(axis=0)
        full: set[int] = set()
        for (place, _, _), (more, change) in zip(self._steps, self._changes, strict=True):
            if held + more > self._room:
                full.add(place)
            elif place not in full:
                held, seconds = held + more, seconds + change
        return float(seconds)


def _undominated(held: Integers, seconds: Floats) -> Integers:
    """Returns the states that no other beats, by bytes: each takes less time than those before it."""
    order = np.lexsort((seconds, held))
    before = np.minimum.accumulate(np.concatenate([[math.inf], seconds[order]]))[:-1]
    return order[seconds[order] < before * (1 - ROUNDING)]


def _thinned(seconds: Floats) -> tuple[Integers, float]:
    """Returns which of states in falling order of time are followed, and the time that this may lose."""
    if seconds.size <= MOST_STATES:
        return np.arange(seconds.size), 0.0
    step = float(seconds[0] - seconds[-1]) / MOST_STATES
    marks = np.floor((seconds - seconds[-1]) / step)
    return np.flatnonzero(np.diff(marks, prepend=math.inf)), step  # the first of each mark: it has the fewest bytes


@lru_cache(maxsize=1024)
def _hull(block: Block) -> list[Choice]:
    """Returns the choices, by bytes, that are best for some price of a byte."""
    hull: list[Choice] = []
    for choice in sorted(block, key=lambda choice: (choice.held_bytes, choice.seconds)):
        if hull and choice.seconds >= hull[-1].seconds:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(before: Choice, after: Choice) -> float:
    return (after.seconds - before.seconds) / (after.held_bytes - before.held_bytes)
