"""Results of elementwise operators that are not stored, as backward computes them again."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from daf_core.codecs.without_values import ShapeActivation
from daf_core.errors import ModifiedInPlaceError
from daf_core.saved_tensors import derive
from tests.core.harness import assert_empty, error, normal

ROWS, WIDTH = 203, 331  # no multiples of what a kernel takes at once; a thread's share has such an end, too

Form = Callable[["Layers", Tensor], Tensor]


class Layers(nn.Module):
    """A gated layer: two linear layers, something between them and a third one that saves the result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(64, WIDTH), nn.Linear(64, WIDTH), nn.Linear(WIDTH, 64)
        self.both = nn.Linear(64, 2 * WIDTH)
        self.scale = nn.Parameter(normal(WIDTH, seed=3).exp())

    def run(self, form: Form, seed: int = 1) -> Tensor:
        """Returns the loss with some form of what is between."""
        inputs = normal(ROWS, 64, seed=seed).to(self.scale.dtype)
        return self.down(form(self, 3 * inputs)).float().square().mean()


def _activated(function: Callable[[Tensor], Tensor]) -> Form:
    return lambda layers, inputs: function(layers.gate(inputs))


def _gated(function: Callable[[Tensor], Tensor]) -> Form:
    return lambda layers, inputs: function(layers.gate(inputs)) * layers.up(inputs)


def _gated_by_halves(layers: Layers, inputs: Tensor) -> Tensor:
    gate, up = layers.both(inputs).chunk(2, -1)
    return F.silu(gate) * up


def _root_mean_square(layers: Layers, inputs: Tensor) -> Tensor:
    wide = layers.gate(inputs)
    return layers.scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "hardswish": F.hardswish,
}

FORMS: dict[str, tuple[Form, int]] = {  # and the results that are computed again
    **{name: (_activated(function), 1) for name, function in ACTIVATIONS.items()},
    **{f"gated {name}": (_gated(function), 2) for name, function in ACTIVATIONS.items()},
    "weighted rows": (lambda layers, inputs: layers.up(inputs) * layers.gate(inputs)[:, :1].sigmoid(), 1),
    "gated halves": (_gated_by_halves, 2),
    "seen otherwise": (lambda layers, inputs: F.silu(layers.gate(inputs)).view(7, 29, WIDTH).view(ROWS, WIDTH), 1),
}

EXACT_FORMS = {
    **FORMS,
    "product": (lambda layers, inputs: layers.gate(inputs) * layers.up(inputs), 1),
    "gated sigmoid": (_gated(torch.sigmoid), 1),
    "normalization": (_root_mean_square, 1),
    "in place": (lambda layers, inputs: F.silu(layers.gate(inputs), inplace=True), 1),
    "product in place": (lambda layers, inputs: layers.gate(inputs).mul_(layers.up(inputs)), 1),
}


def _train(form: Form, precision: object = None, layers: Layers | None = None) -> tuple[list[Tensor], dict[str, int]]:
    """Returns the gradients, and how many tensors each codec stored; without a precision those of plain training."""
    layers = layers or Layers()
    if precision is None:
        layers.run(form).backward()
        return _gradients(layers), {}
    engine = ActivationEngine(layers, DAFConfig.from_dict({"precision": precision}))
    for _ in range(2):  # the second one is replayed
        layers.zero_grad()
        with engine.compress():
            loss = layers.run(form)
        loss.backward()
        del loss
        assert_empty(engine)
        stored = engine.finish_step().stored_as
    return _gradients(layers), stored


def _gradients(layers: Layers) -> list[Tensor]:
    return [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]


@contextmanager
def _threads(count: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("form", "results"), EXACT_FORMS.values(), ids=EXACT_FORMS)
def test_gradients_are_the_same_in_exact_mode(form: Form, results: int, dtype: torch.dtype) -> None:
    """Bit by bit, in a replayed pass, too."""
    expected, _ = _train(form, layers=Layers().to(dtype))
    found, stored = _train(form, "exact", Layers().to(dtype))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert stored["elementwise"] == results


@pytest.mark.parametrize("name", ["silu", "gelu by tanh", "mish"])
def test_backward_may_have_other_threads(name: str) -> None:
    """The last elements of a thread's share are rounded otherwise."""
    kept: list[Tensor] = []

    class Kept(torch.autograd.Function):
        """Keeps what it gets back in backward."""

        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, values: Tensor) -> Tensor:
            ctx.save_for_backward(values)
            return values.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, *gradient: Tensor) -> Tensor:  # pyright: ignore
            kept.extend(ctx.saved_tensors)  # pyright: ignore
            return gradient[0]

    function = ACTIVATIONS[name]
    odd = next(value for value in 3 * normal(5000) if function(value.view(1)) != function(value.repeat(64))[0])
    argument = torch.cat([normal(100), odd.repeat(ROWS * WIDTH * 5)]).requires_grad_()
    engine = ActivationEngine(nn.Linear(1, 1), DAFConfig(precision="exact"))
    with _threads(1), engine.compress():
        result = function(argument * 1)
        loss = Kept.apply(result).sum()
    assert engine.held_bytes == argument.nbytes
    result = result.detach()
    with _threads(2):
        assert not torch.equal(function(argument), result)
        loss.backward()
        assert torch.get_num_threads() == 2
    assert torch.equal(kept[0], result)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("form", "results"), FORMS.values(), ids=FORMS)
