"""A first pass learns who reads what is saved: it stores as the second one does, which watches nothing any more."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from daf_core import ActivationEngine
from daf_core.errors import ReaderError
from daf_core.model.treatments import Treatments
from daf_core.readers import learning
from daf_core.readers.learning import BARREN_PASSES, UNREAD_PASSES, Readers
from daf_core.telemetry import StepStatistics
from tests.core.harness import assert_empty, assert_same, engine_for, error, integers, normal

WIDTH = 64
ROWS = 128

Head = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A layer, and on it what is tested."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x))


X = normal(ROWS, WIDTH)


def plain(net: nn.Module) -> list[Tensor]:
    """Returns the gradients without DAF."""
    return step(net, None)


def step(net: nn.Module, engine: ActivationEngine | None, x: Tensor = X) -> list[Tensor]:
    """Returns the gradients of one step."""
    net.zero_grad()
    torch.manual_seed(1)
    if engine is None:
        loss = net(x)
    else:
        with engine.compress():
            loss = net(x)
    loss.backward()
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def watched() -> bool:
    return bool(_get_current_function_mode_stack())


class Twice(nn.Module):
    """A module that is called twice in a pass, with an operator in a loop."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x).clamp(-1, 1)
        return self.layer(x).sin().mean()


class Square(torch.autograd.Function):
    """A function of a user's, of which nothing is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


def scripted_function(x: Tensor) -> Tensor:
    return (x.tanh() * x).clamp(-0.5, 0.5)


def _attend(x: Tensor) -> Tensor:
    """Calls functions of torch's that are written in Python and call others."""
    weight, bias = normal(3 * WIDTH, WIDTH) * 0.2, torch.zeros(3 * WIDTH)
    rows = x.view(32, 4, WIDTH)
    found, _ = F.multi_head_attention_forward(
        rows, rows, rows, WIDTH, 4, weight, bias, None, None, False, 0.0, weight[:WIDTH], None, need_weights=False
    )
    return found.square().mean()


def _in_place(x: Tensor) -> Tensor:
    return (F.elu_(x * 2) + F.leaky_relu_(x + 1)).sin().mean()


def _block(x: Tensor) -> Tensor:
    return x.sin() * x.sigmoid()


def _targets() -> Tensor:
    return integers(WIDTH, ROWS)


HEADS: dict[str, Head] = {
    "sides": lambda x: F.leaky_relu(x).sum() + x.clamp(min=-0.1).square().mean(),
    "shape": lambda x: F.avg_pool2d(x.view(2, 1, 64, 64), 2).square().mean(),
    "logarithms": lambda x: x.log_softmax(-1)[:, 0].mean(),
    "exact": lambda x: x.amax(1).mean() + (x.square() + 1e-3).log().mean(),
    "cross entropy": lambda x: F.cross_entropy(x * 4, _targets()),
    "in place": _in_place,
    "in place of a clone": lambda x: ((x * 2).sin_() + (x * 3).cos_() + (x + 1).clamp_(-1, 1)).square().mean(),
    "nested functions": _attend,
    "loop": lambda x: torch.stack([(x * number).cos().mean() for number in range(1, 5)]).sum(),
    "checkpoint": lambda x: checkpoint(_block, x, use_reentrant=False).mean(),  # pyright: ignore[reportOptionalMemberAccess]
    "reentrant checkpoint": lambda x: checkpoint(_block, x, use_reentrant=True).mean(),  # pyright: ignore[reportOptionalMemberAccess]
    "script": lambda x: SCRIPTED(x).mean(),
    "function": lambda x: Square.apply(x).mean(),  # pyright: ignore[reportOptionalMemberAccess]
    "several results": lambda x: sum(part.sin().mean() for part in x.chunk(2, -1)) + x.sort(-1).values.square().mean(),
    "without gradient": lambda x: (x * x.detach().sigmoid()).mean() + x.exp().mean(),
    "gated": lambda x: F.glu(x, -1).square().mean() + F.silu(x).mean(),
    "normalized": lambda x: F.layer_norm(x, (WIDTH,)).pow(3).mean(),
    "softmax": lambda x: (x.softmax(-1) @ x.mT).square().mean(),
}

SCRIPTED: Any = scripted_function


@pytest.fixture(autouse=True, scope="module")
def script() -> None:
    global SCRIPTED
    with pytest.warns((DeprecationWarning, FutureWarning), match="script"):
        SCRIPTED = torch.jit.script(scripted_function)


def nets() -> dict[str, Callable[[], nn.Module]]:
    return {**{name: lambda head=head: Net(head) for name, head in HEADS.items()}, "twice": Twice}


