"""Errors before training begins, and the ways in which real training loops differ from a plain one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig, NothingToTrainError, UnsupportedDeviceError, UnsupportedTorchError
from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.saved_tensors import classify
from tests.core.harness import (
    LARGE,
    Scale,
    assert_empty,
    assert_same,
    backward,
    engine_for,
    error,
    make_model,
    normal,
    watch,
)


@pytest.mark.parametrize("model", [nn.Linear(4, 4).requires_grad_(False), nn.ReLU()], ids=["frozen", "no-parameters"])
def test_model_without_anything_to_train(model: nn.Module) -> None:
    """Said before training, with what to do."""
    with pytest.raises(NothingToTrainError, match=rf"^{type(model).__name__} has no parameter.*get_peft_model"):
        ActivationEngine(model)
    assert not model._forward_hooks


def test_a_model_without_values() -> None:
    """Said before training, with the way out."""
    model = nn.Linear(4, 4, device="meta")
    with pytest.raises(UnsupportedDeviceError, match=r"device 'meta' have no values.*to_empty"):
        ActivationEngine(model)
    assert not model._forward_hooks


def test_a_torch_that_does_not_tell_who_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before training: nobody would be known to read anything, and nothing would be stored in fewer bits."""
    monkeypatch.setattr(classify, "TELLS_WHO_SAVES", False)
    model = nn.Linear(4, 4)
    with pytest.raises(UnsupportedTorchError, match=r"^torch 2\.\S+ is installed.*torch 2\.10 and newer.*pip install"):
        ActivationEngine(model)
    assert not model._forward_hooks


def test_default_configuration() -> None:
    """An engine without one chooses precisions itself, and compresses to 4 bits as long as it knows nothing."""
    model, loss_of = make_model("mlp")
    engine = ActivationEngine(model)
    assert engine.config == DAFConfig(precision="auto")
    assert_same(backward(model, loss_of, engine), backward(model, loss_of, engine_for(model, 4)))


class _Dictionaries(nn.Module):
    """Takes and returns nested structures, calls a module twice and skips another."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.maybe, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, batch: dict[str, Any], *, skip: bool = False) -> dict[str, list[Tensor]]:
        h = torch.tanh(self.shared(torch.tanh(self.shared(batch["inputs"]["x"]))))
        h = h if skip else F.gelu(self.maybe(h))
        return {"outputs": [self.head(h), h.mean()]}


def _loss(model: nn.Module, x: Tensor, skip: bool) -> Tensor:
    output, mean = model({"inputs": {"x": x}, "labels": None}, skip=skip)["outputs"]
    return output.square().mean() + mean


@pytest.mark.parametrize(("precision", "bound"), [("exact", 0.0), (8, 0.05)])
def test_shapes_and_branches_that_change_from_step_to_step(precision: Any, bound: float) -> None:
    """Nothing is tied to the order or the shapes of the step before."""
    torch.manual_seed(0)
    model = _Dictionaries()
    engine = engine_for(model, precision)
    for step, (rows, skip) in enumerate([(128, False), (200, True), (3, False), (77, False), (1, True), (128, False)]):
        grads = []
        for compressed in (False, True):
            model.zero_grad()
            with engine.compress() if compressed else nullcontext():
                loss = _loss(model, normal(rows, 64, seed=step), skip)
            loss.backward()
            grads.append([p.grad for p in model.parameters() if p.grad is not None])
        assert error(grads[1], grads[0]) <= bound
        assert_empty(engine)


def test_sites_tell_calls_and_modules_apart() -> None:
    """A site is the module's name, the operator and the number of the save within this call."""
    model = _Dictionaries()
    engine = engine_for(model, 4)
    sites = []
    activations = engine._packer._store
    encode = activations._encode

    def noted(saved: SavedTensor, *args: Any) -> Any:
        sites.append(saved.site)
        return encode(saved, *args)

    activations._encode = noted
    for step in range(3):
        if step == 1:  # in the first pass the head's input is stored before it is known to be that of a last layer
            sites.clear()
        with engine.compress():
            loss = _loss(model, normal(*LARGE), False)
        del loss
    half = len(sites) // 2
    assert sites[:half] == sites[half:]
    names = {site.module for site in sites}
    assert names == {"", "shared", "head"}  # what `maybe` reads was stored already
    assert {site.op for site in sites if site.module == "head"} == {"GeluBackward0"}
    assert len({site.number for site in sites if site.module == ""}) == len([s for s in sites[:half] if s.module == ""])


def test_gradient_accumulation_gives_the_sum() -> None:
    """Several passes into the same gradients, in exact mode bit by bit."""
    model, loss_of = make_model("mlp")

    def accumulate(engine: ActivationEngine | None) -> list[Tensor]:
        model.zero_grad()
        for step in range(3):
            with engine.compress() if engine else nullcontext():
                loss = loss_of(model, step)
            (loss / 3).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    assert_same(accumulate(engine_for(model, "exact")), accumulate(None))


def test_backward_inside_the_scope() -> None:
    """A training step that is wrapped as a whole works too."""
    model, loss_of = make_model("mlp")
    expected = backward(model, loss_of, engine_for(model, 4))
    engine = engine_for(model, 4)
    model.zero_grad()
    torch.manual_seed(1)
    with engine.compress():
        loss_of(model, 0).backward()
    assert_same([parameter.grad for parameter in model.parameters()], expected)
    assert_empty(engine)


def test_vmap_inside_the_scope() -> None:
    """What a batched function saves is compressed like everything else."""
    model = nn.Linear(64, 64)
    engine = engine_for(model, 8)
    x = normal(*LARGE)
    expected = backward(model, lambda m, _: m(x).exp().sum())
    actual = backward(model, lambda m, _: torch.vmap(lambda row: m(row).exp().sum())(x).sum(), engine)
    assert 0 < error(actual, expected) < 0.05


def test_tensors_of_a_device_without_parameters_stay_raw() -> None:
    """They are counted, not encoded: there is no backend for them."""
    model = Scale()
    engine = engine_for(model, 4)
    seen = watch(engine)
    with engine.compress():
        loss = torch.empty(LARGE, device="meta", requires_grad=True).sin()
    assert [saved.form for saved in seen] == ["raw"]
    assert engine.held_bytes == 4 * 128 * 64
    del loss
    assert_empty(engine)


def test_module_that_is_called_outside_of_a_scope() -> None:
    """Without a scope the engine does nothing, before and after one."""
    model, loss_of = make_model("mlp")
    expected = backward(model, loss_of)
    engine = engine_for(model, 1)
    assert_same(backward(model, loss_of), expected)
    backward(model, loss_of, engine)
    engine.finish_step()
    assert_same(backward(model, loss_of), expected)
    assert engine.finish_step().stored_as == {}


def test_scope_as_decorator() -> None:
    """`compress()` may decorate a function that is called many times."""
    model, loss_of = make_model("mlp")
    engine = engine_for(model, 4)
    for _ in range(2):
        engine.compress()(loss_of)(model, 0).backward()
        assert engine.finish_step().stored_as["planes"] >= 3
        assert_empty(engine)
