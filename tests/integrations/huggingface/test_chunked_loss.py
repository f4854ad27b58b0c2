"""The loss of language models in chunks, in trainers: when it is on, what users read, and that nothing of it stays."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2LMHeadModel, Trainer

import daf_integrations as daf
from daf_core import ConfigError, DAFConfig, ModifiedInPlaceError
from daf_core.rewrites import chunked_loss
from daf_core.rewrites.lazy_logits import LazyLogits, LogitsSource
from daf_core.rewrites.registry import GELU, OperatorRewrites
from daf_integrations import DAFCallback
from daf_integrations.lightning import DAFStrategy
from daf_integrations.loop import training
from daf_integrations.session.session import DAFSession
from tests.integrations.hf_parts import causal
from tests.integrations.hf_runs import (
    VOCABULARY,
    MakeTrainer,
    differing,
    left_behind,
    losses,
    raise_at_pass,
    roberta,
    run,
    weights,
)
from tests.integrations.lightning_runs import Classifier, fit
from tests.integrations.loop_runs import adam, batches

SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
"""Adam makes as much of a rounding error in a gradient near zero as of the gradient."""

CLOSE = {"rel": 1e-5, "abs": 1e-7}
STORED: dict[str, Any] = {"precision": 8, "audit_every": None}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 100 rows, so that there are several."""
    monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", 100 * 4 * VOCABULARY)


@pytest.fixture(autouse=True)
def no_earlier_models() -> Iterator[None]:
    yield
    training._trainings.clear()
    training._exit_summaries.clear()


