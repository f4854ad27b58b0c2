"""A pass that is replayed gives the bytes, gradients and figures of one that decides all anew, or notices why not."""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from daf_core import ActivationEngine
from daf_core.codecs import common_row
from daf_core.memory import idle_leases
from daf_core.readers.sharpness import Looks
from daf_core.readers.table import Kind
from daf_core.saved_tensors import recording
from daf_core.saved_tensors.derive import Derivation
from daf_core.saved_tensors.replay import Replay
from tests.core.books import check_pager
from tests.core.harness import (
    LARGE,
    MODELS,
    Loss,
    Scale,
    assert_empty,
    engine_for,
    error,
    normal,
    pager_of,
    take_the_full_way,
)

STEPS = 6
CONFIGS: dict[str, dict[str, Any]] = {
    "4 bits": {"precision": 4},
    "2 bits, stochastic": {"precision": 2, "rounding": "stochastic"},
    "exact": {"precision": "exact"},
    "auto": {"precision": "auto"},
    "budget": {"precision": 4, "memory_budget": 60_000_000},
}


class Step(NamedTuple):
    """What a step gives, but for times.

    Attributes:
        loss: The loss.
        gradients: Of all parameters.
        held: Bytes that are held after the forward pass.
        sizes: Of the sites.
        figures: Raw bytes, most bytes held, and forms.
    """

    loss: Tensor
    gradients: list[Tensor]
    held: int
    sizes: dict[Any, Any]
    figures: tuple[int, int, dict[str, int]]


def take_step(engine: ActivationEngine, model: nn.Module, loss_of: Loss, number: int) -> Step:
    """Takes a step without an optimizer, and checks the books twice."""
    torch.manual_seed(number)
    model.zero_grad()
    with engine.compress():
        loss = loss_of(model, number)
    held, sizes = engine.held_bytes, {site: list(sizes) for site, sizes in engine.pass_sizes.items()}
    check_pager(pager_of(engine))
    loss.backward()
    check_pager(pager_of(engine))
    gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    step = engine.finish_step()
    figures = (step.raw_bytes, step.held_bytes, dict(step.stored_as))
    return Step(loss.detach(), gradients, held, sizes, figures)


def assert_equal(found: Step, expected: Step) -> None:
    """Fails where a step differs from one of the full way."""
    pairs = zip([found.loss, *found.gradients], [expected.loss, *expected.gradients], strict=True)
    for mine, others in pairs:
        torch.testing.assert_close(mine, others, rtol=0, atol=0, equal_nan=True)
    assert found[2:] == expected[2:]


def compare(make: Callable[[], nn.Module], loss_of: Loss, steps: int = STEPS, **config: Any) -> int:
    """Trains twice, with and without replays; returns how many tensors were replayed in the last step."""
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    engine, other = engine_for(model, packing="device", **config), engine_for(twin, packing="device", **config)
    take_the_full_way(other)
    replayed = 0
    for number in range(steps):
        with counted() as count:
            found = take_step(engine, model, loss_of, number)
        replayed = count[0]
        assert_equal(found, take_step(other, twin, loss_of, number))
    assert_empty(engine)
    return replayed


def seeded(make: Callable[[], nn.Module]) -> tuple[nn.Module, ActivationEngine]:
    """Returns a model that is always the same, and an engine of it."""
    torch.manual_seed(0)
    model = make()
    return model, engine_for(model, 4, packing="device")


class counted:
    """Counts what is replayed without another look inside."""

    def __enter__(self) -> list[int]:
        self._counts, self._before = [0], Replay._as_decided

        def counting(*arguments: Any) -> Any:
            packed = self._before(*arguments)
            self._counts[0] += packed is not None
            return packed

        Replay._as_decided = counting
        return self._counts

    def __exit__(self, *_: object) -> None:
        Replay._as_decided = self._before


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_replay_is_the_full_way(name: str, config: dict[str, Any]) -> None:
    """For each model of the harness: losses, gradients, bytes and counts."""
    make, loss_of = MODELS[name]
    assert compare(make, loss_of, **config) > 0


