"""Where the recipes for the results of normalizations and residual sums hold, and where they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.harness import normal
from tests.core.residual import (
    NORMALIZED,
    PLAIN,
    SHAPES,
    SUM,
    Function,
    Net,
    blocks,
    train,
)

CASES: dict[str, tuple[Function, list[str]]] = {}


def _case(*forms: str) -> Callable[[Function], Function]:
    def note(function: Function) -> Function:
        CASES[function.__name__] = (function, list(forms))
        return function

    return note


@_case(NORMALIZED, SUM)
def in_both_ways(net: Net, x: Tensor) -> Tensor:
    """The result of the normalization is added to after a ReLU was taken of it."""
    y = net.norm(x)
    return F.relu(y) * F.relu(y.add_(x)) / 10


@_case(NORMALIZED, SUM)
def same_normalization_twice(net: Net, x: Tensor) -> Tensor:
    y = net.norm(net.norm(x).relu_())
    y += x
    return y.relu_()


@_case(SUM)
def two_branches(net: Net, x: Tensor) -> Tensor:
    y, z = net.norm(x), net.norm_2[0](net.second[0](x))
    z += y
    return z.relu_()


@_case(SUM)
def block_without_convolution(net: Net, x: Tensor) -> Tensor:
    y = net.norm_1[0](x)
    y += x
    return y.relu_()


@_case(PLAIN)
def sum_out_of_place(net: Net, x: Tensor) -> Tensor:
    return (net.norm(x) + x).relu_()


@_case(PLAIN)
def shortcut_first(net: Net, x: Tensor) -> Tensor:
    x = x * 1
    x += net.norm(x * 2)
    return x.relu_()


@_case(PLAIN)
def scaled_addition(net: Net, x: Tensor) -> Tensor:
    return net.norm(x).add_(x, alpha=0.5).relu_()


@_case(PLAIN)
def difference(net: Net, x: Tensor) -> Tensor:
    return net.norm(x).sub_(x).relu_()


@_case(PLAIN)
def constant_added(net: Net, x: Tensor) -> Tensor:
    return net.norm(x).add_(1).relu_()


@_case(PLAIN)
def detached_input(net: Net, x: Tensor) -> Tensor:
    return net.norm(x).add_(x.detach()).relu_()


@_case(PLAIN)
def added_to_itself(net: Net, x: Tensor) -> Tensor:
    y = net.norm(x)
    y += y
    return y.relu_()


@_case(PLAIN)
def added_twice(net: Net, x: Tensor) -> Tensor:
    return net.norm(x).add_(x).add_(x).relu_()


@_case(PLAIN)
def added_per_channel(net: Net, x: Tensor) -> Tensor:
    return net.norm(x).add_(x.mean((2, 3), keepdim=True)).relu_()


@_case(PLAIN)
def added_per_image(net: Net, x: Tensor) -> Tensor:
    first = x[:1].clone()
    return net.norm(first.expand_as(x)).add_(first).relu_()


@_case(PLAIN)
def other_half_of_a_split(net: Net, x: Tensor) -> Tensor:
    """Both come from one node."""
    first, second = x.chunk(2)
    return net.norm(first).add_(second).relu_()


@_case(PLAIN)
def through_a_view(net: Net, x: Tensor) -> Tensor:
    return net.norm(x).flatten().relu().view_as(x)


@_case(PLAIN)
def of_a_clone(net: Net, x: Tensor) -> Tensor:
    return net.norm(x).clone().relu_()


@_case(PLAIN)
def changed_before_the_relu(net: Net, x: Tensor) -> Tensor:
    y = net.norm(x)
    _disturb(y)
    return y.relu()


@_case(PLAIN)
def changed_before_the_relu_in_place(net: Net, x: Tensor) -> Tensor:
    y = net.norm(x)
    _disturb(y)
    return y.relu_()


@_case(PLAIN)
def changed_before_the_sum(net: Net, x: Tensor) -> Tensor:
    y = net.norm(x)
    _disturb(y)
    return y.add_(x).relu()


@_case(PLAIN)
def changed_after_the_sum(net: Net, x: Tensor) -> Tensor:
    y = net.norm(x).add_(x)
    _disturb(y)
    return y.relu()


@_case(PLAIN)
def changed_after_the_sum_in_place(net: Net, x: Tensor) -> Tensor:
    y = net.norm(x).add_(x)
    _disturb(y)
    return y.relu_()


@_case(PLAIN)
def changed_shortcut(net: Net, x: Tensor) -> Tensor:
    y, z = net.norm(x), net.norm_2[0](net.second[0](x))
    _disturb(z)
    return y.add_(z).relu_()


@_case(PLAIN)
def functional(net: Net, x: Tensor) -> Tensor:
    """Nobody tells whether its result was changed."""
    norm = net.norm_1[0]
    return F.batch_norm(x, None, None, norm.weight, norm.bias, training=True).relu_()


def _disturb(tensor: Tensor) -> None:
    """Changes a tensor where autograd does not look."""
    with torch.no_grad():
        tensor.mul_(torch.linspace(-2, 3, 16).view(-1, 1, 1))


@pytest.mark.parametrize("name", CASES)
def test_recipe_is_used_where_it_holds(name: str) -> None:
    """And nowhere else: another one would give a gradient of its own."""
    function, expected = CASES[name]
    found, forms = train(Net(), function)
    assert sorted(set(forms)) == sorted(set(expected))
    assert found < 0.012


def changed_input(net: Net, x: Tensor) -> Tensor:
    y = net.norm(x)
    _disturb(x)
    return y.add_(x).relu_()


def changed_result(net: Net, x: Tensor) -> Tensor:
    y = net.norm(x)
    z = y.relu()
    _disturb(y)
    return z


def changed_relu(net: Net, x: Tensor) -> Tensor:
    y = net.norm(x).relu()
    _disturb(y)  # which makes some negative: they have no signs to be given
    return y


@pytest.mark.parametrize(
    ("function", "expected"), [(changed_input, [PLAIN]), (changed_result, [NORMALIZED]), (changed_relu, [])]
)
def test_what_was_changed_after_it_was_saved(function: Function, expected: list[str]) -> None:
    """Autograd itself would refuse a gradient through it; that of the head is right."""
    found, forms = train(Net(), function, heads_only=True)
    assert (forms, found < 0.012) == (expected, True)


def test_shortcut_of_another_shape() -> None:
    """One that is broadcast has its channels elsewhere."""
    net = Net()
    net.outer, net.inner, net.head = nn.BatchNorm2d(32), nn.BatchNorm1d(32), nn.Conv2d(32, 8, 1)
    nn.init.uniform_(net.inner.weight, 0.5, 2)

    def function(net: Net, x: Tensor) -> Tensor:
        wide = torch.cat([x, x + 1], 1)
        y, z = net.outer(wide * 2), net.inner(wide[0])
        y += z
        return y.relu_()

    found, forms = train(net, function, normal(1, 16, 32, 32))
    assert (forms, found < 0.012) == ([PLAIN], True)


OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "affine": ({}, [NORMALIZED, SUM]),
    "not-affine": ({"affine": False}, [PLAIN, PLAIN]),
    "no-running-statistics": ({"track_running_stats": False}, [NORMALIZED, SUM]),
    "average-of-all": ({"momentum": None}, [NORMALIZED, SUM]),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("options", "expected"), OPTIONS.values(), ids=OPTIONS)
def test_options_of_the_normalization(options: dict[str, Any], expected: list[str], training: bool) -> None:
    """Statistics must be those of the batch, and weight and bias must be there."""
    batch = training or "track_running_stats" in options
    found, forms = train(Net(**options).train(training), blocks)
    assert forms == (expected if batch else [PLAIN, PLAIN])
    assert found < 0.012


@pytest.mark.parametrize(("frozen", "expected"), [("weight", [NORMALIZED, SUM]), ("bias", [PLAIN, PLAIN])])
def test_frozen_parameters(frozen: str, expected: list[str]) -> None:
    """A frozen weight is saved all the same; of a frozen bias the graph tells nothing."""
    net = Net()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            getattr(module, frozen).requires_grad_(False)
    found, forms = train(net, blocks)
    assert (forms, found < 0.012) == (expected, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    """Statistics are of 32 bits then, or of 16."""
    found, forms = train(Net(2).to(dtype), blocks, normal(*SHAPES[2]).to(dtype))
    assert (forms, found < 0.03) == ([NORMALIZED, SUM] * 2, True)


def test_autocast() -> None:
    """Convolutions of 16 bits between parameters of 32."""

    def function(net: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return blocks(net, x).float()

    found, forms = train(Net(2), function)
    assert NORMALIZED in forms
    assert found < 0.03
