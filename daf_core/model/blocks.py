"""The blocks of a model: equal modules in a row, such as the layers of a transformer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from daf_core.autograd.torch_compile import is_compiled
from daf_core.readers.places import needs_exact_input

CHECKPOINTING_LAYER = "GradientCheckpointingLayer"
"""What transformers calls the class of its layers that can be recomputed."""

LEAST_WEIGHTS = 2
"""Modules with a matrix or convolution in a block at least: recomputing a single one saves next to nothing."""


@dataclass(frozen=True)
class Block:
    """A part of a model that can be recomputed; `routes` says that it is known to send rows to experts."""

    name: str
    module: nn.Module
    routes: bool = False

    @property
    def needs_exact_input(self) -> bool:
        """Whether a small error of its input is no small error of what is computed from it."""
        return self.routes or needs_exact_input(self.module)


def blocks_of(model: nn.Module, left_out: Collection[str] = ()) -> list[Block]:
    """Returns the blocks of a model that may be recomputed: those of `layers_of` that are not already."""

    def recomputes(module: nn.Module) -> bool:  # transformers was told to
        return any(getattr(each, "gradient_checkpointing", False) is True for each in module.modules())

    return [block for block in layers_of(model, left_out) if not recomputes(block.module)]


def layers_of(model: nn.Module, left_out: Collection[str] = ()) -> list[Block]:
    """Returns the blocks of a model in the order in which they are registered; [] where there are none.

    Blocks are the layers that transformers can recompute. In models without them they are modules of one class in an
    `nn.ModuleList` or `nn.Sequential` with several weights each. Of those inside of each other the innermost count.
    What is compiled on its own is none, and neither are modules whose names are left out.
    """
    compiled = {inner for module in model.modules() if is_compiled(module) for inner in module.modules()}
    usable = {module: name for name, module in model.named_modules() if module not in compiled}
    layers = [each for each in usable if any(kind.__name__ == CHECKPOINTING_LAYER for kind in type(each).__mro__)]
    found = layers or list(dict.fromkeys(child for module in usable for child in _repeated(module) if child in usable))
    candidates = {module for module in found if usable[module] not in left_out}
    innermost = [each for each in found if candidates.intersection(each.modules()) == {each}]
    return [Block(usable[module], module) for module in innermost]


def _repeated(container: nn.Module) -> Iterator[nn.Module]:
    """Yields the equal modules of a container."""
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        return
    kinds = Counter(type(child) for child in container)
    for child in container:
        if kinds[type(child)] > 1 and _weights(child) >= LEAST_WEIGHTS:
            yield child


def _weights(module: nn.Module) -> int:
    return sum(
        any(not is_lazy(p) and p.dim() > 1 for p in inner.parameters(recurse=False)) for inner in module.modules()
    )