@pytest.fixture
def chunked_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the rows of each loss that is computed in chunks."""
    counts: list[int] = []
    compute = chunked_loss.linear_cross_entropy_sum

    def counted(hidden: Tensor, *args: Any) -> Tensor:
        counts.append(len(hidden))
        return compute(hidden, *args)

    monkeypatch.setattr("daf_core.rewrites.causal_lm.linear_cross_entropy_sum", counted)
    return counts


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[LogitsSource]:
    """Lists whose logits were computed."""
    sources: list[LogitsSource] = []
    compute = LogitsSource.logits

    def counted(source: LogitsSource) -> Tensor:
        sources.append(source)
        return compute(source)

    monkeypatch.setattr(LogitsSource, "logits", counted)
    return sources


def adapted() -> nn.Module:
    """Adapters in a model whose head is frozen."""
    model = peft.get_peft_model(
        causal(), peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def state(model: nn.Module) -> list[Any]:
    return [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]


def trained(model: nn.Module, steps: int) -> list[float]:
    """Returns the losses of plain steps."""
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], 0.1)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    found: list[float] = []
    for batch in batches(inner, steps):
        loss = model.train()(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def first_batch(model: nn.Module) -> dict[str, Tensor]:
    return next(batches(model, 1))


class TestInALoop:
    @pytest.mark.parametrize("make", [causal, adapted])
    def test_is_on_and_changes_rounding_alone(
        self, make: Any, chunked_rows: list[int], read: list[LogitsSource]
    ) -> None:
        plain = trained(daf.prepare(make(), **STORED, chunked_loss=False), 3)
        assert chunked_rows == []
        assert trained(daf.prepare(make(), **STORED), 3) == pytest.approx(plain, **CLOSE)
        assert len(chunked_rows) == 3
        assert read == []

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"precision": "exact"}, 0),
            ({"precision": "exact", "chunked_loss": True}, 1),
            ({"precision": 4, "chunked_loss": False}, 0),
            ({"precision": 4, "memory_budget": "1GB", "chunked_loss": False}, 0),
        ],
        ids=str,
    )
    def test_where_it_is_on(self, options: dict[str, Any], expected: int, chunked_rows: list[int]) -> None:
        model = daf.prepare(causal(), **options, audit_every=None)
        daf.step(model, first_batch(model))
        assert len(chunked_rows) == expected

    def test_another_model_is_an_error_where_it_is_asked_for(self) -> None:
        model = roberta()
        before = state(model)
        with pytest.raises(ConfigError, match="chunked_loss=True is not possible for RobertaForSequenceClassification"):
            daf.prepare(model, chunked_loss=True)
        assert state(model) == before

    def test_a_whole_step_in_a_budget_has_it_too(self, chunked_rows: list[int]) -> None:
        model = daf.prepare(causal(), **STORED, memory_budget="1GB")
        loss = daf.step(model, first_batch(model))
        assert chunked_rows
        plain = causal().train()
        assert float(loss) == pytest.approx(plain(**first_batch(plain)).loss.item(), **CLOSE)

    @pytest.mark.parametrize("make", [causal, adapted])
    def test_logits_are_those_of_plain_until_the_step(self, make: Any) -> None:
        plain, model = make().train(), daf.prepare(make(), **STORED).train()
        OperatorRewrites(plain, {GELU}).apply()
        expected, found = plain(**first_batch(plain)), model(**first_batch(model))
        assert isinstance(found.logits, LazyLogits)
        assert torch.equal(found.logits.argmax(-1), expected.logits.argmax(-1))
        assert torch.equal(found.logits.detach(), expected.logits.detach())

    def test_logits_after_the_step_are_an_error(self) -> None:
        model = daf.prepare(causal(), **STORED).train()
        result = model(**first_batch(model))
        result.loss.backward()
        adam(model).step()
        with pytest.raises(ModifiedInPlaceError, match="chunked_loss=False"):
            result.logits.argmax(-1)

    @pytest.mark.parametrize("training_mode", [False, True])
    def test_evaluation_is_that_of_plain(self, training_mode: bool) -> None:
        plain, model = causal().train(training_mode), daf.prepare(causal(), **STORED).train(training_mode)
        with torch.no_grad():
            expected, found = plain(**first_batch(plain)), model(**first_batch(model))
        assert type(found.logits) is Tensor
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.loss, expected.loss)

    def test_in_a_distributed_wrapper(self, tmp_path: Path, chunked_rows: list[int]) -> None:
        plain = trained(daf.prepare(causal(), **STORED, chunked_loss=False), 2)
        torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            for unused in (False, True):
                wrapped = DistributedDataParallel(causal(), find_unused_parameters=unused)
                assert trained(daf.prepare(wrapped, **STORED), 2) == pytest.approx(plain, **CLOSE)
            logits = wrapped(**first_batch(wrapped.module)).logits
            gathered = [torch.empty(logits.shape)]
            torch.distributed.all_gather(gathered, logits)
        finally:
            torch.distributed.destroy_process_group()
        assert len(chunked_rows) == 5
        assert torch.equal(gathered[0], logits.detach())

    def test_preparing_again_without_it_takes_it_off(self, chunked_rows: list[int]) -> None:
        model = daf.prepare(causal(), **STORED)
        trained(daf.prepare(model, **STORED, chunked_loss=False), 1)
        assert chunked_rows == []
        trained(daf.prepare(model, **STORED), 1)
        assert len(chunked_rows) == 1


class TestASession:
    def test_gives_the_model_back(self) -> None:
        model = causal()
        before = state(model)
        session = DAFSession(DAFConfig())
        session.attach(model)
        assert state(model) != before
        session.detach()
        session.detach()
        assert state(model) == before

    def test_gives_it_back_where_attaching_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("out of paper")

        monkeypatch.setattr("daf_integrations.session.session.describe", fail)
        monkeypatch.setattr("daf_integrations.session.session.StepRunner", fail)
        model = causal()
        before = state(model)
        with pytest.raises(RuntimeError, match="out of paper"):
            DAFSession(DAFConfig(memory_budget="1GB")).attach(model)
        assert state(model) == before

    def test_a_second_one_may_come_and_go(self) -> None:
        model = causal()
        before = state(model)
        first, second = DAFSession(DAFConfig()), DAFSession(DAFConfig(chunked_loss=True))
        first.attach(model)
        second.attach(model)
        first.detach()
        assert isinstance(model.train()(**first_batch(model)).logits, LazyLogits)
        second.detach()
        assert state(model) == before

    def test_copies_can_be_attached(self) -> None:
        model = causal()
        session = DAFSession(DAFConfig())
        session.attach(model)
        twin = copy.deepcopy(model)
        session.detach()
        other = DAFSession(DAFConfig(chunked_loss=True))
        other.attach(twin)
        assert isinstance(twin.train()(**first_batch(twin)).logits, LazyLogits)
        other.detach()
        assert not isinstance(twin(**first_batch(twin)).logits, LazyLogits)


class ReadsLogits(Trainer):
    """Counts right tokens from what the model returns, as metrics in training do."""

    right: list[int]

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        if model.training:
            self.right.append(int((outputs.logits[:, :-1].argmax(-1) == inputs["labels"][:, 1:]).sum()))
        return (loss, outputs) if return_outputs else loss


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


RUNS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "accumulation": ({"gradient_accumulation_steps": 2}, True),
    "bf16": ({"bf16": True}, True),
    "label smoothing": ({"label_smoothing_factor": 0.1}, True),
    "compute_loss_func": ({"compute_loss_func": own_loss}, False),
}


class TestInTheTrainer:
    @pytest.mark.parametrize(("options", "expected"), RUNS.values(), ids=RUNS)
    @pytest.mark.parametrize("make", [causal, adapted])
    def test_losses_are_those_of_plain(
        self, make: Any, options: dict[str, Any], expected: bool, make_trainer: MakeTrainer, chunked_rows: list[int]
    ) -> None:
        plain = make_trainer(DAFCallback(**STORED, chunked_loss=False), model=make(), **SGD, **options)
        run(plain)
        assert chunked_rows == []
        trainer = make_trainer(DAFCallback(**STORED), model=make(), **SGD, **options)
        run(trainer)
        assert bool(chunked_rows) is expected
        tolerance = {"rel": 2e-3} if "bf16" in options else CLOSE
        assert losses(trainer) == pytest.approx(losses(plain), **tolerance)
        assert left_behind(trainer) == left_behind(plain)

    def test_metrics_of_logits_are_those_of_plain(self, make_trainer: MakeTrainer) -> None:
        # Weights stay: with other codes in their gradients, one of the two may get a token right a step sooner.
        options: dict[str, Any] = {"trainer": ReadsLogits, "learning_rate": 0.0}
        trainers = [
            make_trainer(DAFCallback(**STORED, chunked_loss=on), model=causal(), **options) for on in (False, True)
        ]
        for trainer in trainers:
            trainer.right = []
            run(trainer)
        assert trainers[0].right == trainers[1].right

    def test_evaluation_within_training_is_that_of_plain(self, make_trainer: MakeTrainer) -> None:
        options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.0, "max_steps": 1}
        plain, trainer = (make_trainer(*callbacks, model=causal(), **options) for callbacks in ([], [DAFCallback()]))
        found = [
            [entry["eval_loss"] for entry in each.state.log_history if "eval_loss" in entry]
            for each in (plain, trainer)
            if run(each)
        ]
        assert found[0] == found[1] != []

    def test_nothing_changes_in_exact_mode(self, make_trainer: MakeTrainer, chunked_rows: list[int]) -> None:
        plain, trainer = make_trainer(model=causal()), make_trainer(DAFCallback(precision="exact"), model=causal())
        run(plain)
        run(trainer)
        assert differing(weights(plain), weights(trainer)) == []
        assert chunked_rows == []

    def test_an_error_in_a_step_gives_the_model_back(self, make_trainer: MakeTrainer) -> None:
        model = causal()
        assert isinstance(model, GPT2LMHeadModel)
        raise_at_pass(model.transformer.h[1], 2, RuntimeError("out of paper"))
        trainer = make_trainer(DAFCallback(**STORED), model=model)
        with pytest.raises(RuntimeError, match="out of paper"):
            run(trainer)
        assert "forward" not in vars(model.lm_head)
        assert "_loss_function" not in vars(model)
        run(trainer)
        assert len(losses(trainer)) >= 3

    def test_options_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_USE_DAF", "1")
        monkeypatch.setenv("ACCELERATE_DAF_CONFIG", '{"chunked_loss": false}')
        assert DAFCallback().config.chunked_loss is False


class TestInLightning:
    def test_losses_are_those_of_plain(self, tmp_path: Path, chunked_rows: list[int]) -> None:
        found: list[list[float]] = []
        for number, on in enumerate((False, "auto")):
            module = Classifier(causal())
            before = state(module.model)
            fit(tmp_path / str(number), module, strategy=DAFStrategy(**STORED, chunked_loss=on))
            assert bool(chunked_rows) is bool(on)
            assert state(module.model) == before
            found.append([float(loss) for loss in module.losses])
        assert found[1] == pytest.approx(found[0], rel=1e-3)  # Adam's steps from rounding errors
