"""Steps that a CUDA graph captures; without a GPU a graph is pretended, which forbids what a capture forbids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig, GraphCaptureError
from daf_core.codecs.common_row import EVERY
from daf_core.saved_tensors import backends, derive, elementwise
from daf_core.saved_tensors.lossy import TrainingStore
from daf_kernels.triton import backend as triton_backend
from daf_kernels.triton.backend import TritonBackend
from tests.core.harness import normal
from tests.kernels.pretended_gpu import PretendedGpu, PretendedGraph, pretend

WARM_STEPS = 4
SHAPE = 128, 64
needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels do not run on tensors of the CPU here")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class Net(nn.Module):
    """Saves floats, an attention's inputs, a mask of bools, what a GELU and a ReLU read, and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(64), nn.Linear(64, 64)
        self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 32)
        self.exponent, self.masks = 2.0, False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(F.gelu(self.first(self.norm(x))))
        heads = hidden.view(2, -1, 4, 16).transpose(1, 2)
        mask = torch.ones(64, 64, dtype=torch.bool, device=x.device) if self.masks else None
        attended = F.scaled_dot_product_attention(heads, heads, heads, mask)
        kept = torch.where(x > 0, attended.transpose(1, 2).reshape_as(hidden), hidden)
        order = torch.arange(x.numel(), device=x.device).flip(0)
        return self.third(F.relu(kept).flatten()[order].view_as(x)).pow(self.exponent).mean()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    """A pretended GPU, whose floats are neither looked at nor compared."""
    for module in (derive, elementwise):
        monkeypatch.setattr(module, "COMPARABLE", ())
    kernels = TritonBackend()
    monkeypatch.setattr(backends, "load_backend", lambda *_: kernels)
    monkeypatch.setattr(triton_backend, "INTERPRETED", SimpleNamespace(value=False))
    return pretend(monkeypatch)


def step(model: nn.Module, engine: ActivationEngine, x: Tensor) -> list[Tensor]:
    """Takes a training step and returns its gradients."""
    model.zero_grad()
    with engine.compress():
        loss = model(x)
    loss.backward()
    engine.finish_step()
    return gradients(model)


def gradients(model: nn.Module) -> list[Tensor]:
    """Returns copies of a model's gradients."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def without(model: nn.Module, engine: ActivationEngine) -> list[Tensor]:
    """Returns the gradients of a plain step with batch 0; the engine is closed."""
    engine.close()
    model.zero_grad()
    model(normal(*SHAPE)).backward()
    return gradients(model)


def warmed(
    model: nn.Module, steps: int = WARM_STEPS, device: str = "cpu", **options: Any
) -> tuple[ActivationEngine, list[Tensor]]:
    """Returns an engine after some steps of a model, and the gradients of the last one, of batch 0."""
    options = {"precision": 4, "packing": "device", "audit_every": None, **options}
    engine, found = ActivationEngine(model, DAFConfig(**options)), []
    for number in reversed(range(steps)):
        found = step(model, engine, normal(*SHAPE, seed=number).to(device))
    model.zero_grad()
    return engine, found


def seeded() -> Net:
    """Returns a model, the same every time."""
    torch.manual_seed(0)
    return Net()


def errors_beside(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Returns the errors of gradients beside others."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Says whether gradients are the same, bit by bit."""
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def captured(
    model: nn.Module, engine: ActivationEngine, graph: PretendedGraph, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, int]:
    """Captures a step; returns the tensor that it reads, and what activations hold between forward and backward."""
    static = normal(*SHAPE, seed=50)
    with graph.capturing(monkeypatch):
        with engine.compress(), engine.compress():
            loss = model(static)
        held = engine.held_bytes
        loss.backward()
    return static, held


