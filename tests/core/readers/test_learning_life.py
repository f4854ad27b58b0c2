"""What waits for its reader in a first pass: for how long, how much of it, and on whatever thread."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from daf_core import ActivationEngine
from daf_core.autograd.functions import apply
from daf_core.errors import ActivationBudgetError, ReaderError
from daf_core.readers import learning
from daf_core.readers.learning import NEWEST, PATIENCE, Readers
from daf_core.readers.places import function_that_saves
from daf_core.saved_tensors.itemize import SavedItem
from tests.core.harness import LARGE, assert_empty, assert_same, engine_for, error, normal, watch_held
from tests.core.readers.test_learning import WIDTH, Net, X, plain, step


def waiting_in(engine: ActivationEngine) -> int:
    return len(engine._readers._own.waiting) + len(engine._readers._own.unresolved)


class Mark:
    """Takes notice of the memory of a tensor."""

    def __init__(self) -> None:
        self.found: list[StorageWeakRef] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.found.append(StorageWeakRef(x.untyped_storage()))
        return x


def test_values_do_not_outlive_the_pass() -> None:
    mark = Mark()
    net = Net(lambda x: mark(mark(x * 2).sin() * 3).cos().mean())
    engine = engine_for(net, 4)
    with engine.compress():
        loss = net(X)
        assert waiting_in(engine) > 0
        assert not any(found.expired() for found in mark.found)
    assert waiting_in(engine) == 0
    assert all(found.expired() for found in mark.found)
    loss.backward()
    del loss
    assert_empty(engine)


@pytest.mark.parametrize("packing", ["device", "workers"])
def test_values_do_not_outlive_an_exception(packing: Any) -> None:
    mark, fails = Mark(), [True]

    def head(x: Tensor) -> Tensor:
        found = mark(x * 2).sin()
        if fails[0]:
            raise ZeroDivisionError
        return found.mean()

    net = Net(head)
    exact_net = Net(lambda x: (x * 2).sin().mean())
    engine = engine_for(net, 4, packing=packing)
    with pytest.raises(ZeroDivisionError):
        step(net, engine)
    gc.collect()
    assert waiting_in(engine) == 0
    assert all(found.expired() for found in mark.found)
    assert_empty(engine)
    fails[0] = False
    assert error(step(net, engine), plain(exact_net)) < 0.3


def watch_waiting(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Records how many tensors wait, bytes of those whose reader is known, and bytes that they may have."""
    wait, seen = Readers.wait, list[tuple[int, int, int]]()

    def record(readers: Readers, *arguments: Any) -> None:
        wait(readers, *arguments)
        waiting = readers._own.waiting
        seen.append((len(waiting), sum(each.size for each in waiting if each.resolved), arguments[-1]))

    monkeypatch.setattr(Readers, "wait", record)
    return seen


def test_few_values_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_waiting(monkeypatch)

    def head(x: Tensor) -> Tensor:
        for _ in range(30):
            x = (x * 1.5).sin()
        return x.mean()

    net = Net(head)
    step(net, engine_for(net, 4))
    assert 1 < max(count for count, _, _ in seen) <= NEWEST + 1


HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "smooth": lambda x: _deep(x, torch.sin),
    "exact": lambda x: _deep(x, lambda part: part - part.amax(1, keepdim=True)),
    "poles": lambda x: (x.softmax(-1).add(1e-9).log() * normal(128, 64)).mean() + _deep(x, torch.sin),
    "quotients": lambda x: _deep(x, lambda part: part / (part.square() + 0.1)),
    "sides": lambda x: _deep(x, lambda part: F.leaky_relu(part, 0.5)),
}


def _deep(x: Tensor, operator: Callable[[Tensor], Tensor]) -> Tensor:
    for number in range(6):
        x = operator(x * (1 + number / 4))
    return x.square().mean()


