"""Rule 7: parameters, their views and their low-precision casts are no activations."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from tests.core.harness import (
    LARGE,
    Saved,
    Transformer,
    assert_same,
    backward,
    engine_for,
    error,
    integers,
    make_model,
    normal,
    train,
    transformer_loss,
    watch,
)


def _forms_of_parameters(model: nn.Module, seen: list[Saved]) -> list[str]:
    """The forms of everything saved that lies in the storage of a parameter or buffer."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    return [saved.form for saved in seen if saved.storage in storages]


@pytest.mark.parametrize("name", ["transformer", "convnet", "rnn", "mlp"])
def test_rule_7_parameters_pass_through_uncounted(name: str) -> None:
    """Weights are saved as themselves, as transposed views, frozen or not, tied or not: all pass through."""
    model, loss = make_model(name)
    engine = engine_for(model, 1)
    seen = watch(engine)
    backward(model, loss, engine)
    found = _forms_of_parameters(model, seen)
    assert len(found) >= 2
    assert set(found) == {"parameter"}
    counted = sum(engine.finish_step().stored_as.values())
    assert counted == len([saved for saved in seen if saved.form != "parameter"])


VIEWS = {
    "itself": lambda weight: weight,
    "transposed": lambda weight: weight.t(),
    "rows": lambda weight: weight[:100],
    "detached": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "strided": lambda weight: weight[::2],
    "expanded": lambda weight: weight.expand(2, -1, -1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_rule_7_views_of_parameters_are_known_by_storage(kind: str, view) -> None:
    """Neither the type nor the shape of what is saved tells a parameter, its storage does."""
    model = nn.Module()
    model.trained = nn.Parameter(torch.ones(1))
    weight = normal(256, 64)
    if kind == "parameter":
        model.weight = nn.Parameter(weight, requires_grad=False)
    else:
        model.register_buffer("weight", weight)
    engine = engine_for(model, 4)
    seen = watch(engine)
    with engine.compress():
        (view(model.weight) * model.trained).sum().backward()
    assert {saved.form for saved in seen if saved.shape != (1,)} == {"parameter"}
    assert engine.finish_step().raw_bytes == 0


MOVES = {
    "data": lambda weight: setattr(weight, "data", weight.data.clone()),
    "to": lambda weight: setattr(weight, "data", weight.data.to(torch.float16)),
    "set_": lambda weight: weight.data.set_(weight.data.clone()),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_rule_7_parameters_that_move_between_steps(move) -> None:
    """Storages are looked up anew at every forward pass."""
    model = nn.Linear(64, 128, bias=False)
    engine = engine_for(model, 4)
    for _ in range(3):
        seen = watch(engine)
        x = normal(*LARGE).to(model.weight.dtype).requires_grad_()
        with engine.compress():
            loss = model(x).sum()
        loss.backward()
        assert _forms_of_parameters(model, seen) == ["parameter"]
        assert engine.finish_step().raw_bytes == x.nbytes
        model.zero_grad()
        with torch.no_grad():
            move(model.weight)


def test_rule_7_old_storage_of_a_moved_parameter_is_an_activation_again() -> None:
    """What a parameter left behind is known as an ordinary tensor from the next pass on."""
    model = nn.Linear(64, 128, bias=False)
    engine = engine_for(model, 4)
    old = model.weight.detach()
    with engine.compress():
        pass
    model.weight.data = model.weight.data.clone()
    x = torch.ones(1, requires_grad=True)
    with engine.compress():
        loss = (old * x).sum()
    del loss
    assert engine.finish_step().stored_as == {"planes": 1}


def test_rule_7_tied_weights_train_as_without_daf() -> None:
    """One storage under two names passes through twice."""
    model = Transformer()
    assert model.head.weight is model.embedding.weight
    assert_same(train(model, transformer_loss, DAFConfig(precision="exact")), train(model, transformer_loss))


class _Autocast(nn.Module):
    """LoRA block under autocast; its widths are such that no activation has the shape of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Transformer(words=50, width=96, heads=4, inner=160)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(self.inner(ids).flatten(0, 1), ids.flatten().roll(1))


def _autocast_loss(model: nn.Module, step: int) -> Tensor:
    return model(integers(50, 6, 32, seed=step))


def _shapes(model: nn.Module, trainable: bool) -> set[tuple[int, ...]]:
    return {tuple(sorted(p.shape)) for p in model.parameters() if p.requires_grad is trainable and p.dim() == 2}


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
def test_rule_7_autocast_copies_of_weights_pass_through(trainable: bool) -> None:
    """Linear layers save bfloat16 copies that no parameter's storage matches."""
    torch.manual_seed(0)
    model = _Autocast()
    engine = engine_for(model, 4)
    seen = watch(engine)
    backward(model, _autocast_loss, engine)
    weights = _shapes(model, trainable)
    casts = [saved for saved in seen if saved.dtype is torch.bfloat16 and tuple(sorted(saved.shape)) in weights]
    assert len(casts) >= 8
    assert {saved.form for saved in casts} == {"parameter"}


class _WideHead(nn.Module):
    """A layer of bfloat16, and one that computes in float32, as the routers of some mixtures of experts."""

    def __init__(self, trainable: bool) -> None:
        super().__init__()
        self.below = nn.Linear(96, 96, dtype=torch.bfloat16)
        weight = normal(48, 96, seed=1).to(torch.bfloat16)
        self.weight = nn.Parameter(weight, requires_grad=trainable)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.below(x).float(), self.weight.float()).mean()


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
def test_rule_7_wide_copies_of_weights_pass_through(trainable: bool) -> None:
    """The error of a weight would reach every layer below."""
    model, x = _WideHead(trainable), normal(512, 96).to(torch.bfloat16)
    expected = backward(model, lambda model, _: model(x))
    engine = engine_for(model, 2)
    found = backward(model, lambda model, _: model(x), engine)
    assert torch.equal(found[-1], expected[-1])


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
def test_rule_7_vectors_of_weights_stay_exact(trainable: bool) -> None:
    """As ``1 + weight`` of a wide normalization: an activation of its shape takes kilobytes."""
    below, weight = nn.Linear(8, 4608), nn.Parameter(normal(4608, seed=1), requires_grad=trainable)
    model = nn.ParameterList([*below.parameters(), weight])
    x = normal(16, 8)

    def loss(model: nn.ParameterList, _: int) -> Tensor:
        return (F.linear(x, model[0], model[1]) * (1.0 + model[2])).mean()

    expected = backward(model, loss)
    found = backward(model, loss, engine_for(model, 2))
    assert torch.equal(found[1], expected[1])


def test_rule_7_autocast_activations_are_compressed() -> None:
    """Letting casts through must not let activations through."""
    torch.manual_seed(0)
    model = _Autocast()
    engine = engine_for(model, 4)
    seen = watch(engine)
    backward(model, _autocast_loss, engine)
    weights = _shapes(model, True) | _shapes(model, False)
    large = [s for s in seen if len(s.shape) > 1 and s.shape[-1] > 1 and torch.Size(s.shape).numel() >= 8192]
    activations = [saved.form for saved in large if tuple(sorted(saved.shape)) not in weights]
    assert len(activations) >= 20
    assert set(activations) <= {"planes", "bitmask", "product", "normalized", "cast", "logarithms", "raw"}
    assert engine.finish_step().ratio > 2


@pytest.mark.parametrize(("precision", "bound"), [("exact", 0.0), (8, 0.05), (4, 0.4)])
def test_rule_7_autocast_gradients(precision: object, bound: float) -> None:
    """Gradients under autocast are exact in exact mode and close at 8 and 4 bits."""
    torch.manual_seed(0)
    model = _Autocast()
    expected = backward(model, _autocast_loss)
    assert error(backward(model, _autocast_loss, engine_for(model, precision)), expected) <= bound


def test_copies_of_a_model_with_an_engine() -> None:
    """An engine's hooks on the modules hinder neither copying nor pickling, as averaging of weights needs it."""
    model, loss = make_model("mlp")
    engine = engine_for(model, 4)
    expected = backward(model, loss, engine)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        assert_same(backward(twin, loss, ActivationEngine(twin, engine.config)), expected)
        assert_same(backward(twin, loss), backward(model, loss))
