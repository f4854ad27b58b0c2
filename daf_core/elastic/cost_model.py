"""What a step with some of the units takes, from the steps that were watched."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from daf_core.elastic.block_timer import StepTimes
from daf_core.elastic.units import Units
from daf_core.state_checks import amount, count

MEMORY = 8
"""Steps whose shortest times count: means were off by up to 1.8 on a machine that does other things too."""


class _Shortest:
    """The least of the last `MEMORY` values; None before the first."""

    def __init__(self, values: Sequence[float] = ()) -> None:
        self.values = deque(map(amount, values), maxlen=MEMORY)

    @property
    def least(self) -> float | None:
        return min(self.values, default=None)


class Prices(NamedTuple):
    """What a step with some units takes, relative to one that trains everything: a sum, but for the price of depth.

    Attributes:
        own: What each unit takes by itself.
        reaching: What it takes to reach each unit, which a step pays for the deepest one.
        base: What every step takes.
    """

    own: list[float]
    reaching: list[float]
    base: float


class StepCosts:
    """What steps take, relative to one that trains everything.

    Blocks that were not seen with a graph, or without one, are taken to differ from those that were by what they take
    in forward alone.

    Args:
        units: The units of the model.
        sizes: Elements of what each block returns, to which the bytes of blocks that were not seen are in proportion.

    Attributes:
        units: The units of the model.
    """

    def __init__(self, units: Units, sizes: Sequence[int]) -> None:
        self.units = units
        self._sizes = sizes
        count = len(units.blocks)
        self._forward = {graph: [_Shortest() for _ in range(count)] for graph in (False, True)}
        self._backward = [_Shortest() for _ in range(count)]
        # The lowest block passes no gradient on: what it takes says little of it in the midst of others.
        self._lowest = [_Shortest() for _ in range(count)]
        self._outside, self._rest = _Shortest(), _Shortest()
        self._held = [0.0] * count  # for one element, as batches differ
        self._held_outside = 0.0
        self._held_elements = 0

    def add(self, times: StepTimes, on: Collection[int]) -> None:
        """Takes in a step in which these units were trained."""
        deepest = self.units.depth(on)
        for block, with_graph in enumerate(times.with_graph):
            self._forward[with_graph][block].values.append(times.forward[block] / times.elements)
            reached = times.backward[block] > 0  # not where the loss was thrown away
            if with_graph and reached and self._all_on(block, on):
                seen = self._backward if block > deepest or block == 0 else self._lowest
                seen[block].values.append(times.backward[block] / times.elements)
            if with_graph:
                self._held[block] = times.held[block] / max(times.held_elements, 1)
        self._outside.values.append(times.outside / times.elements)
        self._held_outside = times.held_outside / max(times.held_elements, 1)
        self._held_elements = times.held_elements
        self._rest.values.append(times.rest / times.elements / max(self.units.trained_share(on), 1e-9))

    def seconds(self, on: Collection[int]) -> float:
        """Returns the time of a step with these units, for one element."""
        forward, backward = self._filled()
        deepest = self.units.depth(on)
        spent = (self._outside.least or 0.0) + sum(forward[False][:deepest]) + sum(forward[True][deepest:])
        own = np.ones(len(backward))
        for number, unit in enumerate(self.units.units):
            if number not in on:
                own[unit.stage] -= unit.share
        spent += float(np.dot(own[deepest:], backward[deepest:]))
        return spent + (self._rest.least or 0.0) * self.units.trained_share(on)

    def share(self, on: Collection[int]) -> float:
        """Returns the time of a step with these units, of one that trains everything; 1 if nothing is known."""
        whole = self.seconds(self.units.everything)
        return self.seconds(on) / whole if whole else 1.0

    def prices(self) -> Prices:
        """Returns what `share` is made of."""
        whole = self.seconds(self.units.everything)
        base = self.seconds(())
        _, backward = self._filled()
        rest, nothing = self._rest.least or 0.0, self.units.trained_share(())
        own = [
            unit.share * backward[unit.stage] + rest * (self.units.trained_share([number]) - nothing)
            for number, unit in enumerate(self.units.units)
        ]
        single = [self.seconds([number]) - base - own[number] for number in range(len(own))]
        reaching = np.maximum.accumulate(np.maximum(single, 0.0)) if single else np.zeros(0)
        return Prices([price / whole for price in own], [float(price) / whole for price in reaching], base / whole)

    def held(self, depth: int) -> float:
        """Returns the bytes of saved activations of a pass whose lowest trained block is this, as far as known.

        For a batch such as the last one that was seen.
        """
        return self._held_elements * (self._held_outside + sum(self._held_of_blocks()[depth:]))

    def _held_of_blocks(self) -> list[float]:
        """Returns the bytes of each block, where it was not seen in proportion to those of the next one that was."""
        held, rate = list(self._held), 0.0
        for block in reversed(range(len(held))):
            size = max(self._sizes[block], 1)
            held[block], rate = held[block] or rate * size, held[block] / size or rate
        return held

    def _all_on(self, block: int, on: Collection[int]) -> bool:
        return all(number in on for number, unit in enumerate(self.units.units) if unit.stage == block)

    def _filled(self) -> tuple[dict[bool, list[float]], list[float]]:
        forward = {graph: [each.least for each in blocks] for graph, blocks in self._forward.items()}
        both = [(a, b) for a, b in zip(forward[False], forward[True], strict=True) if a is not None and b is not None]
        ratio = sum(b for _, b in both) / (sum(a for a, _ in both) or 1.0) if both else 1.0
        ratio = max(ratio, 1.0)
        with_graph = [b if b is not None else (a or 0.0) * ratio for a, b in zip(*forward.values(), strict=True)]
        plain = [a if a is not None else b / ratio for a, b in zip(forward[False], with_graph, strict=True)]
        plain = [min(a, b) for a, b in zip(plain, with_graph, strict=True)]
        pairs = zip(self._backward, self._lowest, strict=True)
        backward = [lowest.least if usual.least is None else usual.least for usual, lowest in pairs]
        seen = [(back, front) for back, front in zip(backward, with_graph, strict=True) if back is not None]
        usual = sum(back for back, _ in seen) / (sum(front for _, front in seen) or 1.0)
        filled = [back if back is not None else front * usual for back, front in zip(backward, with_graph, strict=True)]
        return {False: plain, True: with_graph}, filled

    def state(self) -> dict[str, Any]:
        """Returns what was seen, as JSON-able values."""
        return {
            "plain": [list(each.values) for each in self._forward[False]],
            "with_graph": [list(each.values) for each in self._forward[True]],
            "backward": [list(each.values) for each in self._backward],
            "lowest": [list(each.values) for each in self._lowest],
            "outside": list(self._outside.values),
            "rest": list(self._rest.values),
            "held": list(self._held),
            "held_outside": self._held_outside,
            "held_elements": self._held_elements,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned.

        Raises:
            KeyError, TypeError, ValueError: It is something else.
        """
        length = len(self.units.blocks)
        names = ("plain", "with_graph", "backward", "lowest")
        plain, with_graph, backward, lowest = ([_Shortest(each) for each in state[name]] for name in names)
        held = [amount(size) for size in state["held"]]
        if any(len(each) != length for each in (plain, with_graph, backward, lowest, held)):
            raise ValueError(f"the model has {length} blocks")
        self._forward, self._backward, self._lowest = {False: plain, True: with_graph}, backward, lowest
        self._outside, self._rest = _Shortest(state["outside"]), _Shortest(state["rest"])
        self._held, self._held_outside = held, amount(state["held_outside"])
        self._held_elements = count(state["held_elements"])
