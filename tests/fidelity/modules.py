"""All modules of torch, with the inputs of torch's own tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from daf_core.engine import REHEARSED_ELEMENTS
from tests.fidelity.databases import larger_samples, modules
from tests.fidelity.measure import Case, Problem, Skip

MOST_ROWS = 64
"""Times that an input is repeated along its batch."""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def cases() -> Iterator[Case]:
    """Yields all modules with all inputs, in training and, where it differs, in evaluation."""
    for info in modules():
        if torch.float32 not in info.dtypes or info.is_lazy:
            continue
        name = info.module_cls.__name__
        for training in (True, False) if info.train_and_eval_differ else (True,):
            for place, sample in enumerate(_samples(info, training)):
                title = f"{name} {place}{'' if training else ', evaluation'}"
                yield Case(title, partial(_problem, info.module_cls, sample, training), name)


def _samples(info: Any, training: bool) -> list[Any]:
    torch.manual_seed(0)
    options = {"device": "cpu", "dtype": torch.float32, "requires_grad": True, "training": training}
    with larger_samples():
        return list(info.module_inputs_func(info, **options))


def _problem(module_class: Callable[..., nn.Module], sample: Any, training: bool) -> Problem:
    torch.manual_seed(0)
    module = module_class(*sample.constructor_input.args, **sample.constructor_input.kwargs).train(training)
    given: Inputs = (sample.forward_input.args, sample.forward_input.kwargs)

    def forward(inputs: Inputs = given) -> Any:
        args, kwargs = tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, inputs)
        return module(*args, **kwargs)

    inputs = next(filter(partial(_runs, forward), map(partial(_with_more_rows, given), (0, 1))), given)
    found = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    leaves = [*found, *(each for each in module.parameters() if each.requires_grad)]
    if not leaves:
        raise Skip("nothing that it takes has a gradient")
    # An engine follows a model that has something to train.
    model = module if any(each.requires_grad for each in module.parameters()) else nn.Linear(1, 1)
    return Problem(partial(forward, inputs), leaves, model, small=True)


def _with_more_rows(inputs: Inputs, dim: int) -> Inputs:
    """Returns inputs that are repeated along a dimension, with some noise, where they have few elements."""
    sizes = [leaf.numel() for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    times = min(-(-REHEARSED_ELEMENTS // max(*sizes, 1, 1)), MOST_ROWS)

    def more(value: Any) -> Any:
        if times == 1 or not isinstance(value, Tensor) or value.layout is not torch.strided or value.dim() <= dim:
            return value
        result = torch.cat([value.detach()] * times, dim)
        if result.is_floating_point():
            result *= 1 - 0.02 * torch.rand(result.shape, generator=torch.Generator().manual_seed(0))
        return result.requires_grad_(value.requires_grad)

    return tree_map(more, inputs)


def _runs(forward: Callable[[Inputs], Any], inputs: Inputs) -> bool:
    try:
        forward(inputs)
    except Exception:  # shapes that the module does not take
        return False
    return True
