"""Rules 9 and 10: saved-tensor hooks are strict scopes, and checkpoints keep working in and out of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from daf_core import ActivationEngine, HooksActiveError
from daf_core.autograd import hook_stack
from daf_core.autograd.torch_private import innermost_hooks
from tests.core.harness import (
    LARGE,
    Scale,
    assert_empty,
    assert_same,
    backward,
    engine_for,
    error,
    gradients,
    make_mlp,
    make_model,
    mlp_loss,
    normal,
    watch,
)
from tests.core.interrupts import interrupted

EXCEPTIONS = [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit]


class _Raises(nn.Module):
    """Fails in the middle of the forward pass."""

    def __init__(self, raised: type[BaseException] | None) -> None:
        super().__init__()
        self.raised = raised
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).exp()
        if self.raised is not None:
            raise self.raised("stop")
        return x


@pytest.mark.parametrize("raised", EXCEPTIONS, ids=lambda raised: raised.__name__)
def test_rule_9_nothing_stays_installed_after_an_exception(raised: type[BaseException]) -> None:
    """Hooks, held bytes and the followed modules are as before, and the engine works again."""
    model = _Raises(raised)
    engine = engine_for(model, 4)
    with pytest.raises(raised, match="stop"), engine.compress():
        model(normal(*LARGE))
    assert innermost_hooks() is None
    assert_empty(engine)
    model.raised = None
    _assert_compresses(engine, model)


def _assert_compresses(engine: ActivationEngine, model: nn.Module) -> None:
    engine.finish_step()
    with engine.compress():
        loss = model(normal(*LARGE)).sum()
    loss.backward()
    assert engine.finish_step().stored_as["planes"] == 2
    assert_empty(engine)


def test_rule_9_exception_before_the_scope_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure while the scope is entered, an interrupt for example, does not leave the engine half entered."""
    model = _Raises(None)
    engine = engine_for(model, 4)
    with monkeypatch.context() as patch:
        patch.setattr(engine._eligibility, "refresh", _interrupt)
        with pytest.raises(KeyboardInterrupt), engine.compress():
            pass
    _assert_compresses(engine, model)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("packing", ["device", "workers"])
def test_rule_9_interrupt_at_the_end_of_the_scope(packing: str) -> None:
    """Wherever Ctrl-C ends the scope, no hooks stay, and the next pass is compressed."""
    model = _Raises(None)
    engine = engine_for(model, 4, packing=packing, backend="reference")
    ending: list[bool] = []

    def run() -> None:
        with engine.compress():
            model(normal(*LARGE))
            ending.append(True)

    event = 1
    while interrupted(event, run, lambda _: bool(ending)):
        ending.clear()
        assert innermost_hooks() is None
        _assert_compresses(engine, model)
        event += 1
    assert event > 50


def test_rule_9_two_interrupts_at_the_end_of_the_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that they leave behind are removed by the next pass."""
    model = _Raises(None)
    engine = engine_for(model, 4)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), engine.compress():
        patch.setattr(hook_stack, "innermost_hooks", _interrupt)
    assert innermost_hooks() is not None
    _assert_compresses(engine, model)


def test_rule_9_exception_that_the_model_catches() -> None:
    """A module that failed is no longer the one that saves: names of later sites are right."""
    model = nn.Sequential(_Raises(RuntimeError), nn.Linear(64, 64))
    engine = engine_for(model, 4)
    with engine.compress():
        with pytest.raises(RuntimeError):
            model[0](normal(*LARGE))
        assert engine._scopes.current.name == ""
        model[1](normal(*LARGE))
    assert innermost_hooks() is None


def _pack(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


FOREIGN: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "save-on-cpu": (save_on_cpu, r"torch\.autograd\.graph.*save_on_cpu.*Leave the other scope first"),
    "own-pair": (lambda: saved_tensors_hooks(_pack, _unpack), r"test_hook_scopes.*_pack"),
    "other-engine": (lambda: engine_for(Scale(), 4).compress(), r"daf_core\.saved_tensors\.replay \(Replay\.pack\)"),
}


@pytest.mark.parametrize(("foreign", "message"), FOREIGN.values(), ids=FOREIGN)
def test_rule_9_foreign_hooks_outside_are_refused_by_name(foreign: Callable[[], Any], message: str) -> None:
    """Two pairs cannot both apply; the error names the one that was there first, which stays in force."""
    model = _Raises(None)
    engine = engine_for(model, 4)
    with foreign():
        before = innermost_hooks()
        with pytest.raises(HooksActiveError, match=message), engine.compress():
            pytest.fail("the scope was entered")
        assert innermost_hooks() == before
    _assert_compresses(engine, model)


def _leave_open(engine: ActivationEngine, pairs: int, raised: type[Exception] | None = None) -> None:
    """A forward pass that enters hooks and never leaves them."""
    with engine.compress():
        for _ in range(pairs):
            saved_tensors_hooks(_pack, _unpack).__enter__()
        if raised is not None:
            raise raised


@pytest.mark.parametrize("pairs", [1, 3])
def test_rule_9_foreign_hooks_left_open_inside_are_removed_and_reported(pairs: int) -> None:
    """Whatever was entered inside and not left is gone after the scope."""
    model = _Raises(None)
    engine = engine_for(model, 4)
    with pytest.raises(HooksActiveError, match=r"_pack\) were entered inside DAF's scope.*with block"):
        _leave_open(engine, pairs)
    assert innermost_hooks() is None
    _assert_compresses(engine, model)


def test_rule_9_hooks_left_open_by_an_exception_do_not_hide_it() -> None:
    """The exception of the forward pass is what the caller sees; the stack is clean all the same."""
    engine = engine_for(_Raises(None), 4)
    with pytest.raises(ZeroDivisionError):
        _leave_open(engine, 1, ZeroDivisionError)
    assert innermost_hooks() is None


def test_rule_9_well_nested_foreign_block_inside_works() -> None:
    """Hooks that are entered and left within the forward pass apply to what is saved in between."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        h = model[:2](normal(*LARGE, seed=step))
        with save_on_cpu():
            h = model[2:4](h)
        return model[4:](h).square().mean()

    model, _ = make_model("mlp")
    engine = engine_for(model, "exact")
    seen = watch(engine)
    assert_same(backward(model, loss_of, engine), backward(model, loss_of))
    assert (128, 96) in {saved.shape for saved in seen}
    assert len(seen) < _saves(model, mlp_loss)


