"""Predicts what the error of each site does to the gradient, in two backward passes over a rehearsal.

The first pass measures squared lengths of gradients. An operator that makes gradients of squared length h out of one
of squared length g is taken to make errors h / g times as long, and errors that arrive on different ways to add up in
squares. So a unit of squared error in the gradient that enters operator n adds to that of all parameters together

    gain(n) = sum over its inputs i of h_i / g_n * gain(operator of i)

The gain of a parameter is the reciprocal of the squared length of all gradients together. Or half of it is, and the
other half that of its own gradient's squared length over the number of parameters: optimizers such as Adam divide by
that length, so a short gradient counts as much as a long one. With all of it MiniLM's adapters in the first layer lost
their gradient altogether in 1/20 of the bytes, with half of it they keep a fifth, and the error of all rises from .39
to .41.

In the second pass, where a lossy tensor is used, its operator's backward is run again with the tensor at each
precision. The difference is the error that enters there, whatever the operator, the codec and its decoder do. Errors
need not travel as gradients do: those of attention's probabilities average out in the next product, while gradients,
which all tokens agree on, do not (with gains alone they were predicted 5 times too large). So the error itself is led
through the next `HOPS` operators, and only from there on by their gains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from daf_core.autograd.sites import Site
from daf_core.autograd.torch_private import all_nodes, is_leaf_node, leaf_of, order_of, output_count, run_again
from daf_core.codecs.plane_importance import LEVELS, SiteErrors
from daf_core.codecs.probed import ProbedActivation, Variant
from daf_core.codecs.registry import calibrated_codecs
from daf_core.precision.probe import Gradients, ProbePass

HOPS = 4
"""Rank correlation with the truth for RoBERTa, GPT-2 and ResNet-18 at 4 layers and 4 bits: without hops .82, .93, .87;
with 4 .94, .96, .87; with 8 .96, .98, .87 at twice the time (docs/concepts/precision.md)."""

SHORTEST = 1e-6
"""Squared length of a gradient, relative to what is usual, below which it counts as no shorter: LoRA's first
matrix has none at the first steps but rounding."""

MEASURED_BITS = 4  # the precision at which it is measured what inputs of checkpoints do

FOLLOWED_BITS = {0: (0, 2), 1: (2,), 2: (2,), 4: (4,), 8: (4,)}
"""The precisions whose errors are led on for each; its own reaches as far in proportion as that which reaches farthest.
Codes of 1 and 2 bits may be clipped, and the error of tails travels in another way than that of rounding. Means alone
have an error that all rows may share: that of a language model's log-softmax reached 13 times as far as with 2 bits."""

_FREE = {
    "AddBackward0", "CloneBackward0", "ExpandBackward0", "PermuteBackward0", "ReshapeAliasBackward0", "TBackward0",
    "TransposeBackward0", "UnsafeViewBackward0", "ViewBackward0",
}  # fmt: skip
"""Operators that change no value; they are no hop."""

FORWARD = "forward"
"""Stands among readers for whatever reads in the forward pass: a gradient of the gradient asks for values."""

Node = Any
Gains = dict[Node, float]
Readers = dict[int, set[str]]  # names of the nodes that read each activation, by its identity


@dataclass(frozen=True)
class Calibration:
    """What a rehearsal has told: the error of the gradient that each site alone is predicted to cause.

    Sites take one of `codecs`, by its name, that nothing else reads than the reader it is for, and where the error is
    less.
    """

    errors: SiteErrors
    codecs: Mapping[Site, str] = field(default_factory=dict)