class Compiled(nn.Module):
    """Calls a compiled function and a compiled module between operators that are not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 8)
        self.norm = nn.LayerNorm(64)
        self.block = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))
        self.block.compile(backend="aot_eager", dynamic=False)
        self.smooth = torch.compile(lambda x: x * torch.sigmoid(x), backend="aot_eager", dynamic=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.softmax(self.second(self.smooth(self.first(x)).tanh()), -1)
        return self.last(F.gelu(self.norm(F.dropout(self.block(x), 0.1))))

    def __deepcopy__(self, memo: object) -> Compiled:
        copied = Compiled()
        copied.load_state_dict(self.state_dict())
        return copied


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile asks for it
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_is_saved_beside_compiled_functions_is_replayed(config: dict[str, Any]) -> None:
    rows = [128, 128, 128, 96, 128, 96]
    replayed = compare(Compiled, lambda model, number: model(normal(rows[number], 64)).square().sum(), **config)
    assert replayed > 3


def test_a_program_that_compiles_other_functions_is_replayed_where_modules_keep_their_hooks() -> None:
    step = torch.compile(lambda values: values.mul_(0.9), backend="aot_eager")
    step(torch.ones(4))
    make, loss_of = MODELS["transformer"]
    assert compare(make, loss_of, precision=4) > 5
    model, engine = seeded(make)
    for number in range(STEPS):
        take_step(engine, model, loss_of, number)
        assert all(each._forward_hooks for each in model.modules() if each is not model)


class Program(nn.Module):
    """Operators in any order, twice, so that both calls of a module save."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OPERATORS[name]() for name in names)
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, *self.layers]:
            x = x + layer(x)
        return self.scale(x)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


OPERATORS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(64, 64),
    "norm": lambda: nn.LayerNorm(64),
    "dropout": lambda: nn.Dropout(0.3),
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "softmax": lambda: nn.Softmax(-1),
    "clamp": lambda: Function(lambda x: x.clamp(-1, 1)),
    "square": lambda: Function(lambda x: x * x),
    "log": lambda: Function(lambda x: x.square().add(1).log()),
    "halves": lambda: Function(lambda x: torch.cat([a.sin() for a in x.chunk(2, -1)], -1)),
    "columns": lambda: Function(lambda x: x.t().tanh().t()),
    "half": lambda: Function(lambda x: (x.bfloat16() * 2).tanh().float()),
    "checkpoint": lambda: Function(lambda x: checkpoint(lambda y: (y * y).sin(), x, use_reentrant=False)),
    "attention": lambda: Function(lambda x: F.scaled_dot_product_attention(*(x.view(1, 4, -1, 64),) * 3).view_as(x)),
}


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    names=st.lists(st.sampled_from(sorted(OPERATORS)), min_size=1, max_size=4),
    rows=st.lists(st.sampled_from([4, 16, 64, 68, 72, 128]), min_size=1, max_size=STEPS),
    config=st.sampled_from([*CONFIGS.values()]),
)
def test_random_programs(names: list[str], rows: list[int], config: dict[str, Any]) -> None:
    """Operators that save results, inputs, both, parts of one storage or nothing, on batches of several lengths."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        return model(normal(rows[step % len(rows)], 64, seed=step).requires_grad_()).square().mean()

    compare(lambda: Program(tuple(names)), loss_of, **config)


SIZES = (32, 48, 20, 64, 8, 40)
OF_ANY_SIZE: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "attention": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True), nn.GELU()),
        lambda size: normal(4, size, 64, seed=size),
    ),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Tanh()),
        lambda size: normal(4, 3, size, size, seed=size),
    ),
    "widths": (
        lambda: nn.Sequential(
            Scale(), Function(lambda x: (x.softmax(-1) * x.tanh()).matmul(x.t().sigmoid()).log_softmax(-1))
        ),
        lambda size: normal(64, size, seed=size),
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_sizes_that_were_never_met(name: str, config: dict[str, Any]) -> None:
    """Each step has another length or width, which changes scaling groups, what is worth a code, and what is small."""
    make, batch = OF_ANY_SIZE[name]
    compare(make, lambda model, step: model(batch(SIZES[step])).square().mean(), **config)


def test_values_that_are_no_longer_finite_count_once() -> None:
    """They stay as they are, and the full way, which finds that, is the only one that counts them."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = normal(512, 64, seed=step)
        x[3, 5] = torch.inf if step > 3 else 1.0
        return model(x.t().contiguous().t()).clamp(max=9.0).sum()

    compare(Scale, loss_of, precision=4)


