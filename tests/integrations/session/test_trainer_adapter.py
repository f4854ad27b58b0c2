"""What DAF promises in every trainer, checked in each of them, and in the shortest trainer that keeps the contract."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import lightning
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from transformers import Trainer, TrainingArguments

import daf_integrations as daf
from daf_core import DAFConfig, ModelError
from daf_core.autograd.torch_private import innermost_hooks
from daf_integrations import DAFCallback, DAFStrategy
from daf_integrations.accelerate.plugin import install
from daf_integrations.loop import training
from daf_integrations.loop.training import Training, training_of
from daf_integrations.session.session import DAFSession
from tests.integrations.elastic_runs import BLOCKS, ELASTIC, STEPS, classifier, count_time, trained
from tests.integrations.hf_runs import QUICK, differing, raise_at_pass, rows_for
from tests.integrations.lightning_runs import Classifier, loader, trainer_for
from tests.integrations.loop_runs import adam, batches, own_loss, weights_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:You're resuming from a checkpoint", "ignore:Be aware that when using"
)
FEW = 3
"""Optimizer steps of most runs."""


class TrainerAdapter(Protocol):
    """One training of a model, as a trainer runs it; without DAF where there are no options."""

    def __init__(self, model: nn.Module, folder: Path, options: dict[str, Any] | None, accumulation: int = 1) -> None:
        self.model = model

    @property
    def session(self) -> DAFSession: ...

    def train(self, start: int, stop: int, saved: Any = None) -> Any:
        """Trains from one optimizer step to another, evaluates after each, and returns a checkpoint."""

    def end(self) -> None:
        """Ends the training, where the trainer does not."""


class HuggingFace(TrainerAdapter):
    def __init__(self, model: nn.Module, folder: Path, options: dict[str, Any] | None, accumulation: int = 1) -> None:
        self.model, self._folder, self._accumulation = model, folder, accumulation
        self._callbacks = [] if options is None else [DAFCallback(**options)]

    @property
    def session(self) -> DAFSession:
        return self._callbacks[0]._session

    def train(self, start: int, stop: int, saved: Any = None) -> Any:
        arguments: dict[str, Any] = {
            **QUICK,
            "output_dir": str(self._folder),
            "max_steps": stop,
            "gradient_accumulation_steps": self._accumulation,
            "lr_scheduler_type": "constant",
            **{"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": stop},
        }
        rows: Any = rows_for(self.model)
        callbacks: Any = self._callbacks
        trainer = Trainer(
            self.model, TrainingArguments(**arguments), train_dataset=rows, eval_dataset=rows[:8], callbacks=callbacks
        )
        torch.manual_seed(0)
        trainer.train(resume_from_checkpoint=saved)
        return str(self._folder / f"checkpoint-{stop}")

    def end(self) -> None: ...


class Lightning(TrainerAdapter):
    def __init__(self, model: nn.Module, folder: Path, options: dict[str, Any] | None, accumulation: int = 1) -> None:
        self.model, self._folder, self._accumulation = model, folder, accumulation
        self._strategy: Any = "auto" if options is None else DAFStrategy(**options)

    @property
    def session(self) -> DAFSession:
        return self._strategy._daf_session

    def train(self, start: int, stop: int, saved: Any = None) -> Any:
        trainer = trainer_for(
            self._folder,
            strategy=self._strategy,
            max_steps=stop,
            accumulate_grad_batches=self._accumulation,
            **{"val_check_interval": self._accumulation, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0},
        )
        torch.manual_seed(0)
        trainer.fit(Classifier(self.model), loader(self.model), loader(self.model, count=8), ckpt_path=saved)
        trainer.save_checkpoint(self._folder / "last.ckpt")
        return str(self._folder / "last.ckpt")

    def end(self) -> None: ...


class OwnLoop(TrainerAdapter):
    def __init__(self, model: nn.Module, folder: Path, options: dict[str, Any] | None, accumulation: int = 1) -> None:
        self.model, self._accumulation = model, accumulation
        self._called, self._optimizer = self._prepared(adam(model), options)

    def _prepared(self, optimizer: Any, options: dict[str, Any] | None) -> tuple[Any, Any]:
        return self.model if options is None else daf.prepare(self.model, **options), optimizer

    def _run(self, batch: Any) -> None:
        (own_loss(self._called, batch) / self._accumulation).backward()

    @property
    def session(self) -> DAFSession:
        return self._training.session

    @property
    def _training(self) -> Training:
        found = training_of(self.model)
        assert found is not None
        return found

    def train(self, start: int, stop: int, saved: Any = None) -> Any:
        torch.manual_seed(0)
        if saved is not None:
            daf.load_state_dict(self.model, saved)
        for number, batch in enumerate(batches(self.model, stop * self._accumulation), 1):
            if number <= start * self._accumulation:
                continue
            self._called.train()
            self._run(batch)
            if number % self._accumulation == 0:
                self._optimizer.step()
                self._optimizer.zero_grad()
                self._called.eval()
                with torch.no_grad():
                    own_loss(self._called, batch)
        return daf.state_dict(self.model)

    def end(self) -> None:
        self._training.stop()


class Steps(OwnLoop):
    """A loop in which `daf_integrations.step` runs forward and backward."""

    def _run(self, batch: Any) -> None:
        daf.step(self._called, batch, lambda rows: own_loss(self._called, rows) / self._accumulation)


class Fabric(OwnLoop):
    def _prepared(self, optimizer: Any, options: dict[str, Any] | None) -> tuple[Any, Any]:
        self._fabric = lightning.Fabric(accelerator="cpu", devices=1)
        model, optimizer = self._fabric.setup(self.model, optimizer)
        return model if options is None else daf.prepare(model, **options), optimizer

    def _run(self, batch: Any) -> None:
        self._fabric.backward(own_loss(self._called, batch) / self._accumulation)


class Accelerate(OwnLoop):
    def _prepared(self, optimizer: Any, options: dict[str, Any] | None) -> tuple[Any, Any]:
        self._accelerator = Accelerator(cpu=True)
        with pytest.MonkeyPatch.context() as patch:
            if options is not None:
                patch.setenv("ACCELERATE_USE_DAF", "1")
                patch.setenv("ACCELERATE_DAF_CONFIG", json.dumps(options))
                for name in ("prepare", "prepare_model"):
                    patch.setattr(Accelerator, name, getattr(Accelerator, name))
                install(Accelerator)
            return self._accelerator.prepare(self.model, optimizer)

    def _run(self, batch: Any) -> None:
        self._accelerator.backward(own_loss(self._called, batch) / self._accumulation)


class Shortest(TrainerAdapter):
    """The calls that `DAFSession` asks of a trainer, and nothing else."""

    def __init__(self, model: nn.Module, folder: Path, options: dict[str, Any] | None, accumulation: int = 1) -> None:
        self.model, self._accumulation, self._optimizer = model, accumulation, adam(model)
        self._session = None if options is None else DAFSession(DAFConfig.from_dict(options))
        if self._session is not None:
            self._session.attach(model)

    @property
    def session(self) -> DAFSession:
        assert self._session is not None
        return self._session

    def train(self, start: int, stop: int, saved: Any = None) -> Any:
        session = self._session or DAFSession(DAFConfig())  # one that is attached to nothing does nothing
        if saved is not None:
            session.load_state(saved)
        loss_of = partial(own_loss, self.model)
        torch.manual_seed(0)
        for number, batch in enumerate(batches(self.model, stop * self._accumulation), 1):
            if number <= start * self._accumulation:
                continue
            with session.forward(batch, loss_of):
                loss = loss_of(batch) / self._accumulation
            loss.backward()
            session.after_backward()
            if number % self._accumulation == 0:
                session.before_optimizer([self._optimizer])
                self._optimizer.step()
                session.after_optimizer()
                self._optimizer.zero_grad()
                with torch.no_grad():
                    self.model(**batch)
        return session.state()

    def end(self) -> None:
        self.session.detach()


ADAPTERS = [HuggingFace, Lightning, OwnLoop, Steps, Fabric, Accelerate, Shortest]
EACH = pytest.mark.parametrize("adapter", ADAPTERS)
MakeAdapter = Callable[..., TrainerAdapter]


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> Iterator[None]:
    """Accelerate keeps its state in singletons, and the garbage collector may not have found other tests' models."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()
    training._trainings.clear()
    training._exit_summaries.clear()


