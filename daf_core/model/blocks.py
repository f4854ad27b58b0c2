"""The blocks of a model: equal modules in a row, such as the layers of a transformer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from daf_core.autograd.torch_private import is_compiled

CHECKPOINTING_LAYER = "GradientCheckpointingLayer"
"""What transformers calls the class of its layers that can be recomputed."""

LEAST_WEIGHTS = 2
"""Modules with a matrix or convolution in a block at least: recomputing a single one saves next to nothing."""


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

_EXPERTS = re.compile(r"expert|router|moe", re.IGNORECASE)
"""Classes of modules with experts."""


@dataclass(frozen=True)
class Block:
    """A part of a model that can be recomputed; `routes` says that it is known to send rows to experts."""

    name: str
    module: nn.Module
    routes: bool = False

    @property
    def needs_exact_input(self) -> bool:
        """Whether a small error of its input is no small error of what is computed from it.

        Statistics of batches and the signs that ReLUs read off them change: ResNets had a larger gradient error from
        inputs in 8 bits than from everything in 4 (.0201 against .0180). Experts are others.
        """
        return self.routes or any(isinstance(each, BATCH_NORMS) or _is_expert(each) for each in self.module.modules())


def blocks_of(model: nn.Module, left_out: Collection[str] = ()) -> list[Block]:
    """Returns the blocks of a model that may be recomputed: those of `layers_of` that are not already."""
    return [block for block in layers_of(model, left_out) if not any(map(_recomputes, block.module.modules()))]


def layers_of(model: nn.Module, left_out: Collection[str] = ()) -> list[Block]:
    """Returns the blocks of a model in the order in which they are registered; [] where there are none.

    Blocks are the layers that transformers can recompute. In models without them they are modules of one class in an
    `nn.ModuleList` or `nn.Sequential` with several weights each. Of those inside of each other the innermost count.
    What is compiled on its own is none, and neither are modules whose names are left out.
    """
    compiled = {inner for module in model.modules() if is_compiled(module) for inner in module.modules()}
    usable = {module: name for name, module in model.named_modules() if module not in compiled}
    layers = [module for module in usable if _is_layer(module)]
    found = layers or list(dict.fromkeys(child for module in usable for child in _repeated(module) if child in usable))
    candidates = {module for module in found if usable[module] not in left_out}
    innermost = [module for module in found if module in candidates and candidates.isdisjoint(_inside(module))]
    return [Block(usable[module], module) for module in innermost]


def _is_expert(module: nn.Module) -> bool:
    return _EXPERTS.search(type(module).__name__) is not None


def _is_layer(module: nn.Module) -> bool:
    return any(kind.__name__ == CHECKPOINTING_LAYER for kind in type(module).__mro__)


def _recomputes(module: nn.Module) -> bool:
    """Whether it was told, as transformers does, to recompute itself or what is inside of it."""
    return getattr(module, "gradient_checkpointing", False) is True


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


def _inside(module: nn.Module) -> Iterator[nn.Module]:
    return (inner for inner in module.modules() if inner is not module)