def test_what_is_learned_of_one_length_holds_for_others() -> None:
    """Query and key of an attention that has become sharp take more bits in batches of every length."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), OPERATORS["attention"]())

    def loss_of(model: nn.Module, step: int) -> Tensor:
        return model(normal((128, 256, 128, 256, 128, 256, 128, 256, 192)[step], 64, seed=step)).square().mean()

    (model, engine), (twin, other) = seeded(make), seeded(make)
    take_the_full_way(other)
    for step in range(9):
        if step == 6:
            for readers in (engine._readers, other._readers):
                for place, reading in [*readers._readings.items()]:
                    if reading.kind is Kind.ATTENTION:
                        readers._set(place, dataclasses.replace(reading, deviation=4.0))
        assert_equal(take_step(engine, model, loss_of, step), take_step(other, twin, loss_of, step))


def test_indices_take_the_bits_of_their_values() -> None:
    """What was too large for fewer bits may fit in them in the next step."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        places = torch.arange(1 << 14, dtype=torch.int32) * (8 if step < 4 else 1)
        return model(normal(1 << 17, 2, seed=step)).index_select(0, places).sum()

    compare(Scale, loss_of, precision=4)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Gets the tensors of replayed passes that are looked at again."""
    found: list[Tensor] = []
    look_again = Replay._look_again

    def counting(self: Replay, save: recording.Save, look: recording.Look, tensor: Tensor, frame: Any) -> Any:
        found.append(tensor)
        return look_again(self, save, look, tensor, frame)

    monkeypatch.setattr(Replay, "_look_again", counting)
    return found


def test_a_length_that_is_new_is_not_looked_at_again(looks: list[Tensor]) -> None:
    """What was decided for other lengths is decided for it."""
    model, engine = seeded(lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64)))
    for number in range(STEPS):
        looks.clear()
        take_step(engine, model, lambda model, number: model(normal(64 + number, 64)).sum(), number)
    assert not looks


@pytest.mark.parametrize("precision", [4, "exact"])
def test_what_was_decided_stays_where_rows_are_measured_again(
    looks: list[Tensor], monkeypatch: pytest.MonkeyPatch, precision: object
) -> None:
    """Passes of all lengths are replayed for ever, where rows share nothing before and after."""
    monkeypatch.setattr(common_row, "EVERY", 4)
    monkeypatch.setattr(Looks, "EVERY", 1000)
    recorded, record = list[Tensor](), Replay._record

    def counting(self: Replay, at: recording.Save, tensor: Tensor, frame: Any) -> Any:
        recorded.append(tensor)
        return record(self, at, tensor, frame)

    monkeypatch.setattr(Replay, "_record", counting)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 257), nn.Softmax(-1), nn.LayerNorm(257))
    engine = engine_for(model, precision, packing="device")
    for number in range(20):
        if number == 6:
            assert recorded
            recorded.clear()
            looks.clear()
        take_step(engine, model, lambda model, number: model(normal(128 + 64 * (number % 3), 64)).sum(), number)
    assert not recorded
    assert not looks


def test_equal_blocks_share_what_they_are_stored_with() -> None:
    """So a length that is new takes the time of one block, and the memory."""
    counts: list[int] = []
    for blocks in (2, 6):
        model, engine = seeded(lambda blocks=blocks: nn.Sequential(*(Block() for _ in range(blocks))))
        for number in range(STEPS):
            take_step(engine, model, lambda model, _: model(normal(4, 64, 64)).sum(), number)
        store = engine._packer.replayed_by
        assert store is not None
        counts.append(len(store._directs._known))
    assert counts[0] == counts[1] > 0


class Block(nn.Module):
    """A normalization by the root of the mean square, as language models write it, and an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.all = nn.Parameter(torch.ones(64)), nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        normalized = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        query, key, value = (
            each.unflatten(-1, (2, 32)).transpose(1, 2) for each in self.all(normalized).chunk(3, dim=-1)
        )
        return x + nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def test_powers_and_attentions_are_replayed(looks: list[Tensor]) -> None:
    """A power by another exponent reads otherwise, and an attention runs again: both wait for no full look."""
    model, engine = seeded(lambda: nn.Sequential(Block(), Block(), Block()))
    for number in range(STEPS):
        looks.clear()
        step = take_step(engine, model, lambda model, number: model(normal(4, 64, 64, seed=number)).sum(), number)
    assert step.figures[2]["attended"] == 3
    assert not looks