@pytest.mark.parametrize("packing", ["device", "workers"])
@pytest.mark.parametrize("name", nets())
def test_a_first_pass_stores_as_the_second_one_does(name: str, packing: Any) -> None:
    net = nets()[name]()
    exact = plain(net)
    engine = engine_for(net, 8, packing=packing, rounding="nearest")
    found: list[list[Tensor]] = []
    statistics: list[StepStatistics] = []
    sizes: list[object] = []
    for _ in range(3):
        found.append(step(net, engine))
        statistics.append(engine.finish_step())
        sizes.append(engine.pass_sizes)
    assert sizes[0] == sizes[1] == sizes[2]
    assert statistics[0].stored_as == statistics[1].stored_as == statistics[2].stored_as
    assert all(error(gradient, exact) < 0.05 for gradient in found)
    assert_same(found[0], found[1])
    assert_empty(engine)


EXPECTED = {
    "sides": "sides",
    "shape": "shape",
    "logarithms": "logarithms",
    "cross entropy": "logarithms",
    "softmax": "planes",
    "exact": "raw",
}


@pytest.mark.parametrize(("name", "codec"), EXPECTED.items())
def test_a_first_pass_stores_what_is_read(name: str, codec: str) -> None:
    net = Net(HEADS[name])
    engine = engine_for(net, 4)
    step(net, engine)
    stored = engine.finish_step().stored_as
    if name == "exact":
        assert stored.keys() & {"kept", "raw", "verbatim"}
    else:
        assert stored[codec] > 0


def test_an_operator_in_place_saves_a_clone_in_few_bits() -> None:
    net = Net(HEADS["in place of a clone"])
    engine = engine_for(net, 4)
    step(net, engine)
    assert engine.finish_step().stored_as == {"planes": 4, "sides": 1}


def test_unknown_functions_read_exactly() -> None:
    """Of the layer, its input alone is stored in few bits: it is a tensor of the test's."""
    net = Net(HEADS["function"])
    exact = plain(net)
    engine = engine_for(net, 1)
    x = X.sign()  # exact in one bit
    net.zero_grad()
    net(x).backward()
    exact = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    for _ in range(2):
        assert_same(step(net, engine, x), exact)


def test_nothing_is_watched_once_all_is_known() -> None:
    seen: list[bool] = []

    def head(x: Tensor) -> Tensor:
        seen.append(watched())
        return x.sin().mean() if len(seen) < 4 else x.amax(1).mean() + x.cos().mean()

    net = Net(head)
    engine = engine_for(net, 4)
    for _ in range(7):
        step(net, engine)
        assert not watched()
    assert (seen[0], seen[4]) == (True, True)  # a pass with new places has the next one watched
    assert not any(seen[2:4] + seen[5:])


def test_passes_that_save_nothing_in_few_bits_are_watched_a_few_times() -> None:
    found = list[bool]()

    def classify(x: Tensor) -> Tensor:
        found.append(watched())
        return F.cross_entropy(net.last(x.tanh()), integers(4, len(x)))

    net = Net(classify)
    net.last = nn.Linear(WIDTH, 4)
    engine = engine_for(net, 4)
    for _ in range(BARREN_PASSES + 3):
        step(net, engine, X[:2])
    assert found == [True] * BARREN_PASSES + [False] * 3
    unwatched, _, known = (step(net, engine) for _ in range(3))
    assert found[-3:] == [False, True, False]
    first = step(net, engine_for(net, 4))
    assert_same(known, first)  # the input of the last layer takes more bits, which the watch alone finds
    assert error(unwatched, first) > 0


def test_other_treatments_are_watched_from_their_first_pass() -> None:
    found = list[bool]()
    net = Net(lambda x: (found.append(watched()), x.sin().mean())[1])
    engine = engine_for(net, 4)
    for _ in range(BARREN_PASSES + 1):
        step(net, engine, X[:2])
    engine.treat(Treatments({"layer": True}))
    step(net, engine)
    assert found[-2:] == [False, True]
    for _ in range(BARREN_PASSES):
        step(net, engine, X[:2])
        engine.treat(Treatments({"layer": True}))  # as before
    assert not engine._readers.learning


def test_passes_without_a_gradient_tell_nothing() -> None:
    """Evaluations before training: its first pass is watched as that of a new engine is."""
    net = Net(lambda x: F.cosine_similarity(x, x.roll(1, 0)).square().sum())
    engine = engine_for(net, 4)
    for _ in range(BARREN_PASSES + 1):
        with torch.no_grad(), engine.compress():
            net(X)
    assert_same(step(net, engine), step(net, engine_for(net, 4)))


