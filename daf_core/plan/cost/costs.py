"""What each policy costs for each call of a block, in time and in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from daf_core.codecs.plane_importance import LEVELS
from daf_core.plan import policies
from daf_core.plan.block_policy import BlockPolicy, ObservedCall
from daf_core.plan.observe.block_trace import OUTSIDE, Phase
from daf_core.plan.observe.trace import Observation

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


def costs_of(names: Sequence[str], compressed: Observation, recomputed: Observation, bits: int | None) -> Costs:
    """Returns what a pass costs, from two passes of as many rows: all blocks compressed, and all recomputed.

    Inputs of recomputed blocks are compressed. `bits` is the precision that is planned with; None loses nothing.
    """
    lossy = _lossy_bytes(names, compressed, bits)
    lossy_inputs = _lossy_bytes(names, recomputed, None if bits is None else LEVELS[-1])

    def observed(call: int) -> ObservedCall:
        forward = compressed.of(call, "before" if call == OUTSIDE else "forward")
        of_input = recomputed.of(call, "forward")
        return ObservedCall(
            forward,
            compressed.of(call, "head" if call == OUTSIDE else "backward"),
            of_input,
            recomputed.of(call, "backward", "recompute"),
            recomputed.of(call, "recompute"),
            _packed_bytes(compressed, call, forward, lossy),
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