class Activated(nn.Module):
    """A layer that makes its activation anew in each forward, as transformers' state-space models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return nn.Softplus()(self.layer(x)).sin()


def test_modules_that_are_made_in_each_pass_are_replayed() -> None:
    """They are another module each time, and belong to the module of the model that makes them."""

    def loss_of(model: nn.Module, number: int) -> Tensor:
        layers = [layer for place, layer in enumerate(model) if number < 6 or place != number % 3]
        return nn.Sequential(*layers)(normal(*LARGE, seed=number)).square().mean()

    for steps, skips in ((6, False), (9, True)):
        replayed = compare(lambda: nn.Sequential(Activated(), Activated(), Activated()), loss_of, steps, precision=4)
        assert skips or replayed >= 10


def test_in_exact_mode_what_did_not_follow_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a frozen layer's input nothing is stored, so what dropout makes of it for an adapter follows from nothing."""
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 8))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    x, tried = normal(1024, 32).requires_grad_(), list[int]()
    derive = Derivation.derive

    def counted_derive(self: Derivation, *args: Any) -> Any:
        tried.append(1)
        return derive(self, *args)

    monkeypatch.setattr(Derivation, "derive", counted_derive)
    engine, times = ActivationEngine(model, {"precision": "exact"}), list[int]()
    for _ in range(6):
        tried.clear()
        with engine.compress():
            loss = model(x).square().sum()
        loss.backward()
        engine.finish_step()
        times.append(len(tried))
    assert times[0] > 0
    assert times[-2:] == [0, 0]