@pytest.mark.parametrize("packing", ["device", "workers"])
@pytest.mark.parametrize("budget", [96 << 10, 160 << 10, 280 << 10])
@pytest.mark.parametrize("name", HEADS)
def test_a_first_pass_keeps_a_budget(name: str, budget: int, packing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is refused, and what comes out of backward is right where nothing was dropped."""
    net = Net(HEADS[name])
    exact = plain(net)
    held, seen = watch_held(monkeypatch), watch_waiting(monkeypatch)
    engine = engine_for(net, 8, memory_budget=budget, packing=packing)
    for _ in range(3):
        try:
            found = step(net, engine)
        except (ActivationBudgetError, ReaderError):
            net.zero_grad()
        else:
            cosine = torch.cosine_similarity(found[0].flatten(), exact[0].flatten(), dim=0)
            assert engine.finish_step().dropped_planes or cosine > 0.98
        gc.collect()
        assert waiting_in(engine) == 0
    assert max(held) <= budget
    assert all(size <= room for _, size, room in seen)
    assert_empty(engine)


def test_no_room_is_said_where_all_stays_exact() -> None:
    net = Net(HEADS["exact"])
    engine = engine_for(net, 8, memory_budget=64 << 10)
    with pytest.raises(ActivationBudgetError):
        step(net, engine)


@pytest.fixture
def compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    "head",
    [
        lambda x: x.sin().amax(1).mean(),
        lambda x: F.binary_cross_entropy(torch.sigmoid(6 * x), (X > 0).float()),
        lambda x: F.cross_entropy(8 * x, X.argmax(-1)),
        lambda x: (x.clamp(-0.1, 0.1) * x).sum(),
    ],
    ids=["compared", "pole", "sure", "sides"],
)
def test_a_model_with_compiled_parts_learns_without_a_watch(head: Callable[[Tensor], Tensor]) -> None:
    net = Net(head)
    exact = plain(net)
    net.layer.compile(backend="eager")
    engine = engine_for(net, 8)
    for _ in range(3):
        found = step(net, engine)
        assert error(found, exact) < 0.05
        assert waiting_in(engine) == 0
    assert_empty(engine)


def test_threads_learn_at_once() -> None:
    nets = [Net(head) for head in list(HEADS.values())[:3]]
    exact = [plain(net) for net in nets]
    together = nn.ModuleList(nets)
    engine = engine_for(together, 8)
    start, errors = threading.Barrier(len(nets)), list[float]()
    failed: list[BaseException] = []

    def run(net: nn.Module, expected: list[Tensor]) -> None:
        try:
            start.wait(30)
            errors.extend(error(step_alone(net, engine), expected) for _ in range(10))
        except BaseException as caught:
            failed.append(caught)

    threads = [threading.Thread(target=run, args=each) for each in zip(nets, exact, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert len(errors) == 30
    assert max(errors) < 0.05
    assert_empty(engine)


def step_alone(net: nn.Module, engine: ActivationEngine) -> list[Tensor]:
    """Returns the gradients of one step, without setting torch's seed."""
    with engine.compress():
        loss = net(X)
    return list(torch.autograd.grad(loss, list(net.parameters())))


@pytest.mark.parametrize("packing", ["device", "workers"])
@pytest.mark.parametrize("name", HEADS)
def test_items_of_a_first_pass_add_up(name: str, packing: Any) -> None:
    net = Net(HEADS[name])
    engine = engine_for(net, 4, packing=packing)
    listed: list[list[SavedItem]] = []
    for _ in range(2):
        with engine.itemized() as items, engine.compress():
            loss = net(X)
        items.name_operators(loss)
        loss.backward()
        found = items.at_peak()
        del loss
        assert_empty(engine)
        statistics = engine.finish_step()
        sums = sum(item.raw_bytes for item in found), sum(item.held_bytes for item in found)
        assert sums == (statistics.raw_bytes, statistics.held_bytes)
        listed.append([entry.item for entry in items._entries])
        assert {item.codec for item in found} >= statistics.stored_as.keys()
    first, second = listed
    assert [item.codec for item in first] == [item.codec for item in second]
    assert sum(item.held_bytes for item in first) == sum(item.held_bytes for item in second)


MANY = 30


def _wide(x: Tensor) -> list[Tensor]:
    return [x * (1 + number / MANY) for number in range(MANY)]


def _foreach(x: Tensor) -> Tensor:
    """One node that saves many tensors."""
    return torch.stack([part.mean() for part in torch._foreach_sin(_wide(x))]).sum()  # pyright: ignore[reportArgumentType]


def many_at_once(parts: list[Tensor]) -> Tensor:
    found: list[Tensor] = []
    for part in parts:
        found.append(part.amax(1))
    return torch.stack(found).square().mean()


def smooth_at_once(parts: list[Tensor]) -> Tensor:
    found: list[Tensor] = []
    for part in parts:
        found.append(part.cos())
    return torch.stack(found).square().mean()


def _recurrent(x: Tensor) -> Tensor:
    """Saves many tensors in one call, of which each belongs to another node."""
    lstm = nn.LSTM(16, 64).double()
    with torch.no_grad():
        for seed, parameter in enumerate(lstm.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed) * 0.2)
    rows = x.double().view(8, 64, 16)
    found, _ = lstm(rows.repeat(4, 1, 1))
    return found.square().mean()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["foreach", "exact script", "script", "recurrent"])
@pytest.mark.parametrize("patience", [PATIENCE, 2])
def test_a_call_may_save_more_than_may_wait(kind: str, patience: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "PATIENCE", patience)
    scripts: dict[str, Any] = {"exact script": many_at_once, "script": smooth_at_once}
    head: Callable[[Tensor], Tensor] = {"foreach": _foreach, "recurrent": _recurrent}.get(kind, lambda x: x)
    if kind in scripts:
        scripted: Any = torch.jit.script(scripts[kind])
        head = lambda x: scripted(_wide(x))  # noqa: E731 one of several heads
    net = Net(head)
    exact = plain(net)
    engine, seen = engine_for(net, 8), watch_waiting(monkeypatch)
    for _ in range(3):
        assert error(step(net, engine), exact) < 0.05
        assert waiting_in(engine) == 0
    assert max(count for count, _, _ in seen) <= patience
    assert_empty(engine)


