"""The contract of block policies: what may happen to the activations of a block until backward needs them.

A new policy is a subclass of `BlockPolicy` and an entry of `policies.POLICIES`; `test_block_policy.py` checks it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from daf_core.model.blocks import Block
from daf_core.plan.observe.block_trace import Phase


@dataclass(frozen=True)
class ObservedCall:
    """A call of a block in the two passes that are measured: one compresses all blocks, one recomputes them.

    Attributes:
        forward: Its forward pass, compressed.
        backward: Its backward pass, compressed.
        forward_of_input: Its forward pass where only its compressed input is saved.
        backward_again: Its backward pass after that, with the recomputation.
        recompute: The recomputation alone.
        packed_bytes: Bytes that its activations take on pages.
        packed_input_bytes: Bytes that its input takes on pages.
    """

    forward: Sequence[Phase]
    backward: Sequence[Phase]
    forward_of_input: Sequence[Phase]
    backward_again: Sequence[Phase]
    recompute: Sequence[Phase]
    packed_bytes: float
    packed_input_bytes: float


class BlockPolicy(ABC):
    """What happens to the activations of a block. Policies have no state; each class has one instance.

    Attributes:
        name: Its name in plan files.
        packs: Whether the engine compresses what the block saves.
        recomputes: Whether the block saves its input alone, which is compressed in 8 bits or more.
        selectable: Whether a plan may choose it; otherwise it describes blocks that the step does not train.
        faster: The policy that counts as faster, whatever clocks say: it takes more bytes and is as exact.
    """

    name: str
    packs: bool = False
    recomputes: bool = False
    selectable: bool = True
    faster: BlockPolicy | None = None

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