def run_again(model: nn.Module, graph: PretendedGraph, static: Tensor, batch: Tensor) -> list[Tensor]:
    """Runs a captured step with a batch and returns its gradients."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    static.copy_(batch)
    graph.replay()
    return gradients(model)


@needs_none
@pytest.mark.parametrize(("precision", "slopes"), [(4, False), (4, True), ("exact", False)])
def test_a_step_runs_again(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, precision: object, slopes: bool) -> None:
    """Its gradients are those of steps that are not captured, and nothing else gets its memory between two runs."""
    if slopes:  # as a calibration may choose
        monkeypatch.setattr(TrainingStore, "codec", lambda _, site: "slopes" if site.op == "AddmmBackward0" else None)
    model = seeded()
    engine, _ = warmed(model, precision=precision)
    batches = [normal(*SHAPE, seed=100 + number) for number in range(2)]
    expected = [step(model, engine, batch) for batch in batches]
    with engine.compress():
        model(batches[0]).backward()
    eager = Counter(engine.finish_step().stored_as)
    model.zero_grad()
    graph = PretendedGraph(gpu)
    static, held = captured(model, engine, graph, monkeypatch)
    statistics = engine.finish_step()
    assert engine.held_bytes == 0
    assert statistics.held_bytes == held
    assert Counter(statistics.stored_as) == eager + Counter(raw=1) - Counter(narrow_int=1)  # indices, which need a look
    assert ("slopes" in statistics.stored_as) is slopes
    for batch, gradient in zip(batches, expected, strict=True):
        with engine.compress():
            other = model(batch * 3)  # holds pages while the graph runs
        assert same(run_again(model, graph, static, batch), gradient)
        other.backward()
    assert same(step(model, engine, batches[0]), expected[0])  # what was captured has changed nothing


class Narrow(nn.Module):
    """Saves rows that share scaling groups, and what a dropout makes of probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 16), nn.LayerNorm(16), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(self.first(x).repeat(4, 1))
        return self.last(F.dropout(rows.softmax(-1), 0.3)).square().mean()


@needs_none
@pytest.mark.parametrize("precision", [4, "exact"])
def test_nothing_is_compared(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, precision: object) -> None:
    """Neither rows with each other, nor a tensor with what it follows from, nor what rows share is looked for anew."""
    torch.manual_seed(0)
    model = Narrow()
    engine, _ = warmed(model, precision=precision)
    store = engine._packer.replayed_by
    assert store is not None
    store.common_rows.passes += EVERY
    graph = PretendedGraph(gpu)
    static, _ = captured(model, engine, graph, monkeypatch)
    engine.finish_step()
    torch.manual_seed(1)
    found = run_again(model, graph, static, normal(*SHAPE))
    torch.manual_seed(1)
    eager = step(model, engine, normal(*SHAPE))
    torch.manual_seed(1)
    plain = without(model, engine)
    assert max(errors_beside(found, plain)) <= 1.05 * max(errors_beside(eager, plain))


class Power(nn.Module):
    """Saves what a power reads, of an exponent that may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.exponent = nn.Linear(64, 64), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).abs() + 1e-5).pow(self.exponent).sigmoid().mean()


@needs_none
def test_another_exponent_is_noticed(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a square takes in few bits, a root with its pole does not."""
    torch.manual_seed(0)
    model = Power()
    engine, _ = warmed(model)
    model.exponent = 0.1
    graph = PretendedGraph(gpu)
    static, _ = captured(model, engine, graph, monkeypatch)
    assert engine.finish_step().stored_as["raw"] == 2  # also what the absolute value has saved
    assert same(run_again(model, graph, static, normal(*SHAPE)), step(model, engine, normal(*SHAPE)))


