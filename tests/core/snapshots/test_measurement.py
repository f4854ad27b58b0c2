"""What a forward pass may change, and that a measurement leaves no trace of it."""

from __future__ import annotations

import random
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from daf_core import TraceError
from daf_core.snapshots.attributes import Contents, attributes_kept
from daf_core.snapshots.measurement import LARGEST_COPY, Measurement, measuring
from daf_core.snapshots.writes import Copy, Writes

SEEN: list[int] = []


class Counter:
    """An object of the user's."""

    def __init__(self) -> None:
        self.calls, self.inner = 0, {"seen": [0]}


@dataclass
class Record:
    """Plain data."""

    values: list[Any] = field(default_factory=list)


class Slots:
    """An object without a dictionary of attributes."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Keeping(nn.Module):
    """Keeps a bit of everything, and changes some of it in each forward pass."""

    created: ClassVar[int] = 0
    shared: ClassVar[list[int]] = [0]

    def __init__(self, change: Callable[[Keeping], object]) -> None:
        super().__init__()
        self.change = [change]
        self.linear = nn.Linear(2, 2)
        self.codebook = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("range", torch.zeros(2))
        self.calls, self.ready, self.name = 0, False, "a"
        self.items, self.table, self.recent, self.kinds = [1], {"x": [1]}, deque([1], maxlen=2), {1}
        self.mean, self.means = torch.zeros(2), [torch.zeros(2)]
        self.array = np.zeros(3)
        self.numbers = (random.Random(1), np.random.default_rng(1), np.random.RandomState(1))
        self.generator = torch.Generator().manual_seed(1)
        self.counter, self.record, self.space = Counter(), Record(), SimpleNamespace(calls=0)
        self.hidden = [nn.BatchNorm1d(2)]
        self.history, self.raw, self.used = [0] * 20_000, bytearray(2), OrderedDict(a=1, b=2)
        self.register_forward_hook(_recording(self.items))
        self.slots, self.steps = Slots(), iter(range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change[0](self)
        return self.linear(x)


def _recording(seen: list[int]) -> Callable[..., None]:
    def record(module: Keeping, *_: object) -> None:
        if module.record.values == ["record"]:
            seen.append(1)
            SEEN.append(1)

    return record


def _inner(model: Keeping) -> Any:
    return model.hidden[0]


def _in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


CHANGES: dict[str, tuple[Callable[[Any], object], Callable[[Any], Any]]] = {
    "number": (lambda model: setattr(model, "calls", model.calls + 1), lambda model: model.calls),
    "flag": (lambda model: setattr(model, "ready", True), lambda model: model.ready),
    "new attribute": (lambda model: setattr(model, "late", 1), lambda model: hasattr(model, "late")),
    "deleted attribute": (lambda model: delattr(model, "name"), lambda model: getattr(model, "name", None)),
    "list": (lambda model: model.items.append(1), lambda model: [*model.items]),
    "list in a dictionary": (lambda model: model.table["x"].append(1), lambda model: str(model.table)),
    "dictionary": (lambda model: model.table.update(y=1), lambda model: str(model.table)),
    "deque": (lambda model: model.recent.extend([2, 3]), lambda model: [*model.recent]),
    "long list": (lambda model: model.history.append(1), lambda model: len(model.history)),
    "bytes": (lambda model: model.raw.extend(b"ab"), lambda model: bytes(model.raw)),
    "order": (lambda model: model.used.move_to_end("a"), lambda model: [*model.used]),
    "list of a hook": (lambda model: model.record.values.append("record"), lambda model: [*model.items]),
    "global list of a hook": (lambda model: model.record.values.append("record"), lambda _: [*SEEN]),
    "set": (lambda model: model.kinds.add(2), lambda model: {*model.kinds}),
    "tensor in place": (lambda model: model.mean.add_(1), lambda model: model.mean.tolist()),
    "tensor behind autograd": (lambda model: model.mean.data.add_(1), lambda model: model.mean.tolist()),
    "part of a tensor": (lambda model: model.mean[1:].add_(1), lambda model: model.mean.tolist()),
    "result in a tensor": (
        lambda model: torch.add(torch.ones(2), 1, out=model.mean),
        lambda model: model.mean.tolist(),
    ),
    "several tensors": (
        lambda model: torch.ops.aten._foreach_add_(model.means, 1),
        lambda model: model.means[0].tolist(),
    ),
    "another tensor": (lambda model: setattr(model, "mean", model.mean + 1), lambda model: model.mean.tolist()),
    "tensor in a list": (lambda model: model.means[0].add_(1), lambda model: model.means[0].tolist()),
    "array": (lambda model: np.add(model.array, 1, out=model.array), lambda model: model.array.tolist()),
    "random.Random": (lambda model: model.numbers[0].random(), lambda model: model.numbers[0].getstate()),
    "numpy's generator": (
        lambda model: model.numbers[1].random(),
        lambda model: str(model.numbers[1].bit_generator.state),
    ),
    "numpy's state": (lambda model: model.numbers[2].rand(), lambda model: str(model.numbers[2].get_state()[2])),
    "torch's generator": (
        lambda model: torch.rand(1, generator=model.generator),
        lambda model: model.generator.get_state().tolist(),
    ),
    "object": (lambda model: setattr(model.counter, "calls", 1), lambda model: model.counter.calls),
    "in an object": (lambda model: model.counter.inner["seen"].append(1), lambda model: str(model.counter.inner)),
    "data class": (lambda model: model.record.values.append(1), lambda model: str(model.record)),
    "namespace": (lambda model: setattr(model.space, "calls", 1), lambda model: model.space.calls),
    "class": (lambda _: setattr(Keeping, "created", Keeping.created + 1), lambda _: Keeping.created),
    "list of a class": (lambda _: Keeping.shared.append(1), lambda _: [*Keeping.shared]),
    "new in a class": (lambda _: setattr(Keeping, "late", 1), lambda _: hasattr(Keeping, "late")),
    "weight": (lambda model: _in_place(model.linear.weight), lambda model: model.linear.weight.tolist()),
    "weight behind autograd": (
        lambda model: model.linear.weight.data.mul_(2),
        lambda model: model.linear.weight.tolist(),
    ),
    "codebook": (lambda model: model.codebook.copy_(torch.zeros(3)), lambda model: model.codebook.tolist()),
    "another weight": (
        lambda model: setattr(model, "codebook", nn.Parameter(torch.zeros(3))),
        lambda model: model.codebook.tolist(),
    ),
    "buffer": (lambda model: model.range.copy_(torch.ones(2)), lambda model: model.range.tolist()),
    "larger buffer": (lambda model: model.range.resize_(5), lambda model: [*model.range.shape]),
    "new buffer": (lambda model: model.register_buffer("late", torch.ones(1)), lambda model: [*model._buffers]),
    "module": (lambda model: model.add_module("late", nn.Identity()), lambda model: [*model._modules]),
    "replaced module": (lambda model: setattr(model, "linear", nn.Linear(2, 2)), lambda model: id(model.linear)),
    "mode": (lambda model: model.eval(), lambda model: [module.training for module in model.modules()]),
    "hook": (lambda model: model.register_forward_hook(print), lambda model: len(model._forward_hooks)),
    "module in a list": (lambda model: setattr(_inner(model), "eps", 1.0), lambda model: _inner(model).eps),
    "statistics of one": (
        lambda model: _inner(model).running_mean.add_(1),
        lambda model: _inner(model).running_mean.tolist(),
    ),
}


@pytest.fixture(params=CHANGES)
def keeping(request: pytest.FixtureRequest) -> tuple[Keeping, Callable[[Keeping], Any]]:
    change, read = CHANGES[request.param]
    return Keeping(change), read


@pytest.fixture(params=[False, True], ids=["", "compiled"])
def beside_graphs(request: pytest.FixtureRequest) -> None:
    """Has something else compiled: nothing tells whether a pass runs some of it."""
    if request.param:
        torch.compile(nn.Identity(), backend="eager")(torch.ones(1))


def _run(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.usefixtures("beside_graphs")
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_pass_changes_comes_back(keeping: tuple[Keeping, Callable[[Keeping], Any]], fails: bool) -> None:
    """Also where the pass fails."""
    model, read = keeping
    before = read(model)
    with pytest.raises(KeyError) if fails else nullcontext(), measuring(model):
        _run(model)
        assert read(model) != before
        if fails:
            raise KeyError
    assert read(model) == before


@pytest.mark.usefixtures("beside_graphs")
def test_it_comes_back_where_time_is_measured(keeping: tuple[Keeping, Callable[[Keeping], Any]]) -> None:
    """Operators are not looked at then: what they write to is known from the run before."""
    model, read = keeping
    before, measurement = read(model), Measurement(model)
    for timed in (False, True, True):
        with measurement.running(timed):
            _run(model)
            assert read(model) != before
        assert read(model) == before


@pytest.mark.usefixtures("beside_graphs")
def test_it_is_known_by_name(keeping: tuple[Keeping, Callable[[Keeping], Any]]) -> None:
    """What is not put back as buffers are is told from what a pass leaves as it is."""
    model, read = keeping
    measurement, before = Measurement(model), read(model)
    with measurement.running():
        model.linear(torch.ones(1, 2))
    assert not measurement.changed
    with measurement.running():
        _run(model)
    assert read(model) == before
    assert measurement.changed


def test_same_objects_come_back() -> None:
    """Others may refer to them."""
    model = Keeping(lambda model: (model.items.append(1), setattr(model, "mean", model.mean + 1)))
    items, mean, weight = model.items, model.mean, model.linear.weight
    version = weight._version
    with measuring(model):
        _run(model)
        weight.data.add_(1)
    assert model.items is items
    assert model.mean is mean
    assert model.linear.weight is weight
    assert weight._version == version


TRACES: dict[str, Callable[[Any], object]] = {
    "slots": lambda model: setattr(model.slots, "calls", model.slots.calls + 1),
    "steps": lambda model: next(model.steps),
    "linear.weight": lambda model: np.add.at(model.linear.weight.detach().numpy(), 0, 1),
}


@pytest.mark.parametrize("name", TRACES)
def test_what_cannot_come_back_is_named(name: str) -> None:
    """The first time, and from then on before anything runs."""
    model, runs = Keeping(TRACES[name]), 0
    measurement = Measurement(model)
    expected = rf"changes {re.escape(name)} in a way that cannot be taken back"
    for _ in range(3):
        with pytest.raises(TraceError, match=expected), measurement.running():  # noqa: PT012 later ones raise at once
            runs += 1
            _run(model)
    assert runs == 1


def test_parameters_that_a_first_run_makes() -> None:
    """There is nothing to take back to."""
    model = nn.Sequential(nn.LazyLinear(2))
    expected = r"0\.weight has no values before a first batch has run through the model"
    with pytest.raises(TraceError, match=expected), measuring(model):
        raise AssertionError
    model(torch.ones(1, 2))
    with measuring(model):
        model(torch.ones(1, 2))


ONCE: dict[str, Callable[[Any], object]] = {
    "flag": lambda model: setattr(model, "ready", True),
    "noted": lambda model: setattr(model, "mean", torch.rand(3)),
    "noted in a list": lambda model: setattr(model, "items", [torch.rand(3)]),
    "buffer": lambda model: model.range.copy_(torch.rand(2)),
}
EACH_TIME: dict[str, tuple[Callable[[Any], object], str]] = {
    "number": (lambda model: setattr(model, "calls", model.calls + 1), "calls"),
    "list": (lambda model: model.items.append(1), "items"),
    "mean": (lambda model: setattr(model, "mean", 0.9 * model.mean + 1), "mean"),
    "object": (lambda model: model.counter.inner["seen"].append(1), "counter"),
    "buffer": (lambda model: model.range.add_(1), "range"),
    "weight": (lambda model: model.codebook.add_(1), "codebook"),
}


@pytest.mark.usefixtures("beside_graphs")
@pytest.mark.parametrize("change", ONCE.values(), ids=ONCE)
def test_what_a_pass_sets_is_no_repeated_change(change: Callable[[Any], object]) -> None:
    """A pass that is run again sets it again."""
    model = nn.Sequential(Keeping(change), nn.BatchNorm1d(2))
    measurement = Measurement(model)
    with measurement.running():
        model(torch.ones(2, 2))
    assert measurement.changed
    assert not measurement.repeated_changes(lambda: model(torch.ones(2, 2)))


@pytest.mark.usefixtures("beside_graphs")
@pytest.mark.parametrize(("change", "name"), EACH_TIME.values(), ids=EACH_TIME)
def test_what_a_pass_adds_to_is_a_repeated_change(change: Callable[[Any], object], name: str) -> None:
    """A pass that is run again would add to it twice."""
    model = nn.Sequential(Keeping(change))
    measurement = Measurement(model)
    with measurement.running():
        model(torch.ones(2, 2))
    assert measurement.repeated_changes(lambda: model(torch.ones(2, 2))) == {f"0.{name}"}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_tensors_without_values_of_their_own() -> None:
    """They are left alone."""
    model = nn.Module()
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    model.freed, model.meta = freed, torch.ones(2, device="meta")
    model.sparse, model.none = torch.eye(2).to_sparse(), torch.ones(0)
    model.nested = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)])
    for name in ("meta", "sparse", "nested"):
        model.register_buffer(f"{name}_buffer", getattr(model, name))
    model.register_buffer("quantized", torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8))
    model.register_buffer("conjugated", torch.ones(2, dtype=torch.complex64).conj())
    model.negative = torch.ones(2, dtype=torch.complex64).conj().imag
    model.expanded = torch.ones(1).expand(4)
    for _ in range(2):
        with measuring(model):
            pass
    assert freed.untyped_storage().nbytes() == 0


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.weight * x


class Normed(nn.Module):
    """Writes to a weight and to buffers in each forward pass, as `nn.Embedding` with a largest norm does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(2 * torch.ones(size))
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("last", torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.div_(2)
            self.calls.add_(1)
            self.last.copy_(x)
        return 2 * self.weight * x


def test_what_graphs_write_comes_back() -> None:
    """No operator is seen inside of them; what they add to is told from what they set."""
    model = Normed(2)
    model.compile()
    measurement, before = Measurement(model), model.weight._version
    for _ in range(3):
        with measurement.running():
            model(torch.ones(2)).sum().backward()
            assert model.weight.tolist() == [1, 1]
        assert (model.weight.tolist(), model.calls.item(), model.last.tolist()) == ([2, 2], 0, [0, 0])
    assert model.weight._version > before  # a graph says that it writes, and to whom
    assert measurement.changed == {"weight", "calls", "last"}
    assert measurement.repeated_changes(lambda: model(torch.ones(2))) == {"weight", "calls"}


def test_large_weights_that_graphs_write_to_are_named() -> None:
    """They are not copied."""
    model = Normed(LARGEST_COPY)
    model.compile()
    with pytest.raises(TraceError, match="changes weight in a way"), measuring(model):
        model(torch.ones(1)).sum().backward()


def test_a_list_of_small_and_large_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside graphs one is copied and the other is watched, under one name."""
    monkeypatch.setattr("daf_core.snapshots.measurement.LARGEST_COPY", 8)
    torch.compile(nn.Identity(), backend="eager")(torch.ones(1))
    model = Keeping(lambda model: [_in_place(each) for each in model.extra])
    model.extra = [nn.Parameter(torch.ones(size)) for size in (2, 3)]
    with measuring(model):
        _run(model)
    assert [each.tolist() for each in model.extra] == [[1, 1], [1, 1, 1]]


class Late(nn.Module):
    """Compiles what writes to its weight in the first pass of several rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:
            torch.compile(self.halve)()
        return self.weight * x

    def halve(self) -> None:
        with torch.no_grad():
            self.weight.div_(2)


class Other(torch.Tensor):
    """A tensor of another class."""


def test_two_views_of_another_class_come_back() -> None:
    """What is copied of one holds nothing of the other, though both are parts of one storage."""
    torch.compile(nn.Identity(), backend="eager")(torch.ones(1))
    model, whole = nn.Module(), torch.ones(4)
    model.views = [whole[:2].as_subclass(Other), whole[2:].as_subclass(Other)]
    with measuring(model):
        for view in model.views:
            view.add_(1)
    assert whole.tolist() == [1, 1, 1, 1]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
def test_memory_that_is_only_read_is_not_written(tmp_path: Path) -> None:
    """To write to it ends the process."""
    np.save(tmp_path / "table.npy", np.ones(4))
    torch.compile(nn.Identity(), backend="eager")(torch.ones(1))
    model = nn.Module()
    model.table = torch.from_numpy(np.load(tmp_path / "table.npy", mmap_mode="r"))
    with measuring(model):
        assert model.table.sum() == 4


def test_all_else_comes_back_where_one_tensor_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Keeping(lambda model: (model.range.add_(1), torch.rand(1)))
    monkeypatch.setattr(Writes, "restore", lambda _: {}["memory"])
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="memory"), measuring(model):
        _run(model)
    assert model.range.tolist() == [0, 0]
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_compiled_for_the_first_time_in_a_measured_pass() -> None:
    """No operator would be seen in the graph, and nothing was copied before."""
    model = Late()
    measurement = Measurement(model)
    for rows in (1, 2, 2):
        with measurement.running():
            model(torch.ones(rows, 4)).sum().backward()
        assert model.weight.tolist() == [2, 2, 2, 2]
    assert measurement.changed == {"weight"}


