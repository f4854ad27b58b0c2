"""A forward pass of a few rows whose gradient can be taken at any precision: where errors are measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from daf_core.autograd.sites import Site
from daf_core.autograd.torch_compile import COMPILED
from daf_core.autograd.torch_private import all_nodes, keeps_only_for
from daf_core.codecs.probed import ProbedActivation
from daf_core.errors import AuditError
from daf_core.telemetry import GradientError

RUN_ONCE = {
    "CheckpointFunctionBackward": "a reentrant activation checkpoint hides the parameters in it from "
    'torch.autograd.grad; set gradient_checkpointing_kwargs={"use_reentrant": False}',
    "CompiledFunctionBackward": COMPILED,
}
"""Nodes that a gradient cannot be taken through several times, each with the reason."""

NO_GRAPH = (
    "the loss depends on no parameter in the forward pass: losses that take gradients of their own, such as those with "
    "cached gradients, return a value without a graph. Set audit_every to None"
)

Gradients = Sequence[Tensor | None]

Precisions = Mapping[Site, int | None]
"""Code bits of the activations of each site; None, or a site that is missing, is exact."""


class ProbePass:
    """The graph of a loss, whose lossy activations are kept exactly and are encoded when backward asks for them.

    Random numbers are drawn once, in the forward pass, so that all gradients are those of the same dropout masks.

    Args:
        loss: A scalar.
        parameters: What the gradient is taken for.
        activations: The lossy activations of the graph, with their sites.
        reads: Gets each of them when backward reads it.
        sizes: Bytes of each site's activations at each precision, and as they are.
        unpack: The unpack hook of the forward pass.

    Raises:
        AuditError: The gradient of the loss cannot be taken for the parameters.
    """

    def __init__(
        self,
        loss: Tensor,
        parameters: Sequence[Tensor],
        activations: Sequence[tuple[Site, ProbedActivation]],
        reads: list[ProbedActivation],
        sizes: Mapping[Site, Sequence[int]],
        unpack: Callable[[Any], Tensor],
    ) -> None:
        if loss.grad_fn is None:
            raise AuditError(NO_GRAPH)
        for node in all_nodes(loss.grad_fn):
            if node.name() in RUN_ONCE:
                raise AuditError(RUN_ONCE[node.name()])
        self.loss, self.parameters, self.activations, self.sizes = loss, parameters, activations, sizes
        self._unpack, self._reads = unpack, reads
        self._listed = {id(activation) for _, activation in activations}
        self.read_before = frozenset(self._those_listed(reads))  # by the forward pass: the loss has a gradient in it

    def gradients(self, precisions: Precisions) -> Gradients:
        """Returns the gradient for each parameter, None for those that the loss does not depend on."""
        for site, activation in self.activations:
            activation.precision = precisions.get(site)
        self._reads.clear()
        return torch.autograd.grad(self.loss, self.parameters, retain_graph=True, allow_unused=True)

    @cached_property
    def exact(self) -> Gradients:
        """The exact gradients."""
        return self.gradients({})

    def may_run_again(self, node: Any) -> bool:
        """Whether an autograd node's backward may be run once more: not if another hook unpacks what it saved."""
        return keeps_only_for(node, self._unpack)

    def take_reads(self) -> list[ProbedActivation]:
        """Returns the activations that backward has read since the last call, each once."""
        reads = self._those_listed(self._reads)
        self._reads.clear()
        return reads

    def _those_listed(self, reads: Sequence[ProbedActivation]) -> list[ProbedActivation]:
        """Returns each of the activations once; one that was stored otherwise since may still be shared, exactly."""
        return [activation for activation in dict.fromkeys(reads) if id(activation) in self._listed]

    def compare(self, precisions: Precisions) -> GradientError:
        """Measures the gradient that activations at these precisions give."""
        return compare(self.gradients(precisions), self.exact)


def compare(found: Gradients, exact: Gradients) -> GradientError:
    """Compares all gradients with the exact ones, as one vector; sums are taken in float64, one parameter at a time."""
    difference = product = found_square = exact_square = 0.0
    for found_part, exact_part in zip(found, exact, strict=True):
        if found_part is None or exact_part is None:
            continue
        f, e = found_part.double(), exact_part.double()
        product += float((f * e).sum())
        found_square += float(f.square().sum())
        exact_square += float(e.square().sum())
        difference += float((f - e).square().sum())
    if not exact_square:
        return GradientError(math.nan, math.nan)
    lengths = math.sqrt(found_square) * math.sqrt(exact_square)
    return GradientError(math.sqrt(difference / exact_square), product / lengths if lengths else 0.0)
