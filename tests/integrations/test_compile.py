"""Models that are compiled: the same numbers and graphs as without DAF, and the memory that it saves there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch._dynamo.utils import counters

import daf_integrations as daf
from daf_core import ActivationEngine, AuditError, ConfigError, DAFConfig, StepStatistics
from daf_core.saved_tensors.hooks import Packer
from daf_integrations import DAFCallback
from daf_integrations.loop import training
from tests.integrations.hf_runs import (
    MakeTrainer,
    daf_records,
    differing,
    last_step,
    losses,
    roberta,
    run,
    weights,
)
from tests.integrations.lightning_runs import Classifier, fit, strategy_of
from tests.integrations.lightning_runs import weights as weights_of_module
from tests.integrations.loop_runs import adam, train, weights_of
from tests.integrations.small_net import LABELS, WIDTH, loader

# Dynamo looks at the gradient of whatever it meets.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    # Inductor imports what is deprecated.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]

QUICK = "aot_eager"
"""A backend that makes no machine code: what autograd saves, and when it reads it, is as with others."""

Compile = Callable[[nn.Module], nn.Module]


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """Forgets what other tests have counted, and this one's models."""
    counters.clear()
    yield
    training._trainings.clear()
    training._exit_summaries.clear()


class Block(nn.Module):
    """An encoder layer; those of torch.nn are left out by torch.compile where they are compiled by themselves."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        heads = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(self.norm(inputs)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        inputs = inputs + self.dropout(self.out(mixed))
        return inputs + self.dropout(self.mlp(inputs))


class Net(nn.Module):
    """Two blocks, which compile for seconds each, or so many; computes its own loss."""

    def __init__(self, dropout: float = 0.1, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        inputs = self.first(inputs)  # with it, all blocks have inputs that require a gradient, and one graph
        for block in self.blocks:
            inputs = block(inputs)
        return {"loss": nn.functional.cross_entropy(self.head(inputs.mean(1)), labels)}


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend=QUICK)


def by_block(model: nn.Module) -> nn.Module:
    blocks = model.blocks if isinstance(model, Net) else model.roberta.encoder.layer
    for block in blocks:
        block.compile(backend=QUICK)
    return model


def losses_of(model: nn.Module, steps: int) -> list[float]:
    """Trains a small net and returns the losses."""
    optimizer, found = adam(model), []
    torch.manual_seed(0)
    for batch in loader(steps):
        loss = loss_of(model.train(), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch)["loss"]


def last_of(model: nn.Module) -> StepStatistics:
    found = training.training_of(model)
    assert found is not None
    assert found.session.last_step is not None
    return found.session.last_step


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def gradient(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the gradient for all parameters, with the same dropout at every call."""
    torch.manual_seed(3)
    loss_of(model, batch).backward()
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    model.zero_grad()
    return found


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("compile_model", [whole, by_block])
class TestPlainLoop:
    def test_exact_mode_changes_no_bit_and_compiles_nothing_more(self, compile_model: Compile) -> None:
        plain = compile_model(Net())
        expected, made = losses_of(plain, 3), graphs()
        torch.compiler.reset()
        counters.clear()
        compressed = daf.prepare(compile_model(Net()), precision="exact")
        assert losses_of(compressed, 3) == expected
        assert differing(weights_of(plain), weights_of(compressed)) == []
        assert graphs() == made
        assert not counters["graph_break"]

    def test_four_bits_have_the_error_that_they_have_without(self, compile_model: Compile) -> None:
        [batch] = loader(1)
        errors = []
        for prepare in (lambda model: model, compile_model):
            model = prepare(Net(dropout=0.0).train())
            exact = gradient(model, batch)
            daf.prepare(model, precision=4, audit_every=None)
            errors.append(error(gradient(model, batch), exact))
        assert 0 < errors[1] < 1.5 * errors[0]

    def test_four_bits_hold_a_quarter_at_most(self, compile_model: Compile) -> None:
        model = daf.prepare(compile_model(Net()), precision=4, audit_every=None)
        losses_of(model, 2)
        assert last_of(model).ratio > 4
        assert last_of(model).raw_bytes > 1_000_000

    def test_what_is_stored_repeats(self, compile_model: Compile) -> None:
        model, [batch] = compile_model(Net().train()), loader(1)
        engine = ActivationEngine(model, DAFConfig(precision=4))
        found = []
        for _ in range(3):
            with engine.compress():
                loss_of(model, batch).backward()
            found.append(engine.finish_step().stored_as)
        assert found[0] == found[1] == found[2]
        assert found[0]["planes"] > 10