def test_parts_of_one_storage_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand weights may be parts of one vector."""
    torch.compile(nn.Identity(), backend="eager")(torch.ones(1))
    model, made = nn.ParameterList(torch.ones(100).split(1)), []
    monkeypatch.setattr("daf_core.snapshots.measurement.Copy", lambda each: made.append(Copy(each)) or made[-1])
    with measuring(model):
        _in_place(model[7])
    assert len(made) == 1
    assert all(each.tolist() == [1] for each in model)


def test_compiled_models_are_not_compiled_again() -> None:
    """What looks at operators would have them run as written, and never be compiled."""
    torch.compiler.reset()
    counters.clear()
    model = torch.compile(Doubled(), backend="eager")
    for _ in range(2):
        with measuring(model):
            model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


def test_objects_may_refer_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model and its card: each is looked into once, and put back."""
    looks = list[str]()
    look_into = Contents._look_into

    def counted(self: Contents, name: str, value: Any, room: bool) -> None:
        looks.append(name)
        assert len(looks) < 100
        look_into(self, name, value, room)

    monkeypatch.setattr(Contents, "_look_into", counted)
    owner, one, other = Counter(), Counter(), Counter()
    owner.one, one.other, other.one, other.owner = one, other, one, owner  # pyright: ignore[reportAttributeAccessIssue]
    with attributes_kept(owner, nn.Linear(1, 1)):
        one.calls, other.calls, owner.calls = 1, 2, 3
        other.inner["seen"].append(1)
    assert (one.calls, other.calls, owner.calls, other.inner) == (0, 0, 0, {"seen": [0]})