def test_error_is_that_of_codes(form: Form, results: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fewer bytes: what follows has the error of its arguments."""
    expected, _ = _train(form)
    found, stored = _train(form, bits)
    assert stored["elementwise"] == results
    monkeypatch.setattr(derive, "elementwise", lambda *_: None)
    coded, other = _train(form, bits)
    assert "elementwise" not in other
    assert error(found, expected) < 1.3 * error(coded, expected)


def test_products_without_a_gate_have_codes_of_their_own() -> None:
    """Where a factor makes up for large values in some channels, an argument's error is far larger than a code's."""
    for name in ("product", "normalization", "gated sigmoid"):
        assert "elementwise" not in _train(EXACT_FORMS[name][0], 8)[1]


def test_parameter_may_change_unseen_before_backward() -> None:
    """As that of a model whose optimizer writes through ``.data``, or lets go of its memory meanwhile."""

    def run(layers: Layers, engine: ActivationEngine | None) -> Tensor:
        with nullcontext() if engine is None else engine.compress():
            loss = layers.run(_root_mean_square)
        layers.scale.data.mul_(2)
        loss.backward()
        assert layers.down.weight.grad is not None
        return layers.down.weight.grad

    layers = Layers()
    assert torch.equal(run(layers, ActivationEngine(layers, DAFConfig(precision="exact"))), run(Layers(), None))


def test_argument_of_an_argument_may_be_changed_in_forward() -> None:
    """What follows from it is stored then."""
    kept: list[Tensor] = []

    def form(layers: Layers, inputs: Tensor) -> Tensor:
        hidden = layers.gate(inputs)
        product = hidden * layers.up(inputs)
        kept.append(layers.down(product))  # which shares the product
        with torch.no_grad():
            hidden.clamp_(-1, 1)
        return F.silu(product)

    def run(layers: Layers, engine: ActivationEngine | None) -> Tensor:
        with nullcontext() if engine is None else engine.compress():
            loss = layers.run(form)
        loss.backward(inputs=[layers.down.weight])
        assert layers.down.weight.grad is not None
        return layers.down.weight.grad

    layers = Layers()
    assert torch.equal(run(layers, ActivationEngine(layers, DAFConfig(precision="exact"))), run(Layers(), None))


def _changed(layers: Layers, inputs: Tensor) -> Tensor:
    activated = F.silu(layers.gate(inputs))
    with torch.no_grad():
        activated.mul_(2)
    return activated


def _changed_unseen(layers: Layers, inputs: Tensor) -> Tensor:
    activated = F.silu(layers.gate(inputs))
    activated.data[-1, -1] += 1
    return activated


def _argument_changed_unseen(layers: Layers, inputs: Tensor) -> Tensor:
    gate = layers.gate(inputs)
    activated = F.silu(gate)
    gate.data[0, 0] += 1
    return activated


@pytest.mark.parametrize("form", [_changed, _changed_unseen, _argument_changed_unseen])
def test_change_before_the_result_is_saved_is_found_in_exact_mode(form: Form) -> None:
    """Behind autograd's back, too, and of one element."""
    expected, _ = _train(form)
    found, stored = _train(form, "exact")
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert "elementwise" not in stored


def test_result_that_was_changed_is_stored_in_few_bits() -> None:
    """By an operator, which a version tells."""
    expected, _ = _train(_changed)
    found, stored = _train(_changed, 8)
    assert "elementwise" not in stored
    assert error(found, expected) < 0.01


def test_argument_that_is_changed_later_is_an_error() -> None:
    """As without DAF."""

    def form(layers: Layers, inputs: Tensor) -> Tensor:
        gate = layers.gate(inputs)
        activated = layers.down(F.silu(gate))
        with torch.no_grad():
            gate.mul_(2)
        return F.pad(activated, (0, WIDTH - 64))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _train(form)
    with pytest.raises(ModifiedInPlaceError):
        _train(form, "exact")


def test_long_chains_are_computed_from_near_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each third result is stored: otherwise backward would compute all before it again for each, one in another."""
    factors = [(1 + normal(ROWS, WIDTH, seed=step) / 8).requires_grad_() for step in range(31)]

    def loss() -> Tensor:
        product = factors[0] * 1
        for factor in factors[1:]:
            product = product * factor
        return product.square().sum()

    expected = torch.autograd.grad(loss(), factors)
    engine = ActivationEngine(nn.Linear(1, 1), DAFConfig(precision="exact"))
    with engine.compress():
        result = loss()
    found = torch.autograd.grad(result, factors)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert engine.finish_step().stored_as == {"raw": 41, "elementwise": 20}


def test_what_takes_the_place_of_an_argument_later_is_not_read() -> None:
    """A reader that is learned later may let go of the codes that a result follows from."""
    layers = Layers()
    engine = ActivationEngine(layers, DAFConfig(precision=8))
    with engine.compress():
        activated = F.silu(layers.gate(normal(ROWS, 64)))
        loss = layers.down(activated).sum()
    packed = activated.grad_fn._raw_saved_self.data  # pyright: ignore
    twin = packed.as_stored()
    before = twin.unpack()
    packed.stored = ShapeActivation()
    assert torch.equal(twin.unpack(), before)
    packed.stored = twin.stored
    loss.backward()
