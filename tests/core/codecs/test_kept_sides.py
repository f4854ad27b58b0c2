"""Where a derivative jumps, decoded values stay on their side of the jump: one bit an element says on which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from daf_core.codecs.base import EncodeContext
from daf_core.codecs.common_row import RowBlocks
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.scaling_groups import Grouping, grouping_of
from daf_core.codecs.tensor_layout import geometry_of
from daf_core.memory.pager import Pager
from daf_core.memory.pages.pool import PagePool
from daf_core.readers.table import Bounds
from daf_kernels import load_backend
from tests.core.harness import assert_empty, backward, engine_for, error, normal, pager_of, take_the_full_way

CPU = torch.device("cpu")
INF = float("inf")
BOUNDS = {"above zero": Bounds(0.0, INF), "below one": Bounds(-INF, 1.0), "between": Bounds(-3.0, 3.0)}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

Function = Callable[[Tensor], Tensor]


def near(bounds: Bounds, *shape: int) -> Tensor:
    """Returns normal values, of which many lie close to a bound, and some on it."""
    values = 2 * normal(*shape)
    finite = [bound for bound in (bounds.low, bounds.high) if abs(bound) < INF]
    for place, bound in enumerate(finite):
        values.view(-1)[place::5] = bound + 0.01 * normal(len(values.view(-1)[place::5]), seed=1)
        values.view(-1)[place::50] = bound
    return values


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", [8, 4, 1, 0])
@pytest.mark.parametrize("layout", ["rows", "channels", "channels last", "what rows share"])
def test_values_stay_on_their_side(bounds: Bounds, dtype: torch.dtype, precision: int, layout: str) -> None:
    """However few planes are left of them, and whatever else is kept beside."""
    values = near(bounds, 8, 12, 16, 32).to(dtype)
    if layout == "channels last":
        values = values.contiguous(memory_format=torch.channels_last)
    geometry = geometry_of(tuple(values.shape), values.stride())
    groups = Grouping(64) if layout == "rows" else grouping_of(geometry, "ConvolutionBackward0")
    if layout == "what rows share":
        groups = Grouping(64, beside=RowBlocks(1, 768, 64, 64))
    pager, compact = Pager(PagePool(CPU)), geometry.compact(values)
    ctx = EncodeContext(compact, pager, load_backend(CPU), replace(groups, bounds=bounds), precision=precision)
    stored = PlanesActivation.write(ctx)
    assert stored is not None
    decoded = torch.empty_like(compact)
    stored.decode_into(decoded)
    assert torch.equal(bounds.inside(decoded), bounds.inside(compact))
    assert stored.bounds == bounds
    assert pager.held_bytes == stored.held_bytes
    assert error([decoded.float()], [compact.float()]) < {8: 0.02, 4: 0.15, 1: 0.7, 0: 1.3}[precision]
    del stored
    assert pager.settle() == 0


def test_without_bounds_values_cross_them() -> None:
    bounds = BOUNDS["between"]
    values = near(bounds, 64, 96).view(-1)
    stored = PlanesActivation.write(EncodeContext(values, Pager(PagePool(CPU)), load_backend(CPU), Grouping(96)))
    assert stored is not None
    decoded = torch.empty_like(values)
    stored.decode_into(decoded)
    assert not torch.equal(bounds.inside(decoded), bounds.inside(values))


def selu_in_place(values: Tensor) -> Tensor:
    return F.selu_(values + 0)


FUNCTIONS: dict[str, tuple[Function, Bounds]] = {
    "hardswish": (F.hardswish, BOUNDS["between"]),
    "selu": (F.selu, BOUNDS["above zero"]),
    "selu in place": (selu_in_place, BOUNDS["above zero"]),
    "elu of another slope": (lambda values: F.elu(values, 0.25), BOUNDS["above zero"]),
    "prelu": (lambda values: F.prelu(values, torch.full((1,), 0.25, dtype=values.dtype)), BOUNDS["above zero"]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_slope_never_jumps_at_random(name: str, dtype: torch.dtype) -> None:
    """At 2 bits, in first passes and in those that are replayed: where the slope is one number, it is that number."""
    function, bounds = FUNCTIONS[name]
    values = near(bounds, 128, 256).to(dtype)
    plain = values.clone().requires_grad_()
    function(plain + 0).sum().backward()
    flat = bounds.inside(values) if name != "hardswish" else ~bounds.inside(values)
    engine = engine_for(nn.Linear(1, 1), 2)
    for _ in range(4):
        leaf = values.clone().requires_grad_()
        with engine.compress():
            result = function(leaf + 0)
        result.sum().backward()
        del result
        assert plain.grad is not None
        assert leaf.grad is not None
        assert torch.equal(leaf.grad[flat], plain.grad[flat])
        assert engine.finish_step().stored_as["planes"] == 1
    assert_empty(engine)


def network(function: Function, normalizes: bool) -> nn.Module:
    """Returns four layers with an activation function, of normalized values or of others."""

    class Activation(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return function(values)

    torch.manual_seed(0)
    layers = list[nn.Module]()
    for _ in range(4):
        layers += [nn.Linear(128, 128), *([nn.LayerNorm(128)] if normalizes else []), Activation()]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def loss_of(model: nn.Module, _: int) -> Tensor:
    return F.cross_entropy(model(normal(512, 128)), torch.arange(512) % 10)


@pytest.mark.parametrize("normalizes", [True, False], ids=["what follows", "values"])
@pytest.mark.parametrize("name", ["hardswish", "selu", "elu of another slope", "prelu"])
def test_gradients_are_as_exact_as_those_of_smooth_functions(name: str, normalizes: bool) -> None:
    """At 8 bits the error of a SELU's was .046, and of an ELU's with another slope .035."""
    model = network(FUNCTIONS[name][0], normalizes)
    engine, expected = engine_for(model, 8), backward(model, loss_of)
    for _ in range(3):
        assert error(backward(model, loss_of, engine), expected) < 0.012
    stored_as = engine.finish_step().stored_as
    assert bool(stored_as.get("bounded")) is normalizes
    assert_empty(engine)


@pytest.mark.parametrize("name", ["hardswish", "selu", "prelu"])
@pytest.mark.parametrize("normalizes", [True, False])
def test_what_is_replayed_is_what_is_decided_anew(name: str, normalizes: bool) -> None:
    found = list[list[Tensor]]()
    held = list[int]()
    for anew in (False, True):
        model = network(FUNCTIONS[name][0], normalizes)
        engine = engine_for(model, 4)
        if anew:
            take_the_full_way(engine)
        for _ in range(4):
            gradients = backward(model, loss_of, engine)
        with engine.compress():
            loss = loss_of(model, 0)
        held.append(engine.held_bytes)
        del loss
        found.append(gradients)  # pyright: ignore[reportPossiblyUnboundVariable]
        assert_empty(engine)
    assert all(map(torch.equal, *found))
    assert held[0] == held[1]


@pytest.mark.parametrize("name", ["hardswish", "selu", "selu in place", "elu of another slope", "prelu"])
@pytest.mark.parametrize("normalizes", [True, False])
def test_a_budget_has_no_bits_for_them(name: str, normalizes: bool) -> None:
    """What cannot be dropped would make the least budget four times as large."""
    model = network(FUNCTIONS[name][0], normalizes)
    expected = backward(model, loss_of)
    engine = ActivationEngine(model, DAFConfig(precision=8, memory_budget="600kB"))
    for _ in range(4):
        found = backward(model, loss_of, engine)
        assert error(found, expected) < 0.25
        assert pager_of(engine).finish_step().peak_bytes <= 600_000
    engine.set_memory_budget("100kB")
    backward(model, loss_of, engine)
    assert pager_of(engine).finish_step().peak_bytes <= 100_000
    assert_empty(engine)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("first", [0, 3])
def test_a_budget_may_go_while_a_graph_is_alive(name: str, first: int) -> None:
    """What was stored within it has no sides, and is read as such."""
    model = network(FUNCTIONS[name][0], False)
    engine = ActivationEngine(model, DAFConfig(precision=8, memory_budget="3MB"))
    for _ in range(first):
        backward(model, loss_of, engine)
    with engine.compress():
        loss = loss_of(model, 0)
    engine.set_memory_budget(None)
    loss.backward()
    expected = backward(model, loss_of)
    del loss
    for _ in range(3):
        found = backward(model, loss_of, engine)
    assert error(found, expected) < 0.012  # pyright: ignore[reportPossiblyUnboundVariable]
    assert_empty(engine)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("way", ["chunk", "channels last", "every second", "expanded"])
def test_whatever_lies_between_the_values(name: str, way: str) -> None:
    """Also in passes that are replayed: a half of a projection's result is read row by row."""
    function, layer = FUNCTIONS[name][0], nn.Linear(64, 256)

    def seen(values: Tensor) -> tuple[Tensor, Tensor | float]:
        if way == "chunk":
            first, second = layer(values).chunk(2, -1)
            return first, second
        if way == "channels last":
            return layer(values).view(8, 8, 8, 256).permute(0, 3, 1, 2), 1.0
        if way == "every second":
            return layer(values)[:, ::2], 1.0
        return layer(values)[:, None].expand(-1, 2, -1), 1.0

    def loss(model: nn.Module, _: int) -> Tensor:
        first, factor = seen(normal(512, 64))
        return (function(first + 0 if "in place" in name else first) * factor).square().mean()

    engine, expected = engine_for(layer, 8), backward(layer, loss)
    for _ in range(8):
        assert error(backward(layer, loss, engine), expected) < 0.02
    assert_empty(engine)


def test_what_rows_share_is_kept_too() -> None:
    """Values of a vector that all rows share, and small differences, have both beside their codes."""
    shared = 5 * normal(96, seed=1)
    leaf = (normal(512, 96) / 10 + shared).requires_grad_()
    plain = leaf.detach().clone().requires_grad_()
    F.selu(plain + 0).sum().backward()
    engine = engine_for(nn.Linear(1, 1), 4)
    for _ in range(3):
        leaf.grad = None
        with engine.compress():
            result = F.selu(leaf + 0)
        result.sum().backward()
        del result
    assert leaf.grad is not None
    assert plain.grad is not None
    assert error([leaf.grad], [plain.grad]) < 0.01