@needs_none
def test_what_is_not_finite_is_seen_in_the_gradients(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at a flag: a gradient scaler has to find out from the gradients."""
    model = seeded()
    engine, _ = warmed(model)
    graph = PretendedGraph(gpu)
    static, _ = captured(model, engine, graph, monkeypatch)
    batch = normal(*SHAPE)
    batch[3, 5] = torch.inf
    assert not all(gradient.isfinite().all() for gradient in run_again(model, graph, static, batch))
    assert all(gradient.isfinite().all() for gradient in run_again(model, graph, static, normal(*SHAPE)))


@needs_none
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budget": 10**9, "budget_covers": "activations"}, "memory_budget=.* gives up bits.*leave it out"),
        ({"elastic": {"time": 0.6}}, "elastic training chooses in each step.*leave elastic out"),
        ({"rounding": "stochastic"}, 'rounding=.stochastic. takes other.*set "nearest"'),
        ({"packing": "workers"}, 'packing="workers".*set "device"'),
        ({}, "does not know yet who reads.*train some five steps first"),
    ],
    ids=["budget", "elastic", "stochastic", "workers", "too early"],
)  # fmt: skip
def test_what_changes_from_pass_to_pass_is_refused(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    model = seeded()
    engine, _ = warmed(model, steps=1, **options)
    with pytest.raises(GraphCaptureError, match=message):
        captured(model, engine, PretendedGraph(gpu), monkeypatch)
    assert step(model, engine, normal(*SHAPE))


@needs_none
def test_a_model_with_compiled_parts_is_refused(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded()
    engine, _ = warmed(model)
    model.first.compile(backend="eager")
    with pytest.raises(GraphCaptureError, match=r'parts of the model are compiled.*mode="reduce-overhead"'):
        captured(model, engine, PretendedGraph(gpu), monkeypatch)


@needs_none
def test_what_no_step_has_saved_stays(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says how much that is; masks that transformers makes in a capture alone change nothing else."""
    model = seeded()
    engine, _ = warmed(model)
    monkeypatch.setattr(F, "relu", torch.tanh)
    model.masks = True
    graph = PretendedGraph(gpu)
    static, _ = captured(model, engine, graph, monkeypatch)
    stored = engine.finish_step().stored_as
    assert (stored["attended"], stored["planes"]) == (1, 4)
    assert "3 tensors (0.1 MB) stay as they are: no step before has saved them" in caplog.text
    found, eager = run_again(model, graph, static, normal(*SHAPE)), step(model, engine, normal(*SHAPE))
    plain = without(model, engine)
    assert max(errors_beside(found, plain)) < 1.1 * max(errors_beside(eager, plain))


class Bounded(nn.Module):
    """Saves on which side of a bound values lie."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.hardsigmoid(F.leaky_relu(self.layer(x), 0.1).clamp(-0.5, 0.5)).square().mean()


@needs_none
def test_sides_of_bounds_are_not_looked_at(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Bounded()
    engine, expected = warmed(model)
    graph = PretendedGraph(gpu)
    static, _ = captured(model, engine, graph, monkeypatch)
    assert engine.finish_step().stored_as["sides"] == 3
    assert same(run_again(model, graph, static, normal(*SHAPE)), expected)


@needs_none
def test_what_an_attention_with_dropout_saves_stays(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """To run again, it would need numbers that the host reads. A CPU's attention draws none, so it is pretended."""
    model = seeded()
    engine, _ = warmed(model)
    monkeypatch.setattr("daf_core.saved_tensors.graph_capture.dropout_of", lambda _: 0.1)
    graph = PretendedGraph(gpu)
    static, _ = captured(model, engine, graph, monkeypatch)
    statistics = engine.finish_step()
    assert "attended" not in statistics.stored_as
    found, eager = run_again(model, graph, static, normal(*SHAPE)), step(model, engine, normal(*SHAPE))
    plain = without(model, engine)
    assert max(errors_beside(found, plain)) < max(errors_beside(eager, plain))


@needs_none
def test_no_audit_is_due_in_a_capture(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded()
    engine, _ = warmed(model, audit_every=1)
    assert engine.audit_due
    with PretendedGraph(gpu).capturing(monkeypatch):
        assert not engine.audit_due
        with pytest.raises(GraphCaptureError, match="kernels for the model are not loaded yet"):
            ActivationEngine(seeded())


@needs_gpu
@pytest.mark.parametrize("precision", [4, "exact"])
def test_a_graph_of_a_gpu_runs_a_step_again(precision: object) -> None:
    """Forward and backward in one graph."""
    model = seeded().to("cuda")
    engine, expected = warmed(model, device="cuda", precision=precision)
    static, graph = normal(*SHAPE, seed=50).to("cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with engine.compress():
            loss = model(static)
        loss.backward()
    engine.finish_step()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    static.copy_(normal(*SHAPE))
    graph.replay()
    assert max(errors_beside(gradients(model), expected)) < 1e-4


@needs_gpu
def test_a_graphed_callable_of_a_gpu_trains() -> None:
    """`torch.cuda.make_graphed_callables` captures forward and backward in graphs of their own."""
    model = seeded().to("cuda")
    engine, expected = warmed(model, device="cuda")

    class Compressed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            with engine.compress():
                return self.model(x)

    graphed: Any = torch.cuda.make_graphed_callables(Compressed(), (normal(*SHAPE, seed=50).to("cuda"),))
    model.zero_grad()
    graphed(normal(*SHAPE).to("cuda")).backward()
    assert max(errors_beside(gradients(model), expected)) < 1e-4
