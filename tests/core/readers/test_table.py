"""What the table of readers says is true of this torch: its names exist, and backward reads no more than it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint

from daf_core.autograd.torch_private import all_nodes
from daf_core.readers.patterns import _POLES, has_pole, stops_poles
from daf_core.readers.places import more_exact
from daf_core.readers.table import (
    DIVISIONS,
    NORMS,
    POWERS,
    Bounds,
    Kind,
    Reading,
    listed,
    reading_of,
    reading_of_function,
)
from tests.core.harness import engine_for, integers, normal

aten = torch.ops.aten

PLACES = [(kind, node, field) for kind, places in listed().items() for node, field in places]

INF = math.inf


def node_of(result: Tensor, name: str = "") -> Any:
    """Returns the node that made a result, or the first one of a name behind it."""
    return next(node for node in all_nodes(result.grad_fn) if name in ("", node.name()))


@pytest.mark.parametrize(("kind", "node", "field"), PLACES, ids=[f"{node}-{field}" for _, node, field in PLACES])
def test_every_field_exists(kind: Kind, node: str, field: str) -> None:
    assert kind is not Kind.EXACT
    found = getattr(torch._C._functions, node)
    assert hasattr(found, f"_raw_saved_{field}")


@pytest.mark.parametrize("node", sorted({*_POLES, *DIVISIONS, *POWERS, *NORMS}))
def test_every_node_exists(node: str) -> None:
    assert hasattr(torch._C._functions, node)


@pytest.mark.parametrize("node", [*DIVISIONS, *POWERS, *NORMS])
def test_arguments_that_decide_exist(node: str) -> None:
    found = dir(getattr(torch._C._functions, node))
    names = {"_raw_saved_other", "_raw_saved_tensor2", "_saved_exponent", "_saved_p", "_saved_ord"}
    assert names & set(found)


BOUNDS = {
    "open": (Bounds(-1.0, 2.0), [False, False, True, True, False, False]),
    "closed": (Bounds(-1.0, 2.0, closed=True), [False, True, True, True, True, False]),
    "from below": (Bounds(-1.0, INF), [False, False, True, True, True, True]),
    "closed from below": (Bounds(-1.0, INF, closed=True), [False, True, True, True, True, True]),
    "from above": (Bounds(-INF, 2.0), [True, True, True, True, False, False]),
    "closed from above": (Bounds(-INF, 2.0, closed=True), [True, True, True, True, True, False]),
}


@pytest.mark.parametrize(("bounds", "expected"), BOUNDS.values(), ids=BOUNDS)
def test_values_are_inside_of_bounds(bounds: Bounds, expected: list[bool]) -> None:
    assert bounds.inside(torch.tensor([-1.5, -1.0, 0.0, 1.5, 2.0, 3.0])).tolist() == expected


WIDE = (0.0, 0.3, -0.3, 1.0, -7.5, 1e-4, 900.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("closed", [False, True])
def test_examples_are_inside_and_outside_in_every_type(dtype: torch.dtype, closed: bool) -> None:
    pairs = [(low, high) for low in (*WIDE, -INF) for high in (*WIDE, INF) if low < high and (low, high) != (-INF, INF)]
    for low, high in pairs:
        if high - low < 0.01 * max(abs(low), abs(high)):
            continue
        bounds = Bounds(low, high, closed)
        within, beyond = torch.tensor(bounds.examples(), dtype=dtype)
        assert bool(bounds.inside(within)), bounds
        assert not bool(bounds.inside(beyond)), bounds
        assert not math.isnan(beyond)


def large(*names: str) -> Callable[[str], bool]:
    return lambda field: field in names


X = normal(64, 64).requires_grad_()

READINGS: dict[str, tuple[Callable[[], Tensor], str, Kind, bool]] = {
    "square": (lambda: X**2, "self", Kind.APPROXIMATE, False),
    "cube of a float": (lambda: X**3.0, "self", Kind.APPROXIMATE, False),
    "first power": (lambda: X.pow(1), "self", Kind.APPROXIMATE, False),
    "root": (lambda: X**0.5, "self", Kind.EXACT, True),
    "between": (lambda: X**1.5, "self", Kind.EXACT, True),
    "inverse": (lambda: X.pow(-1), "self", Kind.EXACT, True),
    "exponents": (lambda: X ** torch.full((64, 64), 2.0), "self", Kind.EXACT, True),
    "power of a number": (lambda: torch.pow(2.0, X), "exponent", Kind.EXACT, True),
    "norm": (lambda: torch.linalg.vector_norm(X, dim=1), "self", Kind.APPROXIMATE, False),
    "sum of sizes": (lambda: torch.linalg.vector_norm(X, 1, dim=1), "self", Kind.EXACT, False),
    "largest size": (lambda: torch.linalg.vector_norm(X, INF, dim=1), "self", Kind.EXACT, False),
    "cubic norm": (lambda: torch.linalg.vector_norm(X, 3, dim=1), "self", Kind.EXACT, False),
    "norm of all": (lambda: aten.norm.Scalar(X, 2), "self", Kind.APPROXIMATE, False),
    "norm without an order": (lambda: aten.norm.ScalarOpt_dim(X, None, [1]), "self", Kind.APPROXIMATE, False),
    "old sum of sizes": (lambda: aten.norm.ScalarOpt_dim(X, 1, [1]), "self", Kind.EXACT, False),
    "its result": (lambda: torch.linalg.vector_norm(X, dim=1), "result", Kind.EXACT, False),
    "product": (lambda: X * X, "self", Kind.APPROXIMATE, False),
    "maximum": (lambda: X.amax(1), "self", Kind.EXACT, False),
    "logarithm": (lambda: X.abs().log(), "self", Kind.EXACT, True),
    "square root": (lambda: X.abs().sqrt(), "result", Kind.EXACT, True),
    "unknown field": (lambda: X * X, "third", Kind.EXACT, False),
    "no field": (lambda: X * X, "", Kind.EXACT, False),
    "unknown node": (lambda: X.erf(), "self", Kind.EXACT, False),
    "softmax": (lambda: X.softmax(1), "result", Kind.APPROXIMATE, False),
    "normalization": (lambda: F.layer_norm(X, (64,)), "input", Kind.NORMALIZED, False),
    "its mean": (lambda: F.layer_norm(X, (64,)), "result1", Kind.EXACT, False),
}


@pytest.mark.parametrize(("result", "field", "kind", "pole"), READINGS.values(), ids=READINGS)
def test_arguments_decide_what_is_read(result: Callable[[], Tensor], field: str, kind: Kind, pole: bool) -> None:
    node = node_of(result())
    reading = reading_of(node, field)
    assert (reading.kind, reading.reader) == (kind, node.name())
    assert reading.takes_approximations is (kind in (Kind.APPROXIMATE, Kind.NORMALIZED))
    assert has_pole(node, large()) is pole


def test_a_divisor_decides_by_its_size() -> None:
    node = node_of(X / X.detach().square())
    assert reading_of(node, "self", large()).kind is Kind.APPROXIMATE
    assert reading_of(node, "self", large("other")).kind is Kind.EXACT
    assert reading_of(node, "self").kind is Kind.EXACT
    assert reading_of(node, "other", large()).kind is Kind.EXACT
    assert (has_pole(node, large("other")), has_pole(node, large())) == (True, False)
    parts = node_of(torch.addcdiv(X, X, X.square() + 1), "AddcdivBackward0")
    assert {reading_of(parts, field, large()).kind for field in ("tensor1", "tensor2", "self")} == {Kind.EXACT}


def test_sums_and_activation_functions_stop_poles() -> None:
    weight = normal(64, 64)
    stops = [X @ weight, F.linear(X, weight, weight[0]), X.mean(1), X.sum(), F.gelu(X), F.layer_norm(X, (64,))]
    passes = [X.softmax(1), X.sigmoid(), X + 1, X * X, X.exp(), X.abs()]
    assert all(stops_poles(node_of(result)) for result in stops)
    assert not any(stops_poles(node_of(result)) for result in passes)


# The gradient passes there before torch 2.14.
AT_BOUNDS = float(torch.autograd.grad((edge := torch.ones((), requires_grad=True)).clamp(max=1.0), edge)[0]) == 1

CLAMPS: dict[str, tuple[Callable[[], Tensor], Bounds | None]] = {
    "both": (lambda: X.clamp(-1, 2), Bounds(-1, 2, closed=AT_BOUNDS)),
    "least": (lambda: X.clamp(min=0.5), Bounds(0.5, INF, closed=AT_BOUNDS)),
    "most": (lambda: X.clamp(max=0.5), Bounds(-INF, 0.5, closed=AT_BOUNDS)),
    "infinite and most": (lambda: X.clamp(-INF, 0.5), Bounds(-INF, 0.5, closed=AT_BOUNDS)),
    "infinite": (lambda: X.clamp(-INF, INF), None),
    "infinite least": (lambda: X.clamp(min=-INF), None),
    "no number": (lambda: X.clamp(min=math.nan), None),
    "clamp_min": (lambda: X.clamp_min(-0.25), Bounds(-0.25, INF, closed=AT_BOUNDS)),
    "clamp_max": (lambda: X.clamp_max(0.25), Bounds(-INF, 0.25, closed=AT_BOUNDS)),
    "hardtanh": (lambda: F.hardtanh(X, -0.5, 0.75), Bounds(-0.5, 0.75)),
    "relu6": (lambda: F.relu6(X), Bounds(0, 6)),
    "hardsigmoid": (lambda: F.hardsigmoid(X), Bounds(-3, 3)),
    "hardshrink": (lambda: F.hardshrink(X, 0.25), Bounds(-0.25, 0.25, closed=True)),
    "softshrink": (lambda: F.softshrink(X, 0.75), Bounds(-0.75, 0.75, closed=True)),
    "threshold": (lambda: F.threshold(X, 0.25, 1.0), Bounds(0.25, INF)),
    "leaky_relu": (lambda: F.leaky_relu(X), Bounds(0, INF)),
}


@pytest.mark.parametrize(("result", "bounds"), CLAMPS.values(), ids=CLAMPS)
def test_bounds_are_those_of_the_call(result: Callable[[], Tensor], bounds: Bounds | None) -> None:
    reading = reading_of(node_of(result()), "self")
    assert reading.bounds == bounds
    assert reading.kind is (Kind.EXACT if bounds is None else Kind.SIDES)


JUMPS: dict[str, tuple[Callable[[Tensor], Tensor], str, Bounds | None]] = {
    "hardswish": (F.hardswish, "self", Bounds(-3, 3)),
    "prelu": (lambda x: F.prelu(x, x.detach().new_tensor([0.5])), "self", Bounds(0, INF)),
    "selu": (F.selu, "self", Bounds(0, INF)),
    "selu_": (lambda x: F.selu_(x * 1), "result", Bounds(0, INF)),
    "elu of another slope": (lambda x: F.elu(x, 0.5), "self", Bounds(0, INF)),
    "elu": (F.elu, "self", None),
    "elu_": (lambda x: F.elu_(x * 1), "result", None),
    "celu": (lambda x: F.celu(x, 2.0), "self", None),
    "gelu": (F.gelu, "self", None),
    "gelu of tanh": (lambda x: F.gelu(x, approximate="tanh"), "self", None),
    "silu": (F.silu, "self", None),
    "mish": (F.mish, "self", None),
    "softplus": (F.softplus, "self", None),
    "logsigmoid": (F.logsigmoid, "self", None),
    "sigmoid": (torch.sigmoid, "result", None),
    "tanh": (torch.tanh, "result", None),
    "sin": (torch.sin, "self", None),
    "atan": (torch.atan, "self", None),
    "asinh": (torch.asinh, "self", None),
    "var": (lambda x: x.view(-1, 2).var(1), "self", None),
}


@pytest.mark.parametrize(("call", "field", "bounds"), JUMPS.values(), ids=JUMPS)
def test_gradients_of_approximate_values_jump_at_their_bounds_alone(
    call: Callable[[Tensor], Tensor], field: str, bounds: Bounds | None
) -> None:
    values = torch.linspace(-8, 8, 16001, dtype=torch.float64)[:16000].requires_grad_()
    result = call(values)
    reading = reading_of(node_of(result), field)
    assert (reading.kind, reading.bounds) == (Kind.APPROXIMATE, bounds)
    (slopes,) = torch.autograd.grad(result.sum(), values)
    jumps = (slopes.diff().abs() > 0.02).nonzero().flatten()
    found = values.detach()[jumps].tolist()
    expected = [] if bounds is None else [each for each in (bounds.low, bounds.high) if math.isfinite(each)]
    assert found == pytest.approx(expected, abs=2e-3)


def test_what_serves_two_readings_keeps_the_bounds_of_both() -> None:
    smooth, jumps = Reading(Kind.APPROXIMATE, "Mul"), Reading(Kind.APPROXIMATE, "Hardswish", Bounds(-3, 3))
    above = replace(jumps, bounds=Bounds(0, INF))
    for first, second in ((smooth, jumps), (jumps, smooth), (jumps, jumps)):
        assert more_exact(first, second).bounds == jumps.bounds
    assert more_exact(jumps, above).kind is Kind.EXACT
    assert more_exact(jumps, Reading(Kind.NORMALIZED, "Norm")).kind is Kind.EXACT
    assert more_exact(smooth, Reading(Kind.NORMALIZED, "Norm")).kind is Kind.NORMALIZED


@pytest.mark.parametrize("dim", [-1, -2, -3, 0, 1, 2])
def test_the_dimension_of_probabilities_counts_from_the_end(dim: int) -> None:
    reading = reading_of(node_of(normal(3, 4, 5).requires_grad_().log_softmax(dim)), "result")
    assert (reading.kind, reading.dim) == (Kind.LOGARITHMS, dim if dim < 0 else dim - 3)


class _Product(torch.autograd.Function):
    """A function of a user's."""


