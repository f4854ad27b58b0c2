"""All of torch's operators that have a gradient, with the samples of torch's own tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from daf_core.engine import REHEARSED_ELEMENTS
from tests.fidelity.databases import larger_samples, operators
from tests.fidelity.measure import Case, Problem, Skip

MOST_SAMPLES = 24
"""Of an operator: reductions and indexing have hundreds that differ little. They are taken evenly."""

OF_FIXED_SIZE = {"_segment_reduce.lengths", "_segment_reduce.offsets", "combinations", "cartesian_prod"}
"""Samples that are not enlarged: the first two have lengths in them that nobody checks against those of other tensors,
and crash; results of the others grow with a power of their size."""

Arguments = tuple[Any, ...]


def groups() -> list[str]:
    """Returns the names of all operators that have a gradient."""
    return [_name(operator) for operator in operators() if _has_gradient(operator)]


def cases(wanted: Callable[[str], bool] = lambda name: True, orders: Sequence[int] = (1,)) -> Iterator[Case]:
    """Yields the samples of all operators with a wanted name, each also in place where that has a gradient."""
    for operator in operators():
        name = _name(operator)
        if not (_has_gradient(operator) and wanted(name)):
            continue
        variants = {"": operator.op}
        if operator.supports_inplace_autograd and operator.inplace_variant is not None:
            variants[", in place"] = operator.inplace_variant
        for place, sample in enumerate(_samples(operator)):
            for variant, call in variants.items():
                for order in orders:
                    title = f"{name} {place}{variant}{', double backward' if order > 1 else ''}"
                    yield Case(title, partial(_problem, call, sample, name in OF_FIXED_SIZE, order), name)


def _name(operator: Any) -> str:
    return f"{operator.name}.{operator.variant_test_name}" if operator.variant_test_name else operator.name


def _has_gradient(operator: Any) -> bool:
    return operator.supports_autograd and torch.float32 in operator.supported_backward_dtypes("cpu")


def _samples(operator: Any) -> list[Any]:
    """Returns samples of an operator: larger ones, where it can make any."""
    try:
        with nullcontext() if _name(operator) in OF_FIXED_SIZE else larger_samples():
            samples = _made(operator)
    except Exception:  # whatever it makes of lengths that it does not expect
        samples = _made(operator)
    step = max(len(samples) / MOST_SAMPLES, 1)
    return [samples[int(place * step)] for place in range(int(len(samples) / step))]


def _made(operator: Any) -> list[Any]:
    torch.manual_seed(0)
    return list(operator.sample_inputs("cpu", torch.float32, requires_grad=True))


def _problem(call: Callable[..., Any], sample: Any, fixed: bool, order: int) -> Problem:
    arguments = (sample.input, sample.args, sample.kwargs)
    leaves = _leaves(arguments)
    if not leaves:
        raise Skip("nothing that it takes has a gradient")

    def forward(arguments: Arguments = arguments) -> Any:
        first, args, kwargs = tree_map(_activation, arguments)
        return sample.output_process_fn_grad(call(first, *args, **kwargs))

    if fixed or max(leaf.numel() for leaf in leaves) >= REHEARSED_ELEMENTS:
        return Problem(forward, leaves, order=order, small=True)
    larger = next(filter(partial(_runs, forward), _larger(arguments)), arguments)
    return Problem(partial(forward, larger), _leaves(larger), order=order, small=True)


def _leaves(arguments: Arguments) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _larger(arguments: Arguments) -> Iterator[Arguments]:
    """Yields arguments with more rows: of all tensors, as weights have for more channels, and of the first one."""
    rows = partial(_with_more_rows, max(leaf.numel() for leaf in _leaves(arguments)))
    yield tree_map(rows, arguments)
    yield tree_map(rows, arguments[0]), *arguments[1:]


def _with_more_rows(largest: int, value: Any) -> Any:
    """Returns a tensor several times below itself, until the largest has enough elements; floats are no copies."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or not (value.dim() and largest):
        return value
    result = value.detach().repeat(-(-REHEARSED_ELEMENTS // largest), *[1] * (value.dim() - 1))
    if result.is_floating_point():
        result *= 1 - 0.02 * torch.rand(result.shape, generator=torch.Generator().manual_seed(0))
    return result.requires_grad_(value.requires_grad)


def _runs(forward: Callable[[Arguments], Any], arguments: Arguments) -> bool:
    try:
        forward(arguments)
    except Exception:  # shapes that the operator does not take together
        return False
    return True


def _activation(value: Any) -> Any:
    """Returns a copy that an operator may change, and that is no leaf where the original is."""
    return value.clone() if isinstance(value, Tensor) else value