class Wrapper(nn.Module):
    """Holds a model, and is what is compiled."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        found = self.model(**batch)
        return {"loss": found["loss"] * 1}


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=QUICK)
    return model


def around(model: nn.Module) -> nn.Module:
    return whole(Wrapper(model))


@pytest.mark.parametrize("compile_model", [whole, in_place, around])
class TestCompiledAfterwards:
    """Models that are prepared first: torch.compile compiles their own forward, and nothing of DAF."""

    def test_exact_mode_changes_no_bit(self, compile_model: Compile) -> None:
        plain, prepared = Net(), daf.prepare(Net(), precision="exact")
        expected = losses_of(compile_model(plain), 3)
        torch.compiler.reset()
        assert losses_of(compile_model(prepared), 3) == expected
        assert differing(weights_of(plain), weights_of(prepared)) == []
        assert last_of(prepared).raw_bytes > 1_000_000

    def test_graphs_are_those_of_the_model(self, compile_model: Compile) -> None:
        prepared = daf.prepare(Net(), precision=4, audit_every=None)
        losses_of(compile_model(prepared), 2)
        assert graphs() == (2 if compile_model is around else 1)  # what comes after the model is a graph of its own
        found = last_of(prepared)
        assert found.ratio > 4
        assert found.stored_as["planes"] > 10

    def test_what_cannot_be_measured_is_refused(self, compile_model: Compile) -> None:
        [batch] = loader(1)
        bounded = daf.prepare(Net().train(), precision="auto", max_gradient_error=0.1)
        with pytest.raises(AuditError, match="runs backward once"):
            loss_of(compile_model(bounded), batch)
        planned = daf.prepare(Net().train(), memory_budget="100MB")
        with pytest.raises(ConfigError, match="runs backward once"):
            loss_of(compile_model(planned), batch)

    def test_evaluations_are_compiled(self, compile_model: Compile) -> None:
        prepared = daf.prepare(Net().eval(), precision=4, audit_every=None)
        [batch] = loader(1)
        expected = loss_of(prepared, batch)
        with torch.no_grad():
            assert torch.allclose(loss_of(compile_model(prepared).eval(), batch), expected)
        assert graphs() > 0


def test_other_sizes_of_batches_are_stored_as_well() -> None:
    """Torch then makes a graph for all sizes, which saves their numbers, too."""
    plain, compressed = whole(Net(blocks=1)), daf.prepare(whole(Net(blocks=1)), precision="exact")
    [batch] = loader(1)
    for rows in (8, 6, 5):
        part = {name: values[:rows] for name, values in batch.items()}
        assert torch.equal(gradient(compressed.train(), part), gradient(plain.train(), part))


def test_sizes_may_all_be_unknown_while_a_graph_is_compiled() -> None:
    def any_size(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend=QUICK, dynamic=True)

    plain, compressed = (
        any_size(Net(dropout=0.0, blocks=1)),
        daf.prepare(any_size(Net(dropout=0.0, blocks=1)), precision=4),
    )
    batches = [
        {name: values[:rows] for name, values in batch.items()} for rows, batch in zip((8, 5), loader(2), strict=True)
    ]
    for batch in batches:
        exact = gradient(plain.train(), batch)
        assert 0 < error(gradient(compressed.train(), batch), exact) < 0.3
    fixed = daf.prepare(whole(Net(dropout=0.0, blocks=1)), precision=4)
    held = []
    for model in (compressed, fixed):
        optimizer = adam(model)
        loss_of(model.train(), batches[0]).backward()
        optimizer.step()
        held.append(last_of(model).held_bytes)
    assert held[0] == pytest.approx(held[1], rel=0.1)


def test_machine_code_reads_what_is_unpacked() -> None:
    """Inductor checks strides, and writes into what it has read for the last time."""
    torch.manual_seed(0)
    net, inputs = Block(dropout=0.1), torch.randn(8, 32, WIDTH)
    compiled = torch.compile(net)

    def found() -> Tensor:
        torch.manual_seed(1)
        compiled(inputs).square().mean().backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
        net.zero_grad()
        return gradients

    exact, passes = found(), {}
    for precision in ("exact", 4):
        engine = ActivationEngine(net, DAFConfig(precision=precision))
        for _ in range(2):  # what is computed last stays exact in a first pass that cannot be watched
            with engine.compress():
                torch.manual_seed(1)
                loss = compiled(inputs).square().mean()
            loss.backward()
            passes[precision] = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
            net.zero_grad()
            ratio = engine.finish_step().ratio
        engine.close()
    assert torch.equal(passes["exact"], exact)
    assert 0 < error(passes[4], exact) < 0.1
    assert ratio > 4


class TestInsideOfGraphs:
    """What a graph saves is stored and restored inside of it: no hook runs."""

    @pytest.mark.parametrize("compiled", [whole, by_block])
    def test_no_tensor_of_a_graph_is_unpacked_outside(self, compiled: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
        model, [batch] = daf.prepare(compiled(Net().train()), precision=4, audit_every=None), loader(1)
        unpack, readers = Packer.unpack, []

        def seen(self: Packer, packed: Any) -> Tensor:
            readers.append(torch._C._current_autograd_node().name())
            return unpack(self, packed)

        monkeypatch.setattr(Packer, "unpack", seen)
        loss_of(model, batch).backward()
        assert "CompiledFunctionBackward" not in readers

    @pytest.mark.parametrize(("precision", "said"), [(4, 0), ("exact", 1)])
    def test_a_peak_that_stays_is_said(self, precision: Any, said: int, caplog: pytest.LogCaptureFixture) -> None:
        losses_of(daf.prepare(whole(Net(blocks=1)), precision=precision, audit_every=None), 2)
        found = [record.message for record in daf_records(caplog) if "peak of the step stays" in record.message]
        assert len(found) == said
        assert all("100%" in message for message in found)

    def test_a_model_half_compiled_has_one_account(self) -> None:
        model = Net().train()
        model.blocks[0].compile(backend=QUICK)
        daf.prepare(model, precision=4, audit_every=None)
        losses_of(model, 2)
        step = last_of(model)
        # A result and its sums in the graph, and a result beside it, as in each alone.
        assert step.stored_as["attended"] == 3
        assert step.stored_as["planes"] > 8  # in both
        assert step.held_bytes < step.raw_bytes / 1.5

    def test_nothing_is_held_after_a_step(self) -> None:
        model, [batch] = daf.prepare(whole(Net(blocks=1).train()), precision=4, audit_every=None), loader(1)
        found = training.training_of(model)
        assert found is not None
        engine = found.session._engine
        assert engine is not None
        loss = loss_of(model, batch)
        assert engine.held_bytes > 100_000
        loss.backward()
        assert engine.held_bytes == 0

    def test_a_graph_gets_fewer_bits_where_the_budget_is_small(self) -> None:
        held = {}
        for budget in (None, 200_000):
            torch.compiler.reset()
            limit = {} if budget is None else {"memory_budget": budget, "budget_covers": "activations"}
            model = daf.prepare(whole(Net().train()), precision=4, audit_every=None, **limit)
            losses_of(model, 1)
            held[budget] = last_of(model).held_bytes
        assert held[200_000] <= 200_000 < held[None]

    def test_a_budget_that_no_bits_keep_is_refused(self) -> None:
        model = daf.prepare(whole(Net()), precision=4, memory_budget=20_000, budget_covers="activations")
        with pytest.raises(Exception, match="memory_budget allows"):
            losses_of(model, 1)

    def test_lengths_that_vary_have_few_graphs_compiled(self) -> None:
        model = daf.prepare(whole(Net().train()), precision=4, audit_every=None)
        [batch] = loader(1)
        for rows in (8, 7, 6, 5, 8, 4, 3, 7):
            part = {name: values[:rows] for name, values in batch.items()}
            raw = loss_of(model, part)
            raw.backward()
        assert graphs() <= 2

    def test_gradients_add_up_over_passes(self) -> None:
        model, [batch] = whole(Net(dropout=0.0, blocks=1).train()), loader(1)
        exact = gradient(model, batch)
        daf.prepare(model, precision=4, audit_every=None)
        first, second = loss_of(model, batch), loss_of(model, batch)  # both held at once
        (first + second).backward()
        found = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        assert error(found / 2, exact) < 0.1

    def test_autocast_is_stored_as_well(self) -> None:
        model, [batch] = whole(Net(dropout=0.0, blocks=1).train()), loader(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            exact = gradient(model, batch)
            daf.prepare(model, precision=4, audit_every=None)
            assert 0 < error(gradient(model, batch), exact) < 0.1


class TestAudits:
    def test_are_said_not_to_run(self, caplog: pytest.LogCaptureFixture) -> None:
        model = daf.prepare(by_block(Net()))
        losses_of(model, 4)
        # The first run of all compiles kernels, perhaps now, and says so.
        warnings = [record for record in daf_records(caplog) if record.levelno >= logging.WARNING]
        [warning] = [record for record in warnings if "CPU kernels" not in record.message]
        assert "a graph of torch.compile runs backward once" in warning.message
        assert last_of(model).gradient_error is None

    def test_a_bound_that_cannot_be_kept_is_refused(self) -> None:
        with pytest.raises(AuditError, match=r"torch\.compile .*max_gradient_error cannot be kept"):
            losses_of(daf.prepare(whole(Net()), max_gradient_error=0.1), 1)

    def test_a_function_that_is_compiled_is_found_by_its_graph(self, caplog: pytest.LogCaptureFixture) -> None:
        class Inside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(64))
                self.function = torch.compile(lambda inputs, weight: (inputs * weight).exp().mean(), backend=QUICK)

            def forward(self, inputs: Tensor) -> Tensor:
                return self.function(inputs, self.weight)

        model = daf.prepare(Inside())
        model(torch.randn(128, 64)).backward()
        assert any("a graph of torch.compile runs backward once" in record.message for record in daf_records(caplog))


class TestTrainers:
    def test_trainer(self, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
        options = {"torch_compile": True, "torch_compile_backend": QUICK}
        runs = {}
        for precision in (None, "exact", 4):
            torch.compiler.reset()
            counters.clear()
            callbacks = [] if precision is None else [DAFCallback(precision=precision, audit_every=None)]
            trainer = make_trainer(*callbacks, model=roberta(), **options)
            run(trainer)
            runs[precision] = trainer, callbacks, graphs()
        plain, exact, four = (runs[precision][0] for precision in (None, "exact", 4))
        assert [made for _, _, made in runs.values()] == 3 * [runs[None][2]]
        assert losses(exact) == losses(plain)
        assert differing(weights(exact), weights(plain)) == []
        assert losses(four) == pytest.approx(losses(plain), rel=0.02)
        assert last_step(runs[4][1][0]).ratio > 4

    def test_lightning(self, tmp_path: Path) -> None:
        """Of a LightningModule the net inside is compiled: the module itself fails in its `log`, without DAF, too."""
        modules = [Classifier(by_block(roberta())) for _ in range(2)]
        fit(tmp_path, modules[0])
        strategy = strategy_of("lightning.pytorch")(precision="exact")
        fit(tmp_path, modules[1], strategy=strategy)
        assert modules[1].losses == modules[0].losses
        assert differing(weights_of_module(modules[1]), weights_of_module(modules[0])) == []
        assert strategy.last_step.raw_bytes > 3_000_000

    def test_accelerate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = Accelerator(cpu=True, dynamo_backend=QUICK).prepare(roberta())
        expected = train(plain, 3)
        monkeypatch.setenv("ACCELERATE_USE_DAF", "1")
        monkeypatch.setenv("ACCELERATE_DAF_CONFIG", '{"precision": "exact"}')
        model = Accelerator(cpu=True, dynamo_backend=QUICK).prepare(roberta())
        daf.prepare(model, precision="exact")
        assert train(model, 3) == expected
        assert last_of(model).raw_bytes > 3_000_000