def calibrate(
    rehearsal: ProbePass, variants: bool = True, hops: int = HOPS, own_share: float = 0.0
) -> Calibration | None:
    """Predicts the error of the gradient that each site alone causes; None where the gradient is zero or not finite.

    All occurrences of a site are taken together. Sites that backward does not read get errors of 0. The effect of
    inputs of checkpoints is measured, each in a backward pass of its own, as whole blocks are computed again from them.

    With `variants` a site may take a codec for one reader alone, and the rehearsal takes it from then on. Errors are
    led through `hops` operators. `own_share` of them is counted parameter by parameter, relative to its own gradient.
    """
    before = set(map(id, rehearsal.read_before))
    readers: Readers = {id(each): {FORWARD} if id(each) in before else set() for _, each in rehearsal.activations}
    gains = _gains(rehearsal, readers, own_share)
    if gains is None:
        return None
    graph = _Graph(rehearsal, gains, hops)
    sites = {id(activation): site for site, activation in rehearsal.activations}
    found: dict[Site, dict[Variant, list[float]]] = {
        site: {variant: [0.0] * len(LEVELS) for variant in tried}
        for site, tried in _variants(rehearsal, readers, variants).items()
    }
    unknown: set[Site] = set()

    def inject(node: Node, inputs: Gradients, outputs: Gradients) -> None:
        for source in rehearsal.take_reads():
            site = sites[id(source)]
            if not rehearsal.may_run_again(node):  # a checkpoint recomputes a whole block from it
                unknown.add(site)
                continue
            for source.variant, errors in found[site].items():
                more = graph.errors_through(source, node, inputs, outputs)
                found[site][source.variant] = [one + other for one, other in zip(errors, more, strict=True)]
        rehearsal.take_reads()  # those of running nodes again

    _backward(rehearsal, inject)
    chosen: dict[Site, Variant] = {}
    for site, tried in found.items():
        chosen[site] = None
        for variant, errors in tried.items():
            if variant is not None and _is_less(errors, tried[chosen[site]]):
                chosen[site] = variant
    for site, activation in rehearsal.activations:
        activation.variant = chosen[site]
    errors = {site: tried[chosen[site]] for site, tried in found.items() if site not in unknown}
    for site in unknown:  # measured at one precision, and by rounding's law at the others
        squared = rehearsal.compare({site: MEASURED_BITS}).error ** 2
        errors[site] = [squared * 4.0 ** (MEASURED_BITS - bits) for bits in LEVELS]
    finite = all(math.isfinite(value) for values in errors.values() for value in values)
    codecs = {site: variant.name for site, variant in chosen.items() if variant is not None}
    return Calibration(errors, codecs) if finite else None


def _variants(rehearsal: ProbePass, readers: Readers, variants: bool) -> dict[Site, list[Variant]]:
    """Returns the codecs that each site may take; None stands for the usual one."""
    of_sites: dict[Site, set[str]] = {}
    for site, activation in rehearsal.activations:
        # Where one of a site's activations is read by nothing, "" stands for that.
        of_sites.setdefault(site, set()).update(readers[id(activation)] or {""})
    codecs = calibrated_codecs() if variants else []
    return {
        site: [None, *(codec for codec in codecs if names == {codec.only_reader})] for site, names in of_sites.items()
    }


def _is_less(errors: list[float], others: list[float]) -> bool:
    """Whether errors are less than others, by the geometric mean of their ratios over the bits there are."""
    triples = zip(LEVELS, errors, others, strict=True)
    ratios = [error / other for bits, error, other in triples if bits and error and other]
    return bool(ratios) and math.prod(ratios) < 1


def _gains(rehearsal: ProbePass, readers: Readers, own_share: float) -> Gains | None:
    lengths: dict[Node, tuple[float, list[float]]] = {}

    def measure(node: Node, inputs: Gradients, outputs: Gradients) -> None:
        lengths[node] = (sum(map(_squared, outputs)), [_squared(gradient) for gradient in inputs])
        for source in rehearsal.take_reads():
            readers[id(source)].add(node.name())

    rehearsal.exact = _backward(rehearsal, measure)
    total = sum(map(_squared, rehearsal.exact))
    if not total or not math.isfinite(total):
        return None
    parameters = _parameter_gains(rehearsal, total, own_share)
    leaves = {node: id(leaf_of(node)) for node in all_nodes(rehearsal.loss.grad_fn)}
    gains: Gains = {node: parameters[leaf] for node, leaf in leaves.items() if leaf in parameters}
    for node, (length, squares) in reversed(lengths.items()):  # in the order of the forward pass
        following = zip(squares, node.next_functions, strict=True)
        gains[node] = (
            sum(square * gains.get(after, 0.0) for square, (after, _) in following) / length if length else 0.0
        )
    return gains


