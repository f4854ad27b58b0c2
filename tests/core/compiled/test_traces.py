"""What hooks do in a graph is traced once for each kind of tensor, and is the same as if it was traced each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from torch import Tensor, nn
from torch._functorch._aot_autograd import graph_compile

from daf_core.compiled.hooks import _Pair
from tests.core.harness import engine_for, normal

WIDTH = 256


class Chain(nn.Module):
    """Layers that save tensors of three kinds each: for a matrix product, of a GELU, and a mask."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(nn.functional.gelu(layer(x)), 0.1)
        return x.square().mean()


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hooks that torch traces from now on."""
    found: list[str] = []
    prepare: Callable[..., Any] = graph_compile.prepare_hook_gm

    def noted(config: Any, hook: Any, arguments: Any) -> Any:
        found.append(hook._function.__name__)
        return prepare(config, hook, arguments)

    monkeypatch.setattr(graph_compile, "prepare_hook_gm", noted)
    return found


def gradient(layers: int, backend: str = "aot_eager", dynamic: bool | None = None) -> Tensor:
    torch.compiler.reset()
    model = Chain(layers)
    engine = engine_for(model, 4)
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    before = graph_compile.prepare_hook_gm
    with functorch.patch(enable_autograd_cache=False), engine.compress():
        torch.manual_seed(1)
        loss = compiled(normal(64, WIDTH))
    assert graph_compile.prepare_hook_gm is before
    loss.backward()
    assert sum(engine.finish_step().stored_as.values()) > layers
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def test_more_layers_have_no_more_traces(traces: list[str]) -> None:
    gradient(3)
    few = len(traces)
    gradient(6)
    assert 0 < few == len(traces) - few


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [None, True], ids=["known", "unknown"])
def test_gradients_are_those_of_traces_of_their_own(
    backend: str, dynamic: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = gradient(4, backend, dynamic)
    monkeypatch.setattr(_Pair, "traced", lambda *given: given[-1]())
    assert torch.equal(once, gradient(4, backend, dynamic))


def test_two_sizes_may_be_one_symbol() -> None:
    """Images are square: what a hook gives for backward has each symbol once, and so has the account."""
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.GELU(), nn.Conv2d(4, 4, 1))
    images = normal(4, 4, 24, 24)
    engine = engine_for(model, 8)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    with engine.compress():
        loss = compiled(images).square().sum()
    loss.backward()
    found = [each.grad for each in model.parameters()]
    assert sum(engine.finish_step().stored_as.values()) > 1
    model.zero_grad()
    model(images).square().sum().backward()
    for each, exact in zip(found, model.parameters(), strict=True):
        assert each is not None
        assert exact.grad is not None
        assert (each - exact.grad).norm() < 0.02 * exact.grad.norm()
