"""Predicts what the error of each site does to the gradient, in two backward passes over a rehearsal.

The first pass measures squared lengths of gradients. An operator that makes gradients of squared length h out of one
of squared length g is taken to make errors h / g times as long, and errors that arrive on different ways to add up in
squares. So a unit of squared error in the gradient that enters operator n adds to that of all parameters together

    gain(n) = sum over its inputs i of h_i / g_n * gain(operator of i),      gain(parameter) = 1 / their squared length

In the second pass, where a lossy tensor is used, its operator's backward is run again with the tensor at each
precision. The difference is the error that enters there, whatever the operator, the codec and its decoder do. Errors
need not travel as gradients do: those of attention's probabilities average out in the next product, while gradients,
which all tokens agree on, do not (with gains alone they were predicted 5 times too large). So the error itself is led
through the next `HOPS` operators, and only from there on by their gains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from daf_core.codecs import RehearsedActivation
from daf_core.precision.importance import LEVELS, SiteErrors
from daf_core.precision.rehearsal import Gradients, Rehearsal
from daf_core.torch_internals import all_nodes, is_leaf_node, leaf_of, order_of, output_count, run_again

HOPS = 4
"""Rank correlation with the truth for RoBERTa, GPT-2 and ResNet-18 at 4 layers and 4 bits: without hops .82, .93, .87;
with 4 .94, .96, .87; with 8 .96, .98, .87 at twice the time (docs/numerics.md)."""

FOLLOWED_BITS = 2
"""The precision whose error is led on; those of others reach as far in proportion."""

_FREE = {
    "AddBackward0", "CloneBackward0", "ExpandBackward0", "PermuteBackward0", "ReshapeAliasBackward0", "TBackward0",
    "TransposeBackward0", "UnsafeViewBackward0", "ViewBackward0",
}  # fmt: skip
"""Operators that change no value; they are no hop."""

Node = Any
Gains = dict[Node, float]


def calibrate(rehearsal: Rehearsal, hops: int = HOPS) -> SiteErrors | None:
    """Returns the error of the gradient that each site alone is predicted to cause.

    All occurrences of a site are taken together. Sites that backward does not read get errors of 0.

    Args:
        rehearsal: A forward pass.
        hops: Operators through which errors are led on.

    Returns:
        None where the gradient is zero or not finite.
    """
    gains = _gains(rehearsal)
    if gains is None:
        return None
    errors: SiteErrors = {site: [0.0] * len(LEVELS) for site, _ in rehearsal.activations}
    sites = {id(activation): site for site, activation in rehearsal.activations}

    def inject(node: Node, inputs: Gradients, outputs: Gradients) -> None:
        for source in rehearsal.take_reads():
            found = _errors_through(rehearsal, source, node, inputs, outputs, gains, hops)
            site = sites[id(source)]
            errors[site] = [known + more for known, more in zip(errors[site], found, strict=True)]
        rehearsal.take_reads()  # those of running nodes again

    _backward(rehearsal, inject)
    return errors if all(math.isfinite(value) for values in errors.values() for value in values) else None


def _gains(rehearsal: Rehearsal) -> Gains | None:
    lengths: dict[Node, tuple[float, list[float]]] = {}

    def measure(node: Node, inputs: Gradients, outputs: Gradients) -> None:
        lengths[node] = (sum(map(_squared, outputs)), [_squared(gradient) for gradient in inputs])

    rehearsal.exact = _backward(rehearsal, measure)
    total = sum(map(_squared, rehearsal.exact))
    if not total or not math.isfinite(total):
        return None
    parameters = {id(parameter) for parameter in rehearsal.parameters}
    gains: Gains = {node: 1.0 / total for node in all_nodes(rehearsal.loss.grad_fn) if id(leaf_of(node)) in parameters}
    for node, (length, squares) in reversed(lengths.items()):  # in the order of the forward pass
        following = zip(squares, node.next_functions, strict=True)
        gains[node] = (
            sum(square * gains.get(after, 0.0) for square, (after, _) in following) / length if length else 0.0
        )
    return gains


def _errors_through(
    rehearsal: Rehearsal,
    source: RehearsedActivation,
    node: Node,
    inputs: Gradients,
    outputs: Gradients,
    gains: Gains,
    hops: int,
) -> list[float]:
    """Returns the squared errors that an activation causes at each of `LEVELS` where `node` uses it."""
    errors, share = [0.0] * len(LEVELS), 1.0
    if not gains.get(node):
        return errors
    for level, bits in enumerate(LEVELS):
        source.precision = bits
        found = run_again(node, outputs)
        source.precision = None
        differences = [
            None if f is None or e is None else f.detach() - e.detach() for f, e in zip(found, inputs, strict=True)
        ]
        errors[level] = _reached(rehearsal, node, differences, gains, 0)
        if hops and bits == FOLLOWED_BITS and errors[level]:
            share = _reached(rehearsal, node, differences, gains, hops) / errors[level]
    return [error * share for error in errors]


class _Arrived:
    """Errors that have arrived at a node, one for each of its outputs, and the hops that they may still go."""

    def __init__(self, node: Node, hops: int) -> None:
        self.errors: list[Tensor | None] = [None] * output_count(node)
        self.hops = hops

    def add(self, place: int, error: Tensor, hops: int) -> None:
        """Adds an error: on different ways they may cancel or grow."""
        known = self.errors[place]
        self.errors[place] = error if known is None else known + error
        self.hops = min(self.hops, hops)


def _reached(rehearsal: Rehearsal, node: Node, errors: Gradients, gains: Gains, hops: int) -> float:
    """Returns the squared error of all parameters' gradients that errors of a node's results cause."""
    total, waiting = 0.0, dict[Node, _Arrived]()
    _pass_on(waiting, node, errors, gains, hops)
    while waiting:
        following = max(waiting, key=order_of)  # each node once, when all that reaches it has arrived
        arrived = waiting.pop(following)
        if not arrived.hops or is_leaf_node(following) or not rehearsal.may_run_again(following):
            total += sum(map(_squared, arrived.errors)) * gains[following]
        else:
            left = arrived.hops - (following.name() not in _FREE)
            _pass_on(waiting, following, run_again(following, arrived.errors), gains, left)
    return total


def _pass_on(waiting: dict[Node, _Arrived], node: Node, errors: Gradients, gains: Gains, hops: int) -> None:
    for error, (following, place) in zip(errors, node.next_functions, strict=True):
        if error is not None and gains.get(following):
            waiting.setdefault(following, _Arrived(following, hops)).add(place, error, hops)


def _backward(rehearsal: Rehearsal, after: Callable[[Node, Gradients, Gradients], None]) -> Gradients:
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