def _parameter_gains(rehearsal: ProbePass, total: float, own_share: float) -> dict[int, float]:
    squares = dict(zip(map(id, rehearsal.parameters), map(_squared, rehearsal.exact), strict=True))
    count = sum(square > 0 for square in squares.values())
    least = SHORTEST * total / count
    return {
        parameter: (1 - own_share) / total + (own_share / (count * max(square, least)) if square else 0.0)
        for parameter, square in squares.items()
    }


class _Arrived:
    """Errors that have arrived at a node, one for each of its outputs, and the hops that they may still go."""

    def __init__(self, node: Node, hops: int) -> None:
        self.errors: list[Tensor | None] = [None] * output_count(node)
        self.hops = hops


@dataclass(frozen=True)
class _Graph:
    """Leads errors through the graph of a rehearsal, with the gains of its nodes, for some hops."""

    rehearsal: ProbePass
    gains: Gains
    hops: int

    def errors_through(
        self, source: ProbedActivation, node: Node, inputs: Gradients, outputs: Gradients
    ) -> list[float]:
        """Returns the squared errors that an activation causes at each of `LEVELS` where `node` uses it."""
        errors, shares = [0.0] * len(LEVELS), dict.fromkeys(FOLLOWED_BITS, 1.0)
        if not self.gains.get(node):
            return errors
        for level, bits in enumerate(LEVELS):
            source.precision = bits
            found = run_again(node, outputs)
            source.precision = None
            differences = [
                None if f is None or e is None else f.detach() - e.detach() for f, e in zip(found, inputs, strict=True)
            ]
            errors[level] = self._reached(node, differences, 0)
            if self.hops and bits in FOLLOWED_BITS[bits] and errors[level]:
                shares[bits] = self._reached(node, differences, self.hops) / errors[level]
        return [
            error * max(shares[followed] for followed in FOLLOWED_BITS[bits])
            for bits, error in zip(LEVELS, errors, strict=True)
        ]

    def _reached(self, node: Node, errors: Gradients, hops: int) -> float:
        """Returns the squared error of all parameters' gradients that errors of a node's results cause."""
        total, waiting = 0.0, dict[Node, _Arrived]()
        self._pass_on(waiting, node, errors, hops)
        while waiting:
            following = max(waiting, key=order_of)  # each node once, when all that reaches it has arrived
            arrived = waiting.pop(following)
            if not arrived.hops or is_leaf_node(following) or not self.rehearsal.may_run_again(following):
                total += sum(map(_squared, arrived.errors)) * self.gains[following]
            else:
                left = arrived.hops - (following.name() not in _FREE)
                self._pass_on(waiting, following, run_again(following, arrived.errors), left)
        return total

    def _pass_on(self, waiting: dict[Node, _Arrived], node: Node, errors: Gradients, hops: int) -> None:
        for error, (following, place) in zip(errors, node.next_functions, strict=True):
            if error is not None and self.gains.get(following):
                arrived = waiting.setdefault(following, _Arrived(following, hops))
                known = arrived.errors[place]
                # On different ways errors may cancel or grow.
                arrived.errors[place] = error if known is None else known + error
                arrived.hops = min(arrived.hops, hops)


def _backward(rehearsal: ProbePass, after: Callable[[Node, Gradients, Gradients], None]) -> Gradients:
    """Takes the exact gradient; `after` is called after each node with the gradients of its inputs and outputs."""
    hooks = [node.register_hook(partial(after, node)) for node in all_nodes(rehearsal.loss.grad_fn)]
    try:
        return rehearsal.gradients({})
    finally:
        for hook in hooks:
            hook.remove()


def _squared(gradient: Tensor | None) -> float:
    if gradient is None:
        return 0.0
    wide = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None
    return float(torch.linalg.vector_norm(gradient.detach(), dtype=wide)) ** 2