class CompiledFunction(torch.autograd.Function):
    """A function that has the name of those of torch.compile."""


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (_Product, Kind.EXACT),
        (CompiledFunction, Kind.EXACT),
        (checkpoint.CheckpointFunction, Kind.APPROXIMATE),
    ],
)
def test_functions_are_read_exactly_unless_known(function: type, kind: Kind) -> None:
    assert reading_of_function(function).kind is kind
    assert reading_of_function(function).reader == f"{function.__name__}Backward"


def _maps(*sizes: int) -> Tensor:
    return normal(2, 3, *sizes).requires_grad_()


SHAPES: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    name: (lambda make=make, call=call: (leaf := make(), call(leaf)))
    for name, make, call in [
        ("NllLossBackward0", lambda: normal(9, 7).requires_grad_(), lambda x: F.nll_loss(x, integers(7, 9))),
        ("NllLoss2DBackward0", lambda: _maps(4, 5), lambda x: F.nll_loss(x, integers(3, 2, 4, 5))),
        ("GatherBackward0", lambda: _maps(4), lambda x: x.gather(2, integers(4, 2, 3, 2))),
        ("TakeBackward0", lambda: _maps(4), lambda x: x.take(integers(24, 9))),
        ("MaskedSelectBackward0", lambda: _maps(4), lambda x: x.masked_select(normal(2, 3, 4) > 0)),
        ("MaxPool2DWithIndicesBackward0", lambda: _maps(6, 6), lambda x: F.max_pool2d(x, 2)),
        ("MaxPool3DWithIndicesBackward0", lambda: _maps(4, 4, 4), lambda x: F.max_pool3d(x, 2)),
        ("AdaptiveMaxPool2DBackward0", lambda: _maps(6, 6), lambda x: F.adaptive_max_pool2d(x, 2)),
        ("AdaptiveMaxPool3DBackward0", lambda: _maps(4, 4, 4), lambda x: F.adaptive_max_pool3d(x, 2)),
        ("FractionalMaxPool2DBackward0", lambda: _maps(6, 6), lambda x: F.fractional_max_pool2d(x, 2, 3)),
        ("FractionalMaxPool3DBackward0", lambda: _maps(6, 6, 6), lambda x: F.fractional_max_pool3d(x, 2, 3)),
        ("AvgPool2DBackward0", lambda: _maps(6, 6), lambda x: F.avg_pool2d(x, 2)),
        ("AvgPool3DBackward0", lambda: _maps(4, 4, 4), lambda x: F.avg_pool3d(x, 2)),
        ("AdaptiveAvgPool2DBackward0", lambda: _maps(6, 6), lambda x: F.adaptive_avg_pool2d(x, 2)),
        ("AdaptiveAvgPool3DBackward0", lambda: _maps(4, 4, 4), lambda x: F.adaptive_avg_pool3d(x, 2)),
        ("ReflectionPad1DBackward0", lambda: _maps(6), lambda x: F.pad(x, (2, 1), "reflect")),
        ("ReflectionPad2DBackward0", lambda: _maps(6, 6), lambda x: F.pad(x, (2, 1) * 2, "reflect")),
        ("ReflectionPad3DBackward0", lambda: _maps(6, 6, 6), lambda x: F.pad(x, (2, 1) * 3, "reflect")),
        ("ReplicationPad1DBackward0", lambda: _maps(6), lambda x: F.pad(x, (2, 1), "replicate")),
        ("ReplicationPad2DBackward0", lambda: _maps(6, 6), lambda x: F.pad(x, (2, 1) * 2, "replicate")),
        ("ReplicationPad3DBackward0", lambda: _maps(6, 6, 6), lambda x: F.pad(x, (2, 1) * 3, "replicate")),
    ]
}


