"""What a step with some of the units takes, learned from the steps that were timed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from daf_core.elastic.block_timer import StepTimes
from daf_core.elastic.units import Units
from daf_core.state_checks import amount, count

MEMORY = 8  # timed steps of which the shortest counts: means were off by up to 1.8 on a machine with other work

PHASES = ("plain", "with_graph", "backward", "lowest")
"""What is timed in each block: forward without and with graph, backward. The lowest block with a graph has its own
phase: it passes no gradient on, so its time says little about its time between other blocks."""


class UnitCosts(NamedTuple):
    """What a step takes: a fixed cost, the cost of its depth, and the own cost of each unit."""

    own_cost: list[float]  # of each unit's own gradients and update
    depth_cost: list[float]  # to pass the gradient down to each unit; a step pays it for its deepest unit alone
    fixed_cost: float  # of a step without any unit

    def total(self, on: Collection[int]) -> float:
        """Returns the time of a step with these units."""
        depth_cost = max((self.depth_cost[unit] for unit in on), default=0.0)
        return self.fixed_cost + depth_cost + math.fsum(self.own_cost[unit] for unit in on)

    def share(self, on: Collection[int]) -> float:
        """Returns the time relative to a full step, if these costs are relative to it."""
        return 1.0 if len(on) == len(self.own_cost) else self.total(on)  # without the rounding errors of a sum


class StepCosts:
    """What steps take, relative to a full step.

    A block that was not seen with a graph, or without one, is assumed to differ from the others as its forward pass
    does. The bytes of blocks that were not seen are in proportion to `sizes`, the elements of each block's output.
    """

    def __init__(self, units: Units, sizes: Sequence[int]) -> None:
        self.units = units
        self._sizes = sizes
        count = len(units.blocks)
        # Seconds and bytes of one element, as batches differ.
        self._blocks = {phase: [_newest() for _ in range(count)] for phase in PHASES}
        self._outside, self._rest = _newest(), _newest()
        self._held = [0.0] * count
        self._held_outside = 0.0
        self._held_elements = 0

    def add(self, times: StepTimes, on: Collection[int]) -> None:
        """Takes in a step that trained these units."""
        deepest = self.units.depth(on)
        partly = {unit.stage for number, unit in enumerate(self.units.units) if number not in on}
        for block, with_graph in enumerate(times.with_graph):
            self._blocks["with_graph" if with_graph else "plain"][block].append(times.forward[block] / times.elements)
            if with_graph and times.backward[block] > 0 and block not in partly:  # 0 if the loss was thrown away
                phase = "backward" if block > deepest or block == 0 else "lowest"
                self._blocks[phase][block].append(times.backward[block] / times.elements)
            if with_graph:
                self._held[block] = times.held[block] / max(times.held_elements, 1)
        self._outside.append(times.outside / times.elements)
        self._held_outside = times.held_outside / max(times.held_elements, 1)
        self._held_elements = times.held_elements
        self._rest.append(times.rest / times.elements / max(self.units.trained_share(on), 1e-9))

    def seconds(self, on: Collection[int]) -> float:
        """Returns the time of a step with these units, for one element."""
        return self._seconds().total(on)

    def share(self, on: Collection[int]) -> float:
        """Returns the time of a step with these units, relative to a full step; 1 if nothing is known."""
        return self.unit_costs().share(on) if self.seconds(self.units.everything) else 1.0

    def unit_costs(self) -> UnitCosts:
        """Returns the costs relative to a full step."""
        seconds = self._seconds()
        whole = seconds.total(self.units.everything)
        own, depth = ([cost / whole for cost in each] for each in (seconds.own_cost, seconds.depth_cost))
        return UnitCosts(own, depth, seconds.fixed_cost / whole)

    def held(self, depth: int) -> float:
        """Returns the known bytes of saved activations in a pass whose lowest trained block is `depth`.

        They are bytes of a batch like the last one. A block that was not seen holds as much for each element of its
        output as the next block that was.
        """
        held, rate = self._held_outside, 0.0
        for block in reversed(range(depth, len(self._held))):
            size = max(self._sizes[block], 1)
            rate = self._held[block] / size or rate
            held += rate * size
        return self._held_elements * held

    def _seconds(self) -> UnitCosts:
        plain, with_graph, backward = self._seconds_of_blocks()
        units, rest = self.units.units, min(self._rest, default=0.0)
        to_pass = list(backward)  # the time of a block's gradients but for those of its units
        for unit in units:
            to_pass[unit.stage] -= unit.share * backward[unit.stage]
        deeper = [max(each, 0.0) + b - a for each, a, b in zip(to_pass, plain, with_graph, strict=True)]
        from_block = [*accumulate(reversed(deeper))][::-1]
        fixed = min(self._outside, default=0.0) + sum(plain) + rest * self.units.trained_share(())
        parts = zip(units, self.units.parts, strict=True)
        own = [unit.share * backward[unit.stage] + rest * part for unit, part in parts]
        return UnitCosts(own, [from_block[unit.stage] for unit in units], fixed)

    def _seconds_of_blocks(self) -> tuple[list[float], list[float], list[float]]:
        least = {phase: [min(each, default=None) for each in blocks] for phase, blocks in self._blocks.items()}
        plain, with_graph = least["plain"], least["with_graph"]
        both = [(a, b) for a, b in zip(plain, with_graph, strict=True) if a is not None and b is not None]
        ratio = max(sum(b for _, b in both) / (sum(a for a, _ in both) or 1.0), 1.0)
        graph = [(a or 0.0) * ratio if b is None else b for a, b in zip(plain, with_graph, strict=True)]
        no_graph = [b / ratio if a is None else min(a, b) for a, b in zip(plain, graph, strict=True)]
        backward = [b if a is None else a for a, b in zip(least["backward"], least["lowest"], strict=True)]
        seen = [(back, front) for back, front in zip(backward, graph, strict=True) if back is not None]
        usual = sum(back for back, _ in seen) / (sum(front for _, front in seen) or 1.0)
        filled = [front * usual if back is None else back for back, front in zip(backward, graph, strict=True)]
        return no_graph, graph, filled

    def state(self) -> dict[str, Any]:
        """Returns what was seen, as JSON-able values."""
        held = {"held_outside": self._held_outside, "held_elements": self._held_elements}
        newest = {phase: [list(each) for each in blocks] for phase, blocks in self._blocks.items()}
        return {**newest, "outside": list(self._outside), "rest": list(self._rest), "held": list(self._held), **held}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned; raises one of `DAMAGED` if it is something else."""
        length = len(self.units.blocks)
        blocks = {phase: [*map(_newest, state[phase])] for phase in PHASES}
        held = [amount(size) for size in state["held"]]
        if any(len(each) != length for each in (*blocks.values(), held)):
            raise ValueError(f"the model has {length} blocks")
        self._outside, self._rest = _newest(state["outside"]), _newest(state["rest"])
        self._blocks, self._held, self._held_outside = blocks, held, amount(state["held_outside"])
        self._held_elements = count(state["held_elements"])


def _newest(times: Iterable[float] = ()) -> deque[float]:
    return deque(map(amount, times), maxlen=MEMORY)