def _saves(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor]) -> int:
    engine = engine_for(model, "exact")
    seen = watch(engine)
    backward(model, loss_of, engine)
    return len(seen)


def test_rule_9_entering_again_inside_changes_nothing() -> None:
    """The inner scope neither counts nor ends anything."""
    model, loss_of = make_model("mlp")
    expected = backward(model, loss_of, engine_for(model, 4, rounding="stochastic"))
    engine = engine_for(model, 4, rounding="stochastic")

    def nested(model: nn.Module, step: int) -> Tensor:
        with engine.compress():
            pass
        with engine.compress():
            return loss_of(model, step)

    assert_same(backward(model, nested, engine), expected)
    assert innermost_hooks() is None


def test_two_engines_in_turn() -> None:
    """Two models, each with its engine: teacher and student, or generator and critic."""
    models = [make_model("mlp") for _ in range(2)]
    expected = backward(*models[0], engine_for(models[0][0], 4))
    engines = [engine_for(model, 4) for model, _ in models]
    losses = []
    for (model, loss_of), engine in zip(models, engines, strict=True):
        model.zero_grad()
        with engine.compress():
            losses.append(loss_of(model, 0))
    for loss in losses:
        loss.backward()
    for (model, _), engine in zip(models, engines, strict=True):
        assert_same(gradients(model), expected)
        assert_empty(engine)


def test_closed_engine_leaves_no_hook_on_modules() -> None:
    """`close` takes off what the engine put on the model."""
    model = make_mlp()
    engine = engine_for(model, 4)
    engine.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    engine.close()


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("inside", [True, False], ids=["backward-inside", "backward-outside"])
def test_rule_10_checkpoint_inside_the_scope(reentrant: bool, inside: bool) -> None:
    """Block inputs are compressed, recomputed activations are not packed, and gradients are right."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        h = model[0](normal(*LARGE, seed=step).requires_grad_())
        h = checkpoint(model[1:4], h, use_reentrant=reentrant)
        return model[4:](h).square().mean()

    model, _ = make_model("mlp")
    expected = backward(model, loss_of)
    assert_same(_checkpointed(model, loss_of, "exact", inside)[0], expected)
    actual, seen = _checkpointed(model, loss_of, 8, inside)
    assert 0 < error(actual, expected) < 0.05
    large = [(saved.shape, saved.form) for saved in seen if saved.form not in ("parameter", "raw")]
    assert large == [((128, 64), "planes"), ((128, 96), "planes"), ((128, 64), "planes")]


def _checkpointed(model: nn.Module, loss_of: Any, precision: Any, inside: bool) -> tuple[list[Tensor], list[Any]]:
    engine = engine_for(model, precision)
    seen = watch(engine)
    model.zero_grad()
    with engine.compress():
        loss = loss_of(model, 0)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    del loss
    statistics = engine.finish_step()
    assert sum(statistics.stored_as.values()) <= 5, "recomputed activations were counted"
    assert_empty(engine)
    return gradients(model), seen


def test_rule_10_scope_inside_a_checkpoint_is_refused() -> None:
    """There it would replace the checkpoint's own hooks, and nothing would be recomputed."""
    model = nn.Linear(64, 64)
    engine = engine_for(model, 4)

    def forward(x: Tensor) -> Tensor:
        with engine.compress():
            return model(x)

    with pytest.raises(
        HooksActiveError, match=r"torch\.utils\.checkpoint.*switch the checkpoint off.*Enter it outside"
    ):
        checkpoint(forward, normal(*LARGE), use_reentrant=False)
    assert innermost_hooks() is None


def test_rule_10_scope_inside_a_reentrant_checkpoint() -> None:
    """It records nothing the first time, and passes through what is recomputed in backward."""
    model = nn.Linear(64, 64)
    engine = engine_for(model, 4)

    def forward(x: Tensor) -> Tensor:
        with engine.compress():
            return model(x).exp()

    results = []
    for run in (forward, lambda x: model(x).exp()):
        x = normal(*LARGE).requires_grad_()
        checkpoint(run, x, use_reentrant=True).sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)
    assert engine.finish_step().stored_as == {}


@pytest.mark.parametrize("scope", ["no_grad", "inference_mode", "eval-of-frozen"])
def test_nothing_is_saved_without_a_graph(scope: str) -> None:
    """Evaluation inside the scope, as trainers do it, costs nothing."""
    model = nn.Linear(64, 64)
    engine = engine_for(model, 4)
    if scope == "eval-of-frozen":
        model.requires_grad_(False)
    with engine.compress(), nullcontext() if scope == "eval-of-frozen" else getattr(torch, scope)():
        kept = model(normal(*LARGE)).exp()
        assert engine.held_bytes == 0
    del kept
    assert engine.finish_step().stored_as == {}