def test_all_operators_that_read_shapes_are_called() -> None:
    assert set(SHAPES) == {node for node, _ in listed()[Kind.SHAPE]}


@pytest.mark.parametrize("name", SHAPES)
def test_zeros_in_place_of_values_make_no_difference(name: str) -> None:
    found: list[Tensor] = []
    for zeros in (False, True):
        torch.manual_seed(0)
        leaf, result = SHAPES[name]()
        if zeros:
            node_of(result, name)._raw_saved_self.register_hooks(torch.clone, torch.zeros_like)
        result.backward(normal(1, *result.shape, seed=5)[0])
        assert leaf.grad is not None
        found.append(leaf.grad)
    assert torch.equal(*found)
    assert found[0].count_nonzero() > 0


SIDES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "relu": (F.relu, "ReluBackward0"),
    "relu_": (torch.relu_, "ReluBackward0"),
    "leaky_relu": (F.leaky_relu, "LeakyReluBackward0"),
    "leaky_relu of a negative slope": (lambda x: F.leaky_relu(x, -0.5), "LeakyReluBackward0"),
    "leaky_relu_": (F.leaky_relu_, "LeakyReluBackward1"),
    "rrelu of one slope": (lambda x: F.rrelu(x, 0.2, 0.2, training=True), "RreluWithNoiseBackward0"),
    "rrelu_ of one slope": (lambda x: F.rrelu(x, 0.2, 0.2, training=True, inplace=True), "RreluWithNoiseBackward1"),
    "threshold": (lambda x: F.threshold(x, 0.5, 2.0), "ThresholdBackward0"),
    "threshold_": (lambda x: F.threshold_(x, 0.5, 0.25), "ThresholdBackward1"),
    "hardtanh": (lambda x: F.hardtanh(x, -0.5, 1.0), "HardtanhBackward0"),
    "hardtanh_": (lambda x: F.hardtanh_(x, -0.5, 1.0), "HardtanhBackward0"),
    "relu6": (F.relu6, "HardtanhBackward0"),
    "hardsigmoid": (F.hardsigmoid, "HardsigmoidBackward0"),
    "clamp": (lambda x: x.clamp(-0.5, 1.0), "ClampBackward1"),
    "clamp_": (lambda x: x.clamp_(-0.5, 1.0), "ClampBackward1"),
    "clamp of a least": (lambda x: x.clamp(min=0.5), "ClampBackward1"),
    "clamp_min": (lambda x: x.clamp_min(-0.5), "ClampMinBackward0"),
    "clamp_max": (lambda x: x.clamp_max(-0.5), "ClampMaxBackward0"),
    "hardshrink": (lambda x: F.hardshrink(x, 0.5), "HardshrinkBackward0"),
    "softshrink": (lambda x: F.softshrink(x, 0.5), "SoftshrinkBackward0"),
}

