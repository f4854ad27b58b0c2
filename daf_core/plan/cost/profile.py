"""What a step costs with any number of rows, from what was measured with few, and a simulation of its passes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from daf_core.codecs.plane_importance import LEVELS
from daf_core.config import DAFConfig
from daf_core.model.blocks import Block
from daf_core.plan import policies
from daf_core.plan.observe.trace import OUTSIDE, Observation, Phase
from daf_core.plan.policies import COMPRESS, KEEP, RECOMPUTE, BlockPolicy, ObservedCall
from daf_kernels import PRECISIONS

PLANNED_BITS = 4
"""Where the precision is "auto", a plan has room for as many bits, as long as there is such a plan. They make gradient
errors of a few percent; what room is left goes to more bits."""

ALIKE = 0.02
"""Relative difference in bytes up to which blocks of a class count as alike: they get the same times, so that noise
does not decide which of them are recomputed."""

Numbers = npt.NDArray[np.float64]


class PolicyCosts(NamedTuple):
    """What a policy costs in a pass: the first value of each array is outside of blocks, others are calls of blocks."""

    seconds: Numbers  # of forward and backward
    held: Numbers  # bytes from forward to backward
    forward_peak: Numbers  # the most bytes of tensors in forward, above what earlier calls hold
    backward_peak: Numbers  # the most in backward, above what this and earlier calls hold


@dataclass(frozen=True)
class Costs:
    """What a pass of N rows costs."""

    by_policy: Mapping[BlockPolicy, PolicyCosts]  # infinite where a policy cannot be applied
    between: Numbers  # the most bytes of tensors before each call and after the last, above what earlier calls hold

    def __getitem__(self, policy: BlockPolicy) -> PolicyCosts:
        return self.by_policy[policy]


@dataclass(frozen=True)
class Forecast:
    """What is expected of a pass."""

    seconds: float
    peak_bytes: int  # the most at once, in addition to parameters, their gradients and the optimizer
    held_bytes: int  # of saved activations at the end of forward
    kept_bytes: int  # of those that stay as they are


@dataclass(frozen=True)
class Observed:
    """Passes of N rows in pairs, everything compressed and all blocks recomputed; at `bits` None all stays exact."""

    rows: int
    bits: int | None
    metered: tuple[Observation, Observation]
    timed: Sequence[tuple[Observation, Observation]]


class Profile:
    """What a model's step costs with any number of rows, from passes with few and, if there are any, with many rows.

    `changed` are the names of what each pass changes in the model once more, and `unlike` those of the modules that are
    no blocks as they compute something else when they run again.
    """

    off: frozenset[int] = frozenset()  # numbers of the blocks that build no graph

    def __init__(
        self,
        blocks: Sequence[Block],
        few: Observed,
        many: Observed | None = None,
        changed: Collection[str] = (),
        unlike: Collection[str] = (),
    ) -> None:
        self.blocks = list(blocks)
        self.unlike = sorted(unlike)
        self.names = [block.name for block in blocks]
        self.calls = few.metered[0].blocks  # the number of the block of each call in a pass
        self._changed = sorted(name for name in changed if "." in name)  # what the model itself counts, it may
        self._few, self._many = few, many
        self._known: dict[tuple[int, int | None], Costs] = {}

    @property
    def whole(self) -> str | None:
        """Why no batch can be split, as far as a pass shows that; None where it can."""
        if not self._changed:
            return None
        return f"each forward pass changes {self._changed[0]}, and one for each part would do so several times"

    def at(self, rows: float, bits: int | None) -> Costs:
        """Returns what a pass of so many rows, as long as those that were observed, costs at a precision."""
        few = self._costs(self._few, bits)
        if self._many is not None:
            share = (rows - self._few.rows) / (self._many.rows - self._few.rows)
            return interpolate(few, self._costs(self._many, bits), share)
        none = {
            policy: PolicyCosts(*(np.where(np.isinf(each), each, 0.0) for each in costs))
            for policy, costs in few.by_policy.items()
        }
        return interpolate(Costs(none, 0 * few.between), few, rows / self._few.rows)

    def with_off(self, names: Collection[str]) -> Profile:
        """Returns the profile of steps in which the blocks of these names build no graph."""
        other = copy(self)
        other.off = frozenset(number for number, name in enumerate(self.names) if name in names)
        return other

    def observed_peak(self, rows: int) -> int:
        """Returns the memory that observing a pass of so many rows takes."""
        costs = self.at(rows, self._few.bits)
        passes = [[COMPRESS, *[policy] * len(self.calls)] for policy in (COMPRESS, RECOMPUTE)]
        return max(simulate(costs, each).peak_bytes for each in passes)

    def _costs(self, observed: Observed, bits: int | None) -> Costs:
        """Returns what the passes took, at a precision; computed once, as a search asks for it a hundred times."""
        key = observed.rows, bits
        if key in self._known:
            return self._known[key]
        costs = costs_of(self.names, *observed.metered, bits)
        timed = [costs_of(self.names, *pair, bits) for pair in observed.timed]
        alike = self._alike(costs[KEEP].held[1:])
        for policy, each in costs.by_policy.items():
            seconds = np.minimum.reduce([other[policy].seconds for other in timed])
            unsuitable = [1 + call for call, block in enumerate(self.calls) if not policy.suits(self.blocks[block])]
            for values, measured in zip(each, each._replace(seconds=seconds), strict=True):
                values[:] = measured
                for group in alike:
                    values[group] = np.median(measured[group])
                values[unsuitable] = np.inf
        self._known[key] = costs
        return costs

    def _alike(self, raw: Numbers) -> list[list[int]]:
        """Returns rows of calls of blocks of one class that hold as many bytes."""
        kinds = [type(self.blocks[block].module) for block in self.calls]
        alike: list[list[int]] = []
        for call, size in enumerate(raw):
            for group in alike:
                if kinds[group[0]] is kinds[call] and abs(raw[group[0]] - size) <= ALIKE * size:
                    group.append(call)
                    break
            else:
                alike.append([call])
        return [[1 + call for call in group] for group in alike]


def simulate(costs: Costs, policies: Sequence[BlockPolicy]) -> Forecast:
    """Returns the forecast of a pass, given the policy outside of blocks and then the policy of each call of a block.

    Packed bytes count from beginning to end: the pool keeps its pages from step to step. Bytes that stay as they are
    grow in forward and go in backward, so that blocks near the input have the most room when they are recomputed.
    """
    held = [float(costs[policy].held[number]) for number, policy in enumerate(policies)]
    packed = sum(size for size, policy in zip(held, policies, strict=True) if policy.packs)
    raw = [0.0 if policy.packs else size for size, policy in zip(held, policies, strict=True)]
    live = peak = raw[0]
    calls = list(enumerate(policies))[1:]
    for number, policy in calls:
        peak = max(peak, live + costs.between[number - 1], live + costs[policy].forward_peak[number])
        live += raw[number]
    peak = max(peak, live + costs.between[-1], live + costs[policies[0]].backward_peak[0])
    for number, policy in reversed(calls):
        peak = max(peak, live + costs[policy].backward_peak[number])
        live -= raw[number]
    seconds = sum(float(costs[policy].seconds[number]) for number, policy in enumerate(policies))
    return Forecast(seconds, int(packed + peak), int(sum(held)), int(sum(raw)))


def planned_bits(config: DAFConfig) -> list[int | None]:
    """Returns the precisions that are planned with, the best first; None where nothing loses precision."""
    if config.precision == "exact":
        return [None]
    most = max(PLANNED_BITS if config.precision == "auto" else config.precision, config.kept_precision)
    return [bits for bits in PRECISIONS[::-1] if config.kept_precision <= bits <= most]


def most_bits(config: DAFConfig) -> int | None:
    """Returns the precision that activations have where there is room; None where nothing loses precision."""
    if config.precision == "exact":
        return None
    return PRECISIONS[-1] if config.precision == "auto" else config.precision


def costs_of(names: Sequence[str], compressed: Observation, recomputed: Observation, bits: int | None) -> Costs:
    """Returns what a pass costs, from two passes of as many rows: all blocks compressed, and all recomputed.

    Inputs of recomputed blocks are compressed. `bits` is the precision that is planned with; None loses nothing.
    """
    lossy = _lossy_bytes(names, compressed, bits)
    lossy_inputs = _lossy_bytes(names, recomputed, None if bits is None else LEVELS[-1])
    # What blocks hold for a part of the graph that nobody needs goes outside of them, and hides what is held there.
    beside = recomputed.of(OUTSIDE, "before"), _lossy_bytes(names, recomputed, bits)

    def observed(call: int) -> ObservedCall:
        forward = compressed.of(call, "before" if call == OUTSIDE else "forward")
        of_input = recomputed.of(call, "forward")
        packed = _packed_bytes(compressed, call, forward, lossy)
        return ObservedCall(
            forward,
            compressed.of(call, "head" if call == OUTSIDE else "backward"),
            of_input,
            recomputed.of(call, "backward", "recompute"),
            recomputed.of(call, "recompute"),
            packed if call != OUTSIDE else max(packed, _packed_bytes(recomputed, call, *beside)),
            _packed_bytes(recomputed, call, of_input, lossy_inputs),
        )

    outside, *calls = map(observed, range(OUTSIDE, len(compressed.blocks)))
    costs: dict[BlockPolicy, PolicyCosts] = {}
    for policy in policies.POLICIES:
        rows = [(policy.seconds(call), policy.held(call), *policy.peaks(call)) for call in calls]
        costs[policy] = PolicyCosts(*np.array([_outside(policy, outside), *rows], np.float64).T)
    between = [phase.transient for phase in compressed.phases if phase.kind == "before"]
    return Costs(_ordered(costs), np.array(between, np.float64))


def interpolate(few: Costs, many: Costs, share: float) -> Costs:
    """Returns costs on the line through those of few (share 0) and of many rows (share 1); none is negative."""

    def line(first: Numbers, second: Numbers) -> Numbers:
        second = np.maximum(first, second)  # more rows take no less, whatever clocks say
        with np.errstate(invalid="ignore"):  # infinities stay what they are
            return np.where(np.isinf(first), first, np.maximum(first + share * (second - first), 0))

    costs = {policy: PolicyCosts(*map(line, each, many[policy])) for policy, each in few.by_policy.items()}
    # Beyond the rows that were measured, lines with noise may cross.
    return Costs(_ordered(costs), line(few.between, many.between))


def _ordered(costs: dict[BlockPolicy, PolicyCosts]) -> dict[BlockPolicy, PolicyCosts]:
    """Lets no policy take less time than `BlockPolicy.faster`."""
    for policy, each in costs.items():
        if policy.faster is not None:
            least = policies.DEARER * costs[policy.faster].seconds
            costs[policy] = each._replace(seconds=np.maximum(each.seconds, least))
    return costs


def _outside(policy: BlockPolicy, call: ObservedCall) -> tuple[float, ...]:
    found = policy.outside(call)
    if found is None:
        return (np.inf,) * 4
    return (*found, 0, max((phase.transient for phase in call.backward), default=0))


def _lossy_bytes(names: Sequence[str], observation: Observation, bits: int | None) -> list[float]:
    """Returns the bytes of lossy activations at a precision: in each block, and outside of blocks at the end."""
    sizes = [0.0] * (len(names) + 1)
    if bits is None:
        return sizes
    numbers = {name: number for number, name in enumerate(names)}
    for site, of_site in observation.sizes.items():
        name = site.module
        while name and name not in numbers:
            name = name.rpartition(".")[0]
        sizes[numbers.get(name, OUTSIDE)] += of_site[LEVELS.index(bits)]
    return sizes


def _packed_bytes(observation: Observation, call: int, phases: Sequence[Phase], lossy: Sequence[float]) -> float:
    """Returns the bytes that phases of a call added; of the lossy ones, those that the precision takes."""
    grown = sum(phase.end.held - phase.start.held - (phase.end.lossy - phase.start.lossy) for phase in phases)
    if call == OUTSIDE:
        return grown + lossy[OUTSIDE]
    block = observation.blocks[call]
    return grown + lossy[block] / observation.blocks.count(block)