def test_exact_engines_watch_nothing() -> None:
    seen: list[bool] = []
    net = Net(lambda x: (seen.append(watched()), x.sin().mean())[1])
    step(net, engine_for(net, "exact"))
    assert seen == [False]


class Changing(nn.Module):
    """Calls another operator at the same place in each pass."""

    def __init__(self, *heads: Head) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = list(heads)
        self.head = heads[0]

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.layer(x)) * WEIGHTS).sum()


WEIGHTS = normal(ROWS, WIDTH, seed=7).view(ROWS, WIDTH)


def _named(name: str, **options: Any) -> Head:
    return lambda x: getattr(x, name)(**options)


CHANGES: dict[str, tuple[Head, Head]] = {
    "exact": (_named("sin"), _named("amax", dim=1, keepdim=True)),
    "approximate": (_named("amax", dim=1, keepdim=True), _named("sin")),
    "alike": (_named("sin"), _named("cos")),
    "sides": (_named("sin"), _named("clamp", min=0)),
    "no sides": (_named("clamp", min=0), _named("sin")),
    "other bounds": (_named("clamp", min=0), _named("clamp", min=0.5)),
    "no bounds": (_named("clamp", min=0), _named("clamp", min=-torch.inf)),
    "logits": (_named("sin"), _named("logsumexp", dim=1, keepdim=True)),
    "pole": (_named("sin"), _named("logcumsumexp", dim=1)),
    "sums": (_named("square"), _named("cumprod", dim=1)),
}


@pytest.mark.parametrize("first_passes", [1, 3])
@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES)
def test_another_reader_at_the_same_place_gets_no_wrong_values(before: Head, after: Head, first_passes: int) -> None:
    net = Changing(before, after)
    engine = engine_for(net, 4)
    for _ in range(first_passes):
        step(net, engine)
    net.head = after
    exact = plain(net)
    try:
        assert error(step(net, engine), exact) < 0.3
    except ReaderError as refused:
        assert "run the step again, or set precision to 'exact'" in str(refused)  # noqa: PT017 it may be right instead
    net.zero_grad()
    gc.collect()
    assert_empty(engine)
    for _ in range(2):
        assert error(step(net, engine), exact) < 0.3
    net.head = before
    exact = plain(net)
    with suppress(ReaderError):
        assert error(step(net, engine), exact) < 0.3


def test_few_bits_are_refused_to_who_needs_values() -> None:
    net = Changing(*CHANGES["exact"])
    engine = engine_for(net, 4)
    step(net, engine)
    net.head = net.calls[1]
    with pytest.raises(ReaderError, match=r"AmaxBackward0 asks for .* SinBackward0 had read it until now"):
        step(net, engine)


def _count_waiting(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Records what waits from now on."""
    wait, seen = Readers.wait, list[object]()

    def record(readers: Readers, *arguments: Any) -> None:
        seen.append(arguments[1])
        wait(readers, *arguments)

    monkeypatch.setattr(Readers, "wait", record)
    return seen


def test_what_nobody_reads_is_not_looked_for_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    def head(x: Tensor) -> Tensor:
        (x * 2).sin()  # its graph is gone before anyone can see it
        return x.sum()

    monkeypatch.setattr(learning, "Watch", Blind)
    waiting = _count_waiting(monkeypatch)
    net = Net(head)
    engine = engine_for(net, 4)
    found: list[int] = []
    for _ in range(UNREAD_PASSES + 2):
        before = len(waiting)
        step(net, engine)
        found.append(len(waiting) - before)
        stored = engine.finish_step().stored_as
    assert found[UNREAD_PASSES - 1] > 0
    assert found[UNREAD_PASSES:] == [0, 0]
    assert stored  # pyright: ignore[reportPossiblyUnboundVariable]


@pytest.mark.parametrize("function", [torch.corrcoef, torch.cov, lambda x: F.cosine_similarity(x[::2], x[1::2])])
def test_functions_whose_terms_cancel_are_read_exactly(function: Callable[[Tensor], Tensor]) -> None:
    """From the first pass on, and no longer than they run."""
    model = nn.Linear(256, 64, bias=False)
    engine, found = engine_for(model, 2), list[Tensor]()
    for scope in (nullcontext(), engine.compress(), engine.compress()):
        model.weight.grad = None
        with scope:
            function(model.weight * 2).sum().backward()
        assert model.weight.grad is not None
        found.append(model.weight.grad)
    assert_same(found[1:], [found[0]] * 2)
    with engine.compress():
        loss = (model(normal(64, 256)).tanh() @ normal(64, 64)).sum()
    loss.backward()
    assert engine.finish_step().stored_as["planes"] > 0