EDGES = torch.tensor([-3.0, -0.5, -0.0, 0.0, 0.5, 1.0, 3.0, 6.0])
NEAR = torch.cat([EDGES, EDGES + 1e-5, EDGES - 1e-5, EDGES + 0.01])


def test_all_operators_that_read_sides_are_called() -> None:
    assert {name for _, name in SIDES.values()} == {node for node, _ in listed()[Kind.SIDES]}


def _on_and_off_bounds(dtype: torch.dtype) -> Tensor:
    return torch.cat([NEAR.repeat(64), normal(6144) * 3]).to(dtype).view(128, 64)


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bit_for_each_side_gives_the_plain_gradient(name: str, dtype: torch.dtype) -> None:
    if dtype is torch.float16 and "RreluWithNoise" in SIDES[name][1]:
        pytest.skip("torch has no rrelu of float16 on a CPU")
    call, node = SIDES[name]
    values = _on_and_off_bounds(dtype)
    weights = normal(128, 64, seed=3).to(dtype)
    plain = values.clone().requires_grad_()
    call(plain + 0).backward(weights)
    engine = engine_for(nn.Linear(1, 1), 2)
    for _ in range(2):
        leaf = values.clone().requires_grad_()
        with engine.compress():
            result = call(leaf + 0)
        assert result.grad_fn is not None
        assert result.grad_fn.name() == node
        result.backward(weights)
        assert torch.equal(leaf.grad, plain.grad)  # pyright: ignore[reportArgumentType]
        del result
        assert set(engine.finish_step().stored_as) & {"sides", "signs"}


@pytest.mark.parametrize("name", [name for name in SIDES if name != "hardsigmoid"])  # torch has none of that one
def test_a_bit_for_each_side_gives_the_plain_gradient_of_the_gradient(name: str) -> None:
    found: list[list[Tensor]] = []
    engine = engine_for(nn.Linear(1, 1), 2)
    for compressed in (False, True, True):
        leaf = _on_and_off_bounds(torch.float32).requires_grad_()
        weights = normal(128, 64, seed=3).requires_grad_()
        if compressed:
            with engine.compress():
                result = SIDES[name][0](leaf + 0)
        else:
            result = SIDES[name][0](leaf + 0)
        (first,) = torch.autograd.grad(result, leaf, weights, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), weights)
        found.append([first.detach(), second])
        del result, first
    for first, second in found[1:]:
        assert torch.equal(first, found[0][0])
        assert torch.equal(second, found[0][1])
    assert set(engine.finish_step().stored_as) & {"sides", "signs"}
