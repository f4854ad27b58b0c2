"""What is not compiled, in a process or a model where something else is: it is stored as if nothing were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from daf_core import HooksActiveError
from tests.core.harness import (
    MODELS,
    assert_empty,
    assert_same,
    backward,
    engine_for,
    error,
    gradients,
    make_model,
    normal,
    take_the_full_way,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    # Dynamo looks at the gradient of whatever it meets.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

BACKENDS = ["eager", "aot_eager", "aot_eager_decomp_partition"]
X = normal(128, 64)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_its_own_is_stored_as_before(name: str) -> None:
    found = []
    for other_is_compiled in (False, True):
        if other_is_compiled:
            nn.Linear(2, 2).compile(backend="eager")
            torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(2))
        model, loss_of = make_model(name)
        engine = engine_for(model, 4, packing="device")
        take_the_full_way(engine)
        for seed in range(3):
            backward(model, loss_of, engine, seed)
        found.append((gradients(model), engine.finish_step().stored_as))
        assert_empty(engine)
    (before, stored_before), (after, stored_after) = found
    assert stored_after == stored_before
    assert_same(after, before)


def test_two_engines_at_once_are_refused_by_name() -> None:
    """The hook for graphs is a graph module, whose name is its source."""
    torch.compile(nn.Identity(), backend="eager")(torch.ones(1))
    model, loss_of = make_model("mlp")
    first, second = engine_for(model, 4), engine_for(model, 4)
    expected = r"hooks of daf_core\.saved_tensors\.replay \(Replays\.pack_at\) are already active"
    with pytest.raises(HooksActiveError, match=expected), first.compress(), second.compress():
        loss_of(model, 0)


class Half(nn.Module):
    """A layer that is compiled, and what follows it."""

    def __init__(self, head: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(64, 64), head

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layer(inputs))


HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "pole": lambda x: F.binary_cross_entropy(torch.sigmoid(6 * x), (X > 0).float()),
    "quotient": lambda x: (1 / (x.square() + 1e-3)).mean(),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HEADS)
def test_the_rest_of_a_model_is_read_by_the_table(name: str, backend: str) -> None:
    model = Half(HEADS[name])
    exact = backward(model, lambda model, _: model(X))
    model.layer.compile(backend=backend)
    engine = engine_for(model, 8)
    for _ in range(3):
        assert error(backward(model, lambda model, _: model(X), engine), exact) < 0.05
        assert_empty(engine)


def test_the_rest_of_a_model_is_derived() -> None:
    """Products of dropout outside of the graph are worked out from what else is stored."""
    stored = []
    for compiled in (False, True):
        model, loss_of = make_model("transformer")
        if compiled:
            model.blocks[0].compile(backend="aot_eager")
        engine = engine_for(model, 4, packing="device")
        backward(model, loss_of, engine)
        stored.append(engine.finish_step().stored_as)
        assert_empty(engine)
    assert stored[0]["product"] > 0
    assert stored[1]["product"] == stored[0]["product"] / 2  # one block of two


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_of_a_checkpoint_are_coded(backend: str) -> None:
    """No node saves them: the function that is running tells, and torch has some of its own around its hooks."""
    model = Half(lambda x: checkpoint(lambda y: y.sin().mean(), x, use_reentrant=False))
    model.layer.compile(backend=backend)
    engine = engine_for(model, 8)
    for _ in range(2):
        backward(model, lambda model, _: model(X.clone()), engine)
        stored = engine.finish_step().stored_as
        assert_empty(engine)
    assert stored["planes"] > 0
    assert "raw" not in stored


class Lazy(nn.Module):
    """A layer of which a part is compiled when it runs for the first time, as transformers compiles attentions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.head = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)
        self.compiled: Callable[[Tensor], Tensor] | None = None

    def bent(self, inputs: Tensor) -> Tensor:
        normalized = self.norm(inputs)
        return torch.where(normalized > 0, normalized, normalized / 10)

    def forward(self, inputs: Tensor, compiles: bool = True) -> Tensor:
        if self.compiled is None and compiles:
            self.compiled = torch.compile(self.bent, backend="aot_eager_decomp_partition")
        bent = self.compiled if self.compiled is not None and compiles else self.bent
        return F.cross_entropy(self.head(bent(self.layer(inputs))), torch.arange(len(inputs)) % 8)


@pytest.mark.parametrize("reset", [False, True], ids=["in forward", "reset before"])
def test_a_graph_that_was_compiled_without_codes_saves_what_it_saves(reset: bool) -> None:
    """Nobody looks into it: errors of what it compares were .04, and NaN of a maximum. The next pass compiles codes."""
    model, inputs = Lazy(), normal(512, 64)
    expected = backward(model, lambda model, _: model(inputs, compiles=False))
    if reset:
        model(inputs)
        torch.compiler.reset()
    engine, held = engine_for(model, 8), list[int]()
    for _ in range(3):
        assert error(backward(model, lambda model, _: model(inputs), engine), expected) < 0.02
        held.append(engine.finish_step().held_bytes)
    assert held[0] > held[1] == held[2]
    assert_empty(engine)
