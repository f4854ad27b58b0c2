"""Picks a treatment for each block of a model: the least time in a budget of bytes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from daf_core.knapsack.choose import ROUNDING, Knapsack, Solution


@dataclass(frozen=True)
class Choice:
    """A treatment of a block: its time, its bytes from forward to backward, and bytes on top of all while it runs.

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
    """Picks the index of one choice for each block, in forward order, so that bytes fit and time is least.

    Held bytes and the largest transient together fit in the budget; None if nothing does. Of equal times the fewest
    bytes are taken. Among blocks with the same choices, those that hold less come first: the later blocks are gone when
    a block near the input is recomputed.

    Raises:
        ValueError: A block has no choice.
    """
    knapsacks: list[tuple[float, Knapsack, int, list[Block]]] = []
    for cap, allowed in _capped(blocks):
        points = [tuple((float(choice.held_bytes), choice.seconds) for choice in block) for block in allowed]
        knapsack = Knapsack(points)
        knapsacks.append((knapsack.bound(budget - cap), knapsack, budget - cap, allowed))
    best: Solution | None = None
    picked: list[Choice] = []
    for bound, knapsack, room, allowed in sorted(knapsacks, key=lambda each: each[0]):
        limit = math.inf if best is None else best.loss * (1 + ROUNDING)
        found = knapsack.solve(room, limit) if bound <= limit else None
        if found is None:
            break  # the others have higher bounds
        choices = [block[index] for block, index in zip(allowed, found.picked, strict=True)]
        found = found._replace(cost=found.cost + max((choice.transient_bytes for choice in choices), default=0))
        if found.is_better(best):
            best, picked = found, choices
    return None if best is None else _least_held_first(blocks, picked)


def least(blocks: Sequence[Sequence[Choice]]) -> int:
    """Returns the smallest budget that something fits in."""
    return min(cap + sum(min(c.held_bytes for c in block) for block in allowed) for cap, allowed in _capped(blocks))


def _capped(blocks: Sequence[Sequence[Choice]]) -> list[tuple[int, list[Block]]]:
    """Returns each useful bound on the transient, with the choices that keep it: they leave an ordinary knapsack."""
    if not all(blocks):
        raise ValueError("each block needs one choice or more")
    unavoidable = max((min(c.transient_bytes for c in block) for block in blocks), default=0)
    caps = {unavoidable} | {c.transient_bytes for block in blocks for c in block if c.transient_bytes > unavoidable}
    return [(cap, [tuple(c for c in block if c.transient_bytes <= cap) for block in blocks]) for cap in sorted(caps)]


def _least_held_first(blocks: Sequence[Sequence[Choice]], picked: Sequence[Choice]) -> list[int]:
    alike: dict[Block, list[int]] = defaultdict(list)
    for place, block in enumerate(blocks):
        alike[tuple(block)].append(place)
    chosen = [0] * len(blocks)
    for block, places in alike.items():
        inside = sorted((picked[place] for place in places), key=lambda choice: choice.held_bytes)
        for place, choice in zip(places, inside, strict=True):
            chosen[place] = block.index(choice)
    return chosen
