"""Traces forward passes: which modules are called in which order, and where a graph begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from daf_core.autograd.torch_private import hooks_of
from daf_core.batch.rows import tensors_in
from daf_core.errors import ElasticError
from daf_core.model.blocks import Block
from daf_core.model.module_hooks import CallHooks, is_training_pass
from daf_core.snapshots.settings import is_of_daf


class ForwardTracer:
    """Watches a model's modules until `stop`: their `calls`, and which ran without recording a graph."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.calls: dict[str, int] = {}
        self.unrecorded: set[str] = set()
        self._with_graph: set[str] = set()
        self._origins: list[str] = []
        self._hooks = CallHooks()
        self.stop = self._hooks.remove
        for name, module in model.named_modules():
            self._hooks.watch(module, partial(self._enter, name), partial(self._leave, name, module))

    def recorded(self, blocks: Sequence[Block], trained: Iterable[nn.Parameter]) -> list[Block]:
        """Returns blocks without those that ran in vain, such as a frozen tower's: no graph, and nothing is trained."""
        known = set(map(id, trained))

        def in_vain(block: Block) -> bool:
            ran = block.name in self.unrecorded and block.name not in self.calls
            return ran and known.isdisjoint(map(id, block.module.parameters()))

        return [block for block in blocks if not in_vain(block)]

    def check_graphs(self, blocks: Sequence[Block]) -> None:
        """Checks that blocks below the lowest trained one have built no graph; an ElasticError if one has."""
        found = next((block.name for block in blocks if block.name in self._with_graph), None)
        if found is None:
            return
        origin = next(iter(self._origins), None)
        if origin is None:
            where = f"{found} is given an input that requires a gradient"
        else:
            foreign = [hook for hook in hooks_of(self._model.get_submodule(origin)) if not is_of_daf(hook)]
            functions = [getattr(hook, "func", hook) for hook in foreign]
            hooks = ", ".join(getattr(function, "__qualname__", repr(function)) for function in functions)
            where = f"what {origin or 'the model'} returns requires a gradient"
            where += f" (its hooks: {hooks})" * bool(hooks)
        raise ElasticError(
            f"elastic training would save nothing: {where}, though nothing up to there is trained in this step, so "
            "that every block from there on builds a graph. Have nothing require a gradient there, or leave out elastic"
        )

    def _enter(self, name: str, _arguments: object) -> None:
        if is_training_pass():
            self.calls.setdefault(name, 0)
        elif not torch.is_grad_enabled():
            self.unrecorded.add(name)

    def _leave(self, name: str, module: nn.Module, arguments: object, output: object) -> None:
        if not is_training_pass():
            return
        found = list(tensors_in(output))
        if name not in self.calls:  # it was running when this began to watch, as the model whose forward begins a step
            self.calls = {name: 0, **self.calls}
        self.calls[name] = self.calls.get(name, 0) or (found[0].numel() if found else 0)
        if not any(each.requires_grad for each in found):
            return
        self._with_graph.add(name)
        given = any(each.requires_grad for each in tensors_in(arguments))
        if not given and not any(each.requires_grad for each in module.parameters()):
            self._origins.append(name)