def test_functions_of_daf_are_known_when_they_save() -> None:
    """Also where torch's own ``apply``, written in C, has no frame: nothing of theirs waits for the graph."""

    class Saving:
        apply = staticmethod(lambda: function_that_saves(sys._getframe(1)))

    assert apply(Saving) is Saving  # pyright: ignore[reportArgumentType]


def test_a_graph_may_die_in_the_pass() -> None:
    mark = Mark()

    def head(x: Tensor) -> Tensor:
        mark(x * 2).sin().cos().amax(1)
        (x * 3).clamp(0, 1).log_softmax(-1)
        gc.collect()
        return x.sin().mean() + x.amax(1).mean()

    net = Net(head)
    exact = plain(net)
    engine = engine_for(net, 8)
    found = [step(net, engine) for _ in range(3)]
    assert all(error(gradient, exact) < 0.05 for gradient in found)
    assert all(reference.expired() for reference in mark.found)
    assert_empty(engine)


def test_a_pass_without_backward_leaves_nothing() -> None:
    net = Net(HEADS["poles"])
    engine = engine_for(net, 4)
    with engine.compress():
        loss = net(X)
    del loss
    gc.collect()
    assert_empty(engine)
    assert waiting_in(engine) == 0


def test_a_first_pass_in_parts_gives_the_same() -> None:
    """As with accumulated gradients: two passes before the first backward."""
    net = Net(HEADS["poles"])
    engine = engine_for(net, 8, rounding="nearest")
    with engine.compress():
        first = net(X)
    with engine.compress():
        second = net(X)
    together: list[list[Tensor]] = []
    for loss in (first, second):
        together.append(list(torch.autograd.grad(loss, list(net.parameters()))))
    assert_same(*together)
    del first, second
    assert LARGE == (128, WIDTH)
    assert_empty(engine)


def _charbonnier(x: Tensor, power: float) -> Tensor:
    return (x * x + 1e-6) ** power


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (_charbonnier, (1.0, 0.9, 0.8)),
        (lambda x, power: x.abs() ** power, (2.0, 1.9, 1.5)),
        (lambda x, bound: x.square().clamp(max=bound), (5.0, 4.0, 0.5)),
        (lambda x, bound: x.clamp(-bound, bound), (1.0, 0.9, 0.1)),
        (F.hardtanh, (-1.0, -0.9, -0.1)),
    ],
)
def test_what_the_last_operator_reads_may_change(
    function: Callable[[Tensor, float], Tensor], arguments: tuple[float, ...], bits: Any
) -> None:
    """No later save shows its graph, but the result does: the step ended with a ReaderError."""
    first, *others = arguments
    argument = [first]
    net = Net(lambda x: function(x, argument[0]).mean())
    engine = engine_for(net, bits)
    held = set[int]()
    for argument[0] in (first, first, first, first, *others):
        expected = plain(net)
        net.zero_grad()
        with engine.compress() as show:
            loss = net(X)
            show({"loss": loss, "others": None})
        held.add(engine.held_bytes)
        loss.backward()
        found = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        assert error(found, expected) < (0.02 if bits == 8 else 0.3)
        if argument[0] == first:
            assert len(held) == 1


def test_all_readers_are_learned_anew_after_an_error() -> None:
    """Backward ends at the last of them: each had a step of its own that failed."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers, self.function = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), torch.sin

        def forward(self, x: Tensor) -> Tensor:
            first, second, last = self.layers
            return last(self.function(second(self.function(first(x))))).square().mean()

    net = Twice()
    engine = engine_for(net, 8)
    for _ in range(3):
        step(net, engine)
    net.function = torch.abs
    with pytest.raises(ReaderError, match="AbsBackward0"):
        step(net, engine)
    for _ in range(3):
        assert error(step(net, engine), plain(net)) < 0.02


class Itself:
    """A result that holds itself, and much else."""

    def __init__(self, loss: Tensor) -> None:
        self.loss, self.others, self.itself = loss, [*range(1 << 20)], self


def _beside_a_changed_view(loss: Tensor) -> dict[str, Tensor]:
    base = torch.ones(4, requires_grad=True) * 2
    view, _ = base.chunk(2)
    base.mul_(3)
    return {"view": view, "loss": loss}


@pytest.mark.parametrize("result", [Itself, _beside_a_changed_view, lambda loss: [[[loss]], None, "text"]])
def test_results_of_any_kind_are_looked_through(result: Callable[[Tensor], object]) -> None:
    power = [2.0]
    net = Net(lambda x: (x.abs() ** power[0]).mean())
    engine = engine_for(net, 8)
    for power[0] in (2.0, 2.0, 2.0, 1.9):
        expected = plain(net)
        net.zero_grad()
        with engine.compress() as show:
            loss = net(X)
            show(result(loss))
        loss.backward()
        assert error([each.grad.clone() for each in net.parameters() if each.grad is not None], expected) < 0.02
