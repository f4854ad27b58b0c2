"""The input of a GELU is stored as codes of its derivative, once a calibration has seen that nothing else reads it."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from daf_core import ActivationEngine, ReaderError
from daf_core.codecs.gelu_derivative import GeluDerivativeActivation
from daf_core.codecs.plane_importance import LEVELS
from daf_core.memory.pages.pool import PAGE_BYTES
from daf_core.precision import calibration
from daf_core.precision.policy import PrecisionPolicy
from tests.core.harness import (
    Loss,
    assert_empty,
    assert_same,
    backward,
    engine_for,
    error,
    gradients,
    make_model,
    normal,
    pager_of,
    spill_all,
    train,
    trainable,
)

Function = Callable[[Tensor], Tensor]
ROWS, WIDTH = 256, 64
PRECISIONS = [8, 4, 2, 1]


@pytest.fixture(autouse=True)
def _slopes_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they may be, however wide the inputs of a test are."""
    monkeypatch.setattr(calibration, "_is_less", lambda *_: True)


class _Between(nn.Module):
    """A function between two linear layers, of which the second one is frozen and does not save the function's result.

    A saved result would follow from the input, and so read it.
    """

    def __init__(self, function: Function, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight.requires_grad_(False)
        with torch.no_grad():
            self.first.weight *= 2  # inputs of GELU as wide as those of trained models
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


def _loss(model: nn.Module, step: int, rows: int = ROWS) -> Tensor:
    outputs = model(normal(rows, WIDTH, seed=step).to(next(model.parameters()).dtype))
    return (outputs.float() - normal(rows, outputs.shape[-1], seed=step + 1)).square().mean()


def _engine(model: nn.Module, loss_of: Loss = _loss, precision: Any = "auto", **options: Any) -> ActivationEngine:
    """Returns an engine after an audit, which has calibrated it."""
    engine = engine_for(model, precision, audit_every=None, **options)
    engine.audit(lambda: loss_of(model, 7))
    engine.finish_step()
    return engine


def _stored(engine: ActivationEngine, model: nn.Module, loss_of: Loss = _loss) -> dict[str, int]:
    """Returns how a step's activations are stored."""
    with engine.compress():
        loss = loss_of(model, 0)
    del loss
    assert_empty(engine)
    return dict(engine.finish_step().stored_as)


def _at(bits: int | None, monkeypatch: pytest.MonkeyPatch, op: str = "AddmmBackward0") -> None:
    """Stores what a linear layer gives at a precision, and everything else as it is."""
    monkeypatch.setattr(PrecisionPolicy, "precision", lambda _, site, *_rest: bits if site.op == op else None)


GELUS: dict[str, Function] = {"exact": nn.GELU(), "tanh": nn.GELU(approximate="tanh"), "function": F.gelu}


@pytest.mark.parametrize("function", GELUS.values(), ids=GELUS)
def test_slopes_follow_a_calibration(function: Function) -> None:
    """Before it, nobody knows what reads the input."""
    model = _Between(function)
    engine = engine_for(model, "auto", audit_every=None)
    assert _stored(engine, model) == {"planes": 3}
    engine.audit(lambda: _loss(model, 7))
    engine.finish_step()
    assert _stored(engine, model) == {"planes": 2, "slopes": 1}


@pytest.mark.parametrize("function", GELUS.values(), ids=GELUS)
@pytest.mark.parametrize(("bits", "bound"), [(8, 0.004), (4, 0.06), (2, 0.22), (1, 0.4)])
def test_error_of_the_gradient(function: Function, bits: int, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small, and smaller than that of planes with 2 bits and more."""
    model = _Between(function)
    plain = backward(model, _loss)
    _at(bits, monkeypatch)
    engines = _engine(model), engine_for(model, "auto", audit_every=None)
    slopes, planes = (error(backward(model, _loss, engine), plain) for engine in engines)
    assert [dict(engine.finish_step().stored_as) for engine in engines] == [
        {"raw": 2, "slopes": 1},
        {"raw": 2, "planes": 1},
    ]
    assert 0 < slopes < bound
    assert slopes < planes or bits < 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_element_types(dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same codes in each of them, whatever the backend."""
    _at(8, monkeypatch)
    model = _Between(F.gelu).to(dtype)
    plain = backward(model, _loss)
    engine = _engine(model, backend=backend)
    assert error(backward(model, _loss, engine), plain) < (0.004 if dtype is torch.float32 else 0.02)
    assert engine.finish_step().stored_as == {"raw": 2, "slopes": 1}


def test_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in bfloat16."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _loss(model, step)

    _at(8, monkeypatch)
    model = _Between(F.gelu)
    plain = backward(model, loss_of)
    engine = _engine(model, loss_of)
    assert error(backward(model, loss_of, engine), plain) < 0.01
    assert engine.finish_step().stored_as["slopes"] == 1


def _in_place(x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_(x * 1)


def _halves(x: Tensor) -> Tensor:
    one, other = x.repeat(1, 2).chunk(2, -1)
    return F.gelu(one) * other.detach()


SHAPES: dict[str, Function] = {
    "transposed": lambda x: F.gelu(x.T).T,
    "4 dimensions": lambda x: F.gelu(x.view(4, 4, 16, -1)).view(ROWS, -1),
    "channels last": lambda x: F.gelu(x.view(4, 8, 8, -1).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).reshape(ROWS, -1),
    "half": _halves,
    "in place": _in_place,
    "after a relu": lambda x: F.gelu(x.relu()),
    "beside a relu": lambda x: F.gelu(x) + x.relu(),
    "beside a sum": lambda x: F.gelu(x) + x,
    "not a multiple of a block": lambda x: F.pad(F.gelu(x[3:, :61]), (3, 0, 3, 0)),
}


@pytest.mark.parametrize("function", SHAPES.values(), ids=SHAPES)
def test_inputs_of_many_shapes(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any memory order, and where others use the input without saving it."""
    monkeypatch.setattr(PrecisionPolicy, "precision", lambda *_: 8)
    model = _Between(function)
    plain = backward(model, _loss)
    engine = _engine(model)
    assert engine._policy._codecs
    assert error(backward(model, _loss, engine), plain) < 0.01
    assert_empty(engine)


READERS: dict[str, Function] = {
    "gelu(x) * x": lambda x: F.gelu(x) * x,
    "x * gelu(x)": lambda x: x * F.gelu(x),
    "gelu(x) + x**2": lambda x: F.gelu(x) + x**2,
    "x**2 + gelu(x)": lambda x: x**2 + F.gelu(x),
    "gelu(x) + linear(x)": lambda x: F.gelu(x) + F.linear(x, torch.eye(WIDTH, requires_grad=True)),
    "linear(x) + gelu(x)": lambda x: F.linear(x, torch.eye(WIDTH, requires_grad=True)) + F.gelu(x),
    "gelu(x) + silu(x)": lambda x: F.gelu(x) + F.silu(x),
    "gelu(tanh(x))": lambda x: F.gelu(x.tanh()),
    "gelu(softmax(x))": lambda x: F.gelu(x.softmax(-1)),
    # Of rows of 64 a normalization takes codes of its own.
    "gelu(x) + layer_norm(x)": lambda x: F.gelu(x) + F.layer_norm(x.view(-1, 256), (256,)).view(ROWS, -1),
    "gelu(x) * view of x": lambda x: F.gelu(x) * x.view(-1, 8).view(ROWS, -1),
}


@pytest.mark.parametrize("function", READERS.values(), ids=READERS)
def test_input_with_another_reader_keeps_its_values(function: Function) -> None:
    """Whichever of the two saves it first."""
    model = _Between(function)
    engine = _engine(model)
    assert not engine._policy._codecs
    assert "slopes" not in _stored(engine, model)


@pytest.mark.parametrize("function", READERS.values(), ids=READERS)
def test_reader_that_comes_later_gets_values_or_is_refused(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of the two depends on who saves first; the gradient is never a wrong one."""
    monkeypatch.setattr(PrecisionPolicy, "precision", lambda *_: 8)
    model = _Between(F.gelu)
    engine = _engine(model)
    model.function = function
    plain = backward(model, _loss)
    try:
        assert error(backward(model, _loss, engine), plain) < 0.01
    except ReaderError as refused:
        del refused
    assert_empty(engine)


@pytest.mark.parametrize("first", [False, True])
def test_reader_of_a_rectified_input_gets_values_or_is_refused(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slopes with a ReLU's signs beside them are no values either."""
    monkeypatch.setattr(PrecisionPolicy, "precision", lambda *_: 8)

    def later(x: Tensor) -> Tensor:
        x = x.relu()
        return x**3 + F.gelu(x) if first else F.gelu(x) + x**3

    model = _Between(lambda x: F.gelu(x.relu()))
    engine = _engine(model)
    model.function = later
    plain = backward(model, _loss)
    if first:
        with pytest.raises(ReaderError, match="PowBackward0 asks"):
            backward(model, _loss, engine)
    else:
        assert error(backward(model, _loss, engine), plain) < 0.01


def test_recomputation_for_a_gelu_is_another_reader() -> None:
    """A checkpoint reads its input while the backward of a GELU in it runs."""
    model = _Between(F.gelu)
    engine = _engine(model)
    model.function = lambda x: checkpoint(lambda x: F.gelu(x - 1), x, use_reentrant=False)
    with pytest.raises(ReaderError, match="what is recomputed for another GELU asks"):
        backward(model, _loss, engine)
    assert_empty(engine)


def test_site_that_gets_another_reader_is_given_up_at_the_next_calibration() -> None:
    """And taken again when it has lost it."""
    model = _Between(F.gelu)
    engine = _engine(model)
    for function, expected in ((READERS["gelu(x) * x"], False), (F.gelu, True)):
        model.function = function
        engine._auditor._step = 1
        engine.audit(lambda: _loss(model, 7))
        assert ("slopes" in _stored(engine, model)) == expected


def test_site_of_which_one_call_has_another_reader_is_not_taken() -> None:
    """All occurrences count."""
    model = nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH))
    model[1].weight.requires_grad_(False)

    def loss_of(model: nn.Module, step: int, read: bool = True) -> Tensor:
        x = model[1](normal(ROWS, WIDTH, seed=step))
        y = model[1](model[0](x))
        z = model[0](y) * (y if read else 1)
        return z.square().mean()

    assert not _engine(model, loss_of)._policy._codecs
    assert _engine(model, partial(loss_of, read=False))._policy._codecs


@pytest.mark.parametrize("times", [2, 3])
def test_module_that_is_used_several_times(times: int) -> None:
    """Each call's input is stored by itself."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = normal(ROWS, WIDTH, seed=step)
        for _ in range(times):
            x = model[1](model[0](x)) * 2
        return (x - 1).square().mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
    plain = backward(model, loss_of)
    engine = _engine(model, loss_of)
    assert _stored(engine, model, loss_of)["slopes"] == times
    assert error(backward(model, loss_of, engine), plain) < 0.15


def test_gradient_of_the_gradient_is_refused() -> None:
    """It asks for values, and says what to do; with bits that keep values it is there."""
    model = _Between(F.gelu)
    engine = _engine(model)
    with engine.compress():
        loss = _loss(model, 0)
    with pytest.raises(ReaderError, match=r"\(create_graph=True\) asks .* Set precision to a number of bits") as raised:
        torch.autograd.grad(loss, trainable(model), create_graph=True)
    del raised, loss
    assert_empty(engine)
    with engine_for(model, 8).compress():
        loss = _loss(model, 0)
    assert torch.autograd.grad(loss, trainable(model), create_graph=True)[0].requires_grad


def test_loss_with_a_gradient_in_it_keeps_values() -> None:
    """What is read while the loss is being made is not GELU's alone."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        outputs = model(normal(ROWS, WIDTH, seed=step).requires_grad_())
        slope = torch.autograd.grad(outputs.square().sum(), model[0].first.weight, create_graph=True)[0]
        return outputs.square().mean() + slope.square().mean()

    model = nn.Sequential(_Between(F.gelu))
    assert _engine(model)._policy._codecs
    engine = _engine(model, loss_of)
    with engine.compress():
        loss = loss_of(model, 0)
    loss.backward()
    assert "slopes" not in engine.finish_step().stored_as


def test_who_looks_at_the_saved_input_is_refused() -> None:
    """Outside of backward nobody reads it."""
    model, results = _Between(F.gelu), list[Tensor]()
    engine = _engine(model)

    def function(x: Tensor) -> Tensor:
        results.append(F.gelu(x))
        return results[-1]

    model.function = function
    with engine.compress():
        _loss(model, 0)
    assert engine.finish_step().stored_as["slopes"] == 1
    node: Any = results[0].grad_fn
    with pytest.raises(ReaderError, match="something outside of backward asks"):
        _ = node._saved_self


@pytest.mark.parametrize("options", [{}, {"memory_budget": "1 MiB"}])
@pytest.mark.parametrize("precision", [8, 4, 2, 1, "exact"])
def test_other_precisions_keep_values(precision: Any, options: dict[str, Any]) -> None:
    """Whoever sets a number of bits, or none to lose, may do with the graph what he likes."""
    model = _Between(F.gelu)
    auto = _engine(model)
    engine = engine_for(model, precision, audit_every=None, **options)
    if precision != "exact":
        engine.audit(lambda: _loss(model, 7))
        engine.finish_step()
    assert "slopes" not in _stored(engine, model)
    engine.load_state_dict(auto.state_dict())
    assert "slopes" not in _stored(engine, model)


class TestState:
    def _model(self) -> tuple[nn.Module, Loss]:
        """Returns a model whose layers behind GELU are frozen, and do not save what was dropped of its result."""
        model, loss_of = make_model("transformer")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and ".down." not in name)
        return model, loss_of

    def test_carries_slopes(self) -> None:
        """Through JSON, and to the same gradients."""
        model, loss_of = self._model()
        engine, resumed = _engine(model, loss_of), engine_for(model, "auto", audit_every=None)
        assert engine.state_dict()["policy"]["slopes"]
        resumed.load_state_dict(json.loads(json.dumps(engine.state_dict())))
        assert resumed.state_dict() == engine.state_dict()
        for each in (engine, resumed):
            each._streams.passes = 0
        assert_same(*(backward(model, loss_of, each) for each in (engine, resumed)))
        assert dict(engine.finish_step().stored_as) == dict(resumed.finish_step().stored_as)

    def test_lists_them_in_one_order(self) -> None:
        """Not in that of a set, which changes from process to process."""
        model, loss_of = self._model()
        slopes = _engine(model, loss_of).state_dict()["policy"]["slopes"]
        assert len(slopes) > 1
        assert slopes == sorted(slopes)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("tight", [False, True])
def test_what_is_not_finite_reaches_backward(value: float, tight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is where there is room, otherwise as the NaN that gradient scalers look for."""

    monkeypatch.setattr(PrecisionPolicy, "precision", lambda *_: 8)
    model, spoiled = nn.Linear(WIDTH, WIDTH), torch.zeros(ROWS, WIDTH)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        return (F.gelu(model(normal(ROWS, WIDTH, seed=step)) + spoiled)[8:] - 1).square().mean()

    engine = _engine(model, loss_of)
    assert "slopes" in _stored(engine, model, loss_of)
    spoiled[5, 7] = value  # in a row that the loss leaves out: a gradient of 0 times what is not finite
    assert backward(model, loss_of)[0].isnan().any()
    engine.set_memory_budget(60_000 if tight else None)
    assert backward(model, loss_of, engine)[0].isnan().any()
    stored = engine.finish_step().stored_as
    assert "slopes" not in stored
    assert ("raw" in stored) != tight
    assert_empty(engine)


@pytest.mark.parametrize("planes", range(4))
def test_budget_drops_planes(planes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as it must, freeing their pages; what is left has the error of as many bits."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        return (F.gelu(model(normal(ROWS, 8, seed=step)) * 2) - 1).square().sum()

    model = nn.Linear(8, 16 * PAGE_BYTES // ROWS)
    _at(8, monkeypatch, "MulBackward0")
    plain = backward(model, loss_of)
    engine = _engine(model, loss_of)
    with engine.compress():
        loss = loss_of(model, 0)
    pages = [1, 3, 5, 9, 17]
    pager = pager_of(engine)
    raw = engine.held_bytes - engine.leased_pages * PAGE_BYTES
    assert engine.leased_pages == pages[4]
    engine.set_memory_budget(raw + pages[planes] * PAGE_BYTES)
    assert (engine.leased_pages, pager.settle()) == (pages[planes], raw + pages[planes] * PAGE_BYTES)
    model.zero_grad()
    loss.backward()
    dropped = gradients(model)
    assert_empty(engine)
    engine.set_memory_budget(None)
    _at(LEVELS[planes], monkeypatch, "MulBackward0")
    fewer = backward(model, loss_of, engine)
    assert_same(dropped, fewer)
    assert error(dropped, plain) > 0.003


def test_graph_may_run_backward_twice() -> None:
    """Codes are there as often as they are asked for."""
    model = _Between(F.gelu)
    engine = _engine(model)
    with engine.compress():
        loss = _loss(model, 0)
    results = []
    for retain in (True, False):
        model.zero_grad()
        loss.backward(retain_graph=retain)
        results.append(gradients(model))
    assert engine.finish_step().stored_as["slopes"] == 1
    assert_same(*results)
    assert_empty(engine)


def test_small_inputs_stay_as_they_are() -> None:
    """Below 4096 elements; larger ones are codes."""
    model = _Between(F.gelu)
    engine = _engine(model)
    assert _stored(engine, model, partial(_loss, rows=63)) == {"raw": 3}
    assert _stored(engine, model, partial(_loss, rows=128))["slopes"] == 1


def test_spilling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes come back from the file bit by bit."""
    monkeypatch.setattr(PrecisionPolicy, "precision", lambda *_: 4)
    model = _Between(F.gelu)
    found = []
    for options in ({}, {"spill_dir": tmp_path, "memory_budget": "1 MiB"}):
        engine = _engine(model, **options)
        engine._streams.passes = 0
        model.zero_grad()
        with engine.compress():
            loss = _loss(model, 0)
        if options:
            spill_all(engine)
        loss.backward()
        assert engine.finish_step().stored_as["slopes"] == 1
        assert_empty(engine)
        found.append(gradients(model))
    assert_same(*found)


def test_graph_that_dies_leaves_nothing() -> None:
    """Neither pages nor the input, without a collector."""
    model = _Between(F.gelu)
    engine = _engine(model)
    alive: list[weakref.ref[Tensor]] = []

    def function(x: Tensor) -> Tensor:
        alive.append(weakref.ref(x))
        return F.gelu(x)

    model.function = function
    gc.collect()
    gc.disable()
    try:
        with engine.compress():
            loss = _loss(model, 0)
        assert engine.finish_step().stored_as["slopes"] == 1
        assert engine.held_bytes
        assert alive[0]() is None
        del loss
        assert_empty(engine)
    finally:
        gc.enable()


def test_rehearsal_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that are tried out are gone with it."""
    model = _Between(F.gelu)
    engine = _engine(model)
    made: list[weakref.ref[GeluDerivativeActivation]] = []
    create = GeluDerivativeActivation.__init__

    def note(self: GeluDerivativeActivation, *args: Any) -> None:
        made.append(weakref.ref(self))
        create(self, *args)

    monkeypatch.setattr(GeluDerivativeActivation, "__init__", note)
    _stored(engine, model)
    engine.audit(lambda: _loss(model, 3))
    assert len(made) > 1
    assert {reference() for reference in made} == {None}
    assert_empty(engine)


NETS: dict[str, Callable[[], nn.Module]] = {
    "between": lambda: _Between(F.gelu),
    "deep": lambda: nn.Sequential(*(_Between(F.gelu) for _ in range(3))),
    "rectified": lambda: _Between(lambda x: F.gelu(x.relu())),
}


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
@pytest.mark.parametrize("bits", [8, 4, 2, 1, 0])
def test_audit_measures_what_is_stored(
    make: Callable[[], nn.Module], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a training step on the same rows, with everything at this many bits."""
    monkeypatch.setattr(PrecisionPolicy, "precision", lambda _, site, *_rest: bits)
    model = make()
    engine = _engine(model)
    plain = backward(model, _loss)
    found = error(backward(model, _loss, engine), plain)
    assert engine._policy._codecs
    measured = engine.audit(lambda: _loss(model, 0))
    assert measured is not None
    assert measured.error == pytest.approx(found, rel=1e-3)


def test_training_with_audits_is_close_to_plain_training() -> None:
    """Losses of a model that learns, with its slopes, are those without."""
    model = _Between(F.gelu)
    exact = train(copy.deepcopy(model), _loss, steps=20)
    engine = engine_for(model, "auto", audit_every=5)
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    for step in range(20):
        if engine.audit_due:
            engine.audit(lambda step=step: _loss(model, step, 32))
        with engine.compress():
            loss = _loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stored = engine.finish_step().stored_as
        assert stored["slopes"] == 1
        assert_empty(engine)
    expected = exact[19 * 4]
    assert float(loss.detach()) == pytest.approx(float(expected), rel=0.02)