def _branches() -> dict[str, tuple[Callable[[], nn.Module], Loss]]:
    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())

    def run(model: Any, x: Tensor, order: Iterator[int]) -> Tensor:
        for place in order:
            x = model[place](x)
        return x.square().mean()

    def skipped(model: nn.Module, step: int) -> Tensor:
        return run(model, normal(*LARGE, seed=step), iter([0, 1, 2, 3] if step % 3 else [2, 3]))

    def swapped(model: nn.Module, step: int) -> Tensor:
        return run(model, normal(*LARGE, seed=step), iter([0, 1, 2, 3] if step % 2 else [0, 3, 2, 1]))

    def other_function(model: nn.Module, step: int) -> Tensor:
        function = torch.sin if step % 2 else torch.square
        return function(model(normal(*LARGE, seed=step))).mean()

    def other_exponent(model: nn.Module, step: int) -> Tensor:
        exponent = (2, 2, 2, 2, 3, -1.5, 2, -0.5)[step]
        return (model(normal(*LARGE, seed=step)).abs() + 0.01).pow(exponent).log().mean()

    def other_norm(model: nn.Module, step: int) -> Tensor:
        return torch.linalg.vector_norm(model(normal(*LARGE, seed=step)), ord=1 if step == 6 else 2, dim=1).mean()

    def other_divisor(model: nn.Module, step: int) -> Tensor:
        y = model(normal(*LARGE, seed=step))
        return (y / (y.detach() if step % 4 == 3 else 3.0)).square().mean()

    def pole(model: nn.Module, step: int) -> Tensor:
        y = model[0](normal(*LARGE, seed=step))
        return ((y.sigmoid() if step >= 3 else y + 1).abs() + 0.1).pow(-1.5).square().mean()

    def divided(model: nn.Module, step: int) -> Tensor:
        x = normal(*LARGE, seed=step)
        y = model[0](x)
        return ((y.sigmoid() if step >= 3 else y + 1) / (x.abs() + 0.3)).square().mean()

    def dropped(model: nn.Module, step: int) -> Tensor:
        y = model[0](normal(*LARGE, seed=step))
        _ = y.abs().add(0.1).pow(0.5)
        del _
        return y.sin().mean()

    def crowded(model: nn.Module, step: int) -> Tensor:
        y = (model[0](normal(*LARGE, seed=step)).abs() + 0.1).pow(-1.5 if step == 5 else 2)
        others = [y.detach().add(model[0].bias).div(normal(*LARGE, seed=seed).abs() + 0.1) for seed in range(18)]
        return (y.sin() + torch.stack(others).sum(0)).mean()

    def twice(model: nn.Module, step: int) -> Tensor:
        y = model[0](normal(*LARGE, seed=step))
        for exponent in (-1.5 if step == 4 else 2, 2):
            y = (y.sigmoid().abs() + 0.1).pow(exponent)
        return y.mean()

    def other_values(model: nn.Module, step: int) -> Tensor:
        x = normal(*LARGE, seed=step)
        return model((x > 0).float() if step % 2 else x).square().mean()

    def not_finite(model: nn.Module, step: int) -> Tensor:
        x = normal(*LARGE, seed=step)
        return (model(x) * (x.index_fill(0, torch.tensor([3]), torch.inf) if step % 3 == 2 else x)).mean()

    def frozen(model: nn.Module, step: int) -> Tensor:
        model[0].requires_grad_(step % 3 != 2)
        return model(normal(*LARGE, seed=step)).square().mean()

    def another_layout(model: nn.Module, step: int) -> Tensor:
        x = normal(*LARGE, seed=step)
        return model(x.t().contiguous().t() if step % 2 else x).square().mean()

    def another_type(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", enabled=step % 2 == 1):
            return model(normal(*LARGE, seed=step)).square().mean()

    def shared(model: nn.Module, step: int) -> Tensor:
        x = normal(*LARGE, seed=step)
        y = x if step % 2 else x.clone()
        return (model(x) + model(y)).square().mean()

    def evaluated(model: nn.Module, step: int) -> Tensor:
        with torch.no_grad():
            model(normal(*LARGE, seed=step + 100))
        return model(normal(*LARGE, seed=step)).square().mean()

    def negated(model: nn.Module, step: int) -> Tensor:
        x = torch.complex(normal(*LARGE, seed=step), normal(*LARGE, seed=step + 1))
        return model(x.conj().imag if step % 2 else x.imag).square().mean()

    losses = [
        skipped, swapped, other_function, other_exponent, other_norm, other_divisor, pole, divided, dropped, crowded,
        twice, other_values, not_finite, frozen, another_layout, another_type, shared, evaluated, negated,
    ]  # fmt: skip
    return {loss.__name__.strip("_"): (mlp, loss) for loss in losses}


BRANCHES = _branches()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("name", BRANCHES)
def test_programs_that_change(name: str, config: dict[str, Any]) -> None:
    """What changes from step to step is noticed: the gradients are those of the full way, bit for bit."""
    compare(*BRANCHES[name], steps=8, **config)


def test_a_sparse_tensor_in_place_of_a_dense_one() -> None:
    """It has neither strides nor a storage to look at."""

    def loss_of(model: Any, step: int) -> Tensor:
        x = normal(*LARGE, seed=step)
        x = (x.to_sparse() if step % 4 == 3 else x).requires_grad_()
        return torch.mm(x, model.weight.t()).square().mean()

    compare(lambda: nn.Linear(64, 64), loss_of, precision="exact")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("every", [1, 4], ids=["always", "at times"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_nested_tensor_of_the_older_layout(config: dict[str, Any], every: int) -> None:
    """It has no shape to look at."""

    def loss_of(model: Any, step: int) -> Tensor:
        rows = model(normal(2, *LARGE, seed=step))
        if step % every:
            return rows.square().sum()
        nested = torch.nested.as_nested_tensor([rows[0], rows[1, :40]])
        return torch.nested.to_padded_tensor(nested, 0.0).square().sum()

    compare(lambda: nn.Linear(64, 64), loss_of, steps=8, **config)


class Emptied(nn.Module):
    """Saves a tensor without elements, as an expert that nobody has chosen, before it does one thing or another."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        nothing = x[:0].sin()
        return torch.cat([nothing, x.tanh() if self.calls % 4 else x.cos()])


@pytest.mark.parametrize("precision", [4, "exact"])
def test_a_pass_that_leaves_after_a_tensor_without_elements(precision: object) -> None:
    make = partial(nn.Sequential, nn.Linear(64, 64), Emptied())
    compare(make, lambda model, step: model(normal(64, 64, seed=step)).sum(), steps=8, precision=precision)


def test_another_program_is_replayed_beside_the_first() -> None:
    """As of training and of another task that take turns: both are in the tree after one pass each."""
    make, loss_of = BRANCHES["skipped"]
    model, engine = seeded(make)
    for number in range(12):
        with counted() as count:
            take_step(engine, model, loss_of, number)
        if number > 8:
            assert count[0] >= 2


def test_a_replayed_pass_has_no_hooks_on_modules() -> None:
    """A module with hooks takes 5 us more for each call; what leaves the tree has them again."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))
    engine = engine_for(model, 4, packing="device")

    def hooked(x: Tensor) -> list[bool]:
        with engine.compress():
            found = [bool(module._forward_hooks) for module in model]
            model(x).sum().backward()
        return found

    for _ in range(4):
        hooks = hooked(normal(*LARGE))
    assert hooks == [False, False, True]  # what follows from a normalization has to know its result
    hooked(normal(*LARGE, seed=1).requires_grad_())  # another program: a branch
    assert [bool(module._forward_hooks) for module in model] == [True, True, True]
    engine.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model)


def test_sites_of_a_branch_are_those_of_the_full_way() -> None:
    """A pass that leaves the tree inside of nested modules finds where it is."""
    torch.manual_seed(0)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
            self.last = nn.Linear(64, 64)
            self.extra = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            return self.last(x.sin() if self.extra else x)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        model.extra = step > 4
        return model(normal(*LARGE, seed=step)).square().mean()

    compare(Outer, loss_of, steps=8, precision=4)


class Gated(nn.Module):
    """A block whose first operator is one or another."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, smooth: bool = False) -> Tensor:
        x = F.softplus(x) if smooth else x.tanh()
        return F.gelu(self.value(x)) * self.gate(x).sigmoid()


class Shared(nn.Module):
    """Runs one block three times, or others at random, with operators of its own between them."""

    def __init__(self, at_random: bool) -> None:
        super().__init__()
        self.at_random, self.step = at_random, 0
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 8)
        self.blocks = nn.ModuleList(Gated() for _ in range(3 if at_random else 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sin()
        for number in range(3):
            if not self.at_random:
                x = self.blocks[0](x, bool(self.step >> number & 1))
            elif (self.step * 5 + 3) >> number & 1:
                x = F.silu(self.blocks[number].value(x))
        return self.last(x)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("at_random", [True, False], ids=["other blocks", "one block thrice"])
def test_branches_of_branches_save_in_the_same_calls(at_random: bool, config: dict[str, Any]) -> None:
    """A call goes on below each branch, and another one of the same module does not."""

    def loss_of(model: Any, step: int) -> Tensor:
        model.step = step
        return model(normal(*LARGE, seed=step)).square().mean()

    assert compare(partial(Shared, at_random), loss_of, steps=20, **config) >= 4


def test_graphs_of_several_passes_alive_at_once() -> None:
    """Pages of one are not those of another."""
    make, loss_of = MODELS["transformer"]
    model, engine = seeded(make)
    for number in range(4):
        take_step(engine, model, loss_of, number)
    losses, expected = [], []
    for number in range(3):
        expected.append(take_step(engine, model, loss_of, number).gradients)
    for number in range(3):
        torch.manual_seed(number)
        with engine.compress():
            losses.append(loss_of(model, number))
    check_pager(pager_of(engine))
    for loss, exact in zip(losses, expected, strict=True):
        model.zero_grad()
        loss.backward()
        found = [each.grad for each in model.parameters() if each.grad is not None]
        assert all(map(torch.equal, found, exact))
    del losses, loss
    assert_empty(engine)


def test_threads_replay_their_own_passes() -> None:
    """Two threads train copies that share an engine's tree; each gets its own gradients."""
    make, loss_of = MODELS["mlp"]
    model, engine = seeded(make)
    parameters = [each for each in model.parameters() if each.requires_grad]

    def gradients(number: int) -> list[Tensor]:
        with engine.compress():
            loss = loss_of(model, number)
        return list(torch.autograd.grad(loss, parameters))

    expected = [gradients(number) for number in range(4) for _ in range(2)][1::2]
    wrong: list[int] = []

    def train(number: int) -> None:
        for _ in range(20):
            if not all(map(torch.equal, gradients(number), expected[number])):
                wrong.append(number)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    check_pager(pager_of(engine))


def test_an_error_in_a_replayed_pass_leaves_nothing_behind() -> None:
    """Neither pages nor hooks; the next pass is replayed as before."""
    make, loss_of = MODELS["mlp"]
    model = make()
    engine = engine_for(model, 4, packing="device")
    for number in range(4):
        take_step(engine, model, loss_of, number)

    def fail() -> None:
        with engine.compress():
            loss = loss_of(model, 0)
            raise ZeroDivisionError(loss)

    with pytest.raises(ZeroDivisionError):
        fail()
    gc.collect()  # the error keeps its frames, and they the loss
    assert_empty(engine)
    with counted() as count:
        take_step(engine, model, loss_of, 0)
    assert count[0] > 0


def test_a_budget_that_comes_later_presses_what_was_replayed() -> None:
    """Leases that keep their pages are in the books like others, and give up planes."""
    make, loss_of = MODELS["transformer"]
    model = make()
    engine = engine_for(model, 8, packing="device")
    for number in range(4):
        take_step(engine, model, loss_of, number)
    with engine.compress():
        loss = loss_of(model, 0)
    held = engine.held_bytes
    engine.set_memory_budget(int(held * 0.8))
    assert engine.held_bytes <= held * 0.8
    check_pager(pager_of(engine))
    loss.backward()
    del loss
    assert_empty(engine)
    assert engine.finish_step().dropped_planes > 0


def test_a_budget_that_goes_leaves_no_fewer_bits() -> None:
    """What it has taken from tensors is no decision for those of later passes."""
    model, engine = seeded(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))))
    errors, held = list[float](), 0
    for number in range(12):
        if number in (4, 8):
            engine.set_memory_budget(held * 3 // 4 if number == 4 else None)
        exact = torch.autograd.grad(model(normal(512, 64, seed=number)).square().mean(), list(model.parameters()))
        with engine.compress():
            loss = model(normal(512, 64, seed=number)).square().mean()
        held = engine.held_bytes
        errors.append(error(list(torch.autograd.grad(loss, list(model.parameters()))), list(exact)))
        engine.finish_step()
    assert min(errors[4:8]) > 1.5 * max(errors[:4])
    assert max(errors[8:]) < 1.1 * max(errors[:4])


def test_trees_do_not_grow_without_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is another in each step begins a new tree now and then; shapes of a save are bounded, too."""
    monkeypatch.setattr(recording, "MOST_SAVES", 40)
    monkeypatch.setattr(recording, "SHAPES", 3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    engine = engine_for(model, 4, packing="device")
    for number in range(40):
        with engine.compress():
            x = normal(64 + 4 * (number % 8), 64, seed=number)
            for place in range(6):
                if number >> place & 1:
                    x = model[place](x)
            loss = x.square().mean()
        if loss.requires_grad:
            loss.backward()
    tree = engine._replays.own._recordings
    pending, saves = [root for _, root in tree._roots], 0
    while pending:
        save = pending.pop()
        saves += 1
        assert len(save.decisions) <= 3
        pending += save.following
    assert saves <= 40 + 1 + 6 * 4


def test_idle_pages_go_back_when_a_peak_does_not_return() -> None:
    """Leases that keep their pages keep no region alive that only a peak needed."""
    model = Scale()
    engine = engine_for(model, 4, packing="device", pool_growth="1MB")

    def step(rows: int) -> None:
        with engine.compress():
            loss = model(normal(rows, 64)).sum()
        loss.backward()
        engine.finish_step()

    for rows in (128, *(100_000,) * 4, *(128,) * 40):
        step(rows)
    assert engine.reserved_bytes < 2 << 20


def test_idle_pages_go_back_when_their_kind_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of more lengths than are remembered keep no pages that nobody can take any more."""
    monkeypatch.setattr(idle_leases, "MOST_KINDS", 4)
    model, engine = seeded(lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh()))
    for number in range(60):
        take_step(engine, model, lambda model, step: model(normal(64 * (1 + step % 20), 64)).sum(), number)
    assert_empty(engine)
    pager = pager_of(engine)
    pager.shrink()
    assert pager.pool.used_pages == 0