class Evaluations:
    """Notes what is trained, and whether anything is compressed, where the model is called without gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.trained: list[frozenset[str]] = []
        self.compressed: list[bool] = []
        self._model = model
        model.register_forward_pre_hook(self._note)

    def _note(self, *_: object) -> None:
        if not torch.is_grad_enabled():
            self.trained.append(trained(self._model))
            self.compressed.append(innermost_hooks() is not None)


@EACH
@pytest.mark.parametrize("accumulation", [1, 2])
def test_exact_mode_changes_no_bit_and_counts_optimizer_steps(
    adapter: MakeAdapter, accumulation: int, tmp_path: Path
) -> None:
    plain = adapter(classifier(0.1), tmp_path / "plain", None, accumulation)
    exact = adapter(classifier(0.1), tmp_path / "exact", {"precision": "exact"}, accumulation)
    evaluations = Evaluations(exact.model)
    plain.train(0, FEW)
    exact.train(0, FEW)
    assert differing(weights_of(plain.model), weights_of(exact.model)) == []
    assert exact.session.totals.steps == FEW
    assert exact.session.totals.raw_bytes > exact.session.totals.held_bytes > 0
    assert len(evaluations.compressed) >= FEW
    assert not any(evaluations.compressed)


@EACH
def test_audits_measure_the_gradient(adapter: MakeAdapter, tmp_path: Path) -> None:
    run = adapter(classifier(), tmp_path, {"precision": 4, "audit_every": 1})
    run.train(0, FEW)
    assert run.session.totals.audits == FEW - 1, "before the first step nothing is known of what it stores"
    assert run.session.totals.gradient_error is not None
    assert 0 < run.session.totals.gradient_error < 1


@EACH
def test_a_state_is_saved_and_restored(adapter: MakeAdapter, tmp_path: Path) -> None:
    options = {"precision": "auto", "audit_every": 1}
    first = adapter(classifier(), tmp_path / "first", options)
    saved = first.train(0, FEW)
    second = adapter(classifier(), tmp_path / "second", options)
    second.model.load_state_dict(first.model.state_dict())
    second.train(FEW, FEW + 2, saved)
    assert second.session.totals.steps == FEW + 2
    assert second.session.totals.audits == FEW + 1, "what was learned says what the first step stores"


@EACH
def test_elastic_training_is_undone_where_the_model_is_evaluated(
    adapter: MakeAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_time(monkeypatch)
    run = adapter(classifier(), tmp_path, ELASTIC)
    evaluations, before = Evaluations(run.model), trained(run.model)
    run.train(0, STEPS)
    assert run.session.totals.elastic_steps == run.session.totals.steps == STEPS
    assert run.session.totals.elastic_depth < STEPS * BLOCKS, "some steps have trained less"
    assert len(evaluations.trained) >= STEPS
    assert {*evaluations.trained} == {before}
    assert trained(run.model) == before


@EACH
def test_the_end_gives_the_model_back(adapter: MakeAdapter, tmp_path: Path) -> None:
    model = classifier()
    forward = model.forward
    run = adapter(model, tmp_path, {"precision": 4, "audit_every": None})
    run.train(0, 1)
    run.end()
    assert innermost_hooks() is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.forward == forward


@EACH
@pytest.mark.parametrize("precision", ["exact", 4])
def test_an_error_leaves_no_hooks_and_a_session_that_can_end(
    adapter: MakeAdapter, precision: Any, tmp_path: Path
) -> None:
    run = adapter(classifier(), tmp_path, {"precision": precision})
    before, block = trained(run.model), run.model.base_model.model.roberta.encoder.layer[1]
    healed = raise_at_pass(block, 2, RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        run.train(0, FEW)
    healed.remove()
    run.end()
    assert innermost_hooks() is None
    assert trained(run.model) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in run.model.modules())


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:FutureWarning")
@pytest.mark.parametrize("make", [torch.jit.script, partial(torch.jit.trace, example_inputs=torch.ones(2, 4))])
@pytest.mark.parametrize("inside", [False, True])
def test_script_modules_are_refused(make: Any, inside: bool) -> None:
    scripted = make(nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    where = "^0 in Sequential is" if inside else "^the model is"
    with pytest.raises(ModelError, match=f"{where} a ScriptModule.*Train the module that torch.jit.script"):
        daf.prepare(nn.Sequential(scripted) if inside else scripted)
