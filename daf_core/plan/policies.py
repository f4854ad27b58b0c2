"""What may happen to the activations of a block until backward needs them: the policies that a plan chooses from.

A new policy is a subclass of `BlockPolicy` and an entry of `POLICIES`; `test_block_policy.py` checks it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from daf_core.model.blocks import Block
from daf_core.model.recompute import RecomputedBlock
from daf_core.plan.observe.trace import Phase

RANDOM_STATES = 10_112
"""Bytes of the states of torch's generator that a recomputed block keeps: one of the checkpoint and one of
`RecomputedBlock`."""

DEARER = 1.001
"""Least ratio of a policy's time to that of `BlockPolicy.faster`: of equal times a plan takes the more exact policy,
though it takes more bytes."""


@dataclass(frozen=True)
class ObservedCall:
    """A call of a block in the two passes that are measured: one compresses all blocks, one recomputes them."""

    forward: Sequence[Phase]  # compressed
    backward: Sequence[Phase]
    forward_of_input: Sequence[Phase]  # only the compressed input is saved
    backward_again: Sequence[Phase]  # after that, with the recomputation
    recompute: Sequence[Phase]  # the recomputation alone
    packed_bytes: float  # of its activations on pages
    packed_input_bytes: float  # of its input on pages


class BlockPolicy(ABC):
    """What happens to the activations of a block. Policies have no state; each class has one instance."""

    name: str  # in plan files
    packs: bool = False  # the engine compresses what the block saves
    recomputes: bool = False  # the block saves its input alone, in 8 bits or more where the policy packs
    selectable: bool = True  # a plan may choose it; otherwise it describes blocks that the step does not train
    faster: BlockPolicy | None = None  # counts as faster, whatever clocks say: it takes more bytes and is as exact

    @abstractmethod
    def seconds(self, call: ObservedCall) -> float:
        """Returns the seconds of forward and backward."""

    @abstractmethod
    def held(self, call: ObservedCall) -> float:
        """Returns the bytes that the call holds from forward to backward."""

    @abstractmethod
    def peaks(self, call: ObservedCall) -> tuple[float, float]:
        """Returns the most bytes of tensors in forward and in backward, above those of activations.

        Forward counts above what earlier calls hold, backward above what this and earlier calls hold.
        """

    def outside(self, call: ObservedCall) -> tuple[float, float] | None:
        """Returns seconds and held bytes of what runs outside of blocks; None if the policy is for blocks alone."""
        return None

    def suits(self, block: Block) -> bool:
        """Whether the policy may be applied to a block."""
        return True

    def apply(self, block: Block) -> Callable[[], None] | None:
        """Changes a block for the passes that follow; returns what undoes the change, None if there is nothing."""
        return None

    @property
    def words(self) -> str:
        """Its name in reports."""
        return self.name.lower().replace("_", " ")

    def __repr__(self) -> str:
        return self.name


class Keep(BlockPolicy):
    """Autograd keeps what the block saves."""

    name = "KEEP"

    @override
    def seconds(self, call: ObservedCall) -> float:
        # Packing only adds to it, but clocks have noise.
        again = _seconds(call.forward_of_input, call.backward_again) - _seconds(call.recompute)
        return min(again, _seconds(call.forward, call.backward) / DEARER)

    @override
    def held(self, call: ObservedCall) -> float:
        return _raw_bytes(call.forward)

    @override
    def peaks(self, call: ObservedCall) -> tuple[float, float]:
        before = sum(phase.start.level for phase in call.forward)
        inside = max((phase.end.peak - phase.start.level for phase in call.recompute), default=0)
        saved = sum(phase.end.level - phase.start.level for phase in call.recompute)
        forward = max(before + inside, _transient(call.forward_of_input))
        return forward, max(_transient(call.backward_again) - saved, 0)

    @override
    def outside(self, call: ObservedCall) -> tuple[float, float]:
        codec = sum(phase.end.codec - phase.start.codec for phase in (*call.forward, *call.backward))
        return _seconds(call.forward, call.backward) - codec, _raw_bytes(call.forward)


KEEP = Keep()


class Compress(BlockPolicy):
    """The engine compresses what the block saves."""

    name = "COMPRESS"
    packs = True
    faster = KEEP

    @override
    def seconds(self, call: ObservedCall) -> float:
        return _seconds(call.forward, call.backward)

    @override
    def held(self, call: ObservedCall) -> float:
        return call.packed_bytes

    @override
    def peaks(self, call: ObservedCall) -> tuple[float, float]:
        return _transient(call.forward), _transient(call.backward)

    @override
    def outside(self, call: ObservedCall) -> tuple[float, float]:
        return self.seconds(call), call.packed_bytes


class Recompute(BlockPolicy):
    """The block saves its input alone, exactly, and runs once more in backward."""

    name = "RECOMPUTE"
    recomputes = True
    faster = KEEP

    @override
    def seconds(self, call: ObservedCall) -> float:
        return _seconds(call.forward_of_input, call.backward_again)

    @override
    def held(self, call: ObservedCall) -> float:
        return _raw_bytes(call.forward_of_input) + RANDOM_STATES

    @override
    def peaks(self, call: ObservedCall) -> tuple[float, float]:
        return _transient(call.forward_of_input), _transient(call.backward_again)

    @override
    def apply(self, block: Block) -> Callable[[], None]:
        return RecomputedBlock(block).remove


RECOMPUTE = Recompute()


class RecomputeCompressed(Recompute):
    """The block saves its input alone, compressed, and runs once more in backward."""

    name = "RECOMPUTE_COMPRESSED"
    packs = True
    faster = RECOMPUTE

    @override
    def held(self, call: ObservedCall) -> float:
        return call.packed_input_bytes + RANDOM_STATES

    @override
    def suits(self, block: Block) -> bool:
        return not block.needs_exact_input


class Off(BlockPolicy):
    """The block builds no graph, as an elastic step trains nothing in it or before it."""

    name = "OFF"
    selectable = False

    @override
    def seconds(self, call: ObservedCall) -> float:
        return _seconds(call.forward_of_input)

    @override
    def held(self, call: ObservedCall) -> float:
        return 0

    @override
    def peaks(self, call: ObservedCall) -> tuple[float, float]:
        return _transient(call.forward_of_input), 0


COMPRESS, RECOMPUTE_COMPRESSED, OFF = Compress(), RecomputeCompressed(), Off()

POLICIES: tuple[BlockPolicy, ...] = (KEEP, COMPRESS, RECOMPUTE, RECOMPUTE_COMPRESSED, OFF)
"""All policies. `BlockPolicy.faster` stands before a policy; of equal choices a plan takes the first."""


def policy_named(name: str) -> BlockPolicy:
    """Returns the policy with a name in a plan file; a KeyError if there is none."""
    return {policy.name: policy for policy in POLICIES}[name]


class AppliedPolicies:
    """Applies policies to blocks and undoes those that the blocks followed before."""

    def __init__(self) -> None:
        self._applied: dict[Block, tuple[BlockPolicy, Callable[[], None] | None]] = {}

    def follow(self, policies: Mapping[Block, BlockPolicy]) -> None:
        """Applies a policy to each block, and none to others; not between a forward pass and its backward pass."""
        for block, (policy, undo) in list(self._applied.items()):
            if policies.get(block) is not policy:
                del self._applied[block]
                if undo is not None:
                    undo()
        for block, policy in policies.items():
            if block not in self._applied:
                self._applied[block] = policy, policy.apply(block)


def _seconds(*parts: Sequence[Phase]) -> float:
    return sum(sum(phase.seconds for phase in phases) for phases in parts)


def _raw_bytes(phases: Sequence[Phase]) -> float:
    return sum(phase.end.raw - phase.start.raw for phase in phases)


def _transient(phases: Sequence[Phase]) -> float:
    return max((phase.transient for phase in phases), default=0)
