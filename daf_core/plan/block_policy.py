"""The contract of block policies: what may happen to the activations of a block until backward needs them.

A new policy is a subclass of `BlockPolicy` and an entry of `policies.POLICIES`; `test_block_policy.py` checks it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from daf_core.model.blocks import Block
from daf_core.plan.observe.trace import Phase


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
    recomputes: bool = False  # the block saves its input alone, which is compressed in 8 bits or more
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
