"""Exact rewrites: operators of a model in a form that needs less memory and differs by rounding alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

from torch import nn

from daf_core.autograd.sites import outside_of_graphs
from daf_core.autograd.torch_compile import is_compiled
from daf_core.rewrites.attention import drops_attention, rewrite_attention
from daf_core.rewrites.base import Undo
from daf_core.rewrites.causal_lm import find_head, rewrite_loss
from daf_core.rewrites.gated import find_gate, rewrite_gated
from daf_core.rewrites.gelu import find_gelu, rewrite_gelu

GELU = "gelu"
LOSS = "causal-lm-loss"

KINDS = frozenset(
    {
        "attention-dropout",  # a mask of one byte; probabilities are computed again in backward
        GELU,  # one operator, which saves its input alone
        "gated-mlp",  # the gate's activation is computed again in backward
        LOSS,  # computed in chunks, so that the logits never exist as a whole in training
    }
)
"""What can be rewritten."""


class OperatorRewrites:
    """Rewrites operators of a model where it trains, and undoes it.

    A forward pass that autograd does not record computes what it did before, bit for bit; the logits of one that is
    recorded are computed when somebody reads them. What torch.compile compiles is left alone, and so is all that has
    hooks or a forward of its own. Class, parameters and state_dict stay; a copy of the model, or one that is read from
    a pickle, runs its plain operators. The model may be in a wrapper, such as PEFT's or DistributedDataParallel's.
    """

    def __init__(self, model: nn.Module, kinds: Collection[str] = KINDS) -> None:
        self._undo: list[Undo] = []
        # What was found: the kind, the name of the module and what rewrites it.
        self.steps: list[tuple[str, str, Callable[[], Undo]]] = list(_find(model, kinds))

    def apply(self) -> None:
        """Rewrites what was found; does nothing where that is done."""
        if not self._undo:
            self._undo = [install() for _, _, install in self.steps]

    def undo(self) -> None:
        """Leaves the model as it was before `apply`; does nothing where that is done."""
        while self._undo:
            self._undo.pop()()


def _find(model: nn.Module, kinds: Collection[str]) -> Iterator[tuple[str, str, Callable[[], Undo]]]:
    """Yields the kind of each rewrite, the name of the module and what installs it."""
    modules = uncompiled(model)
    names = {module: name for name, module in modules}
    heads: set[nn.Module] = set()
    for name, module in modules:
        if GELU in kinds and (form := find_gelu(module)) is not None:
            yield GELU, name, partial(rewrite_gelu, module, form)
        if "gated-mlp" in kinds and (gate := find_gate(module)) is not None:
            yield "gated-mlp", name, partial(rewrite_gated, module, gate)
        if "attention-dropout" in kinds and drops_attention(module):
            yield "attention-dropout", name, partial(rewrite_attention, module)
        head = find_head(module) if LOSS in kinds else None
        if head in names and head not in heads:
            heads.add(head)
            yield LOSS, names[head], partial(rewrite_loss, module, head)


def uncompiled(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns modules with their names as `named_modules` does, but for what torch.compile compiles."""
    return [(name, module) for name, module in outside_of_graphs(model) if not is_compiled(module)]
