"""Trainer runs whose steps keep a memory budget."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer

from daf_core import ConfigError
from daf_integrations import DAFCallback
from tests.integrations.hf_parts import causal, causal_without_count, made, padded_trainer, tagger
from tests.integrations.hf_runs import (
    MakeTrainer,
    checkpointed,
    daf_records,
    differing,
    gpt2,
    last_step,
    left_behind,
    lora,
    losses,
    roberta,
    run,
    steps_of,
    weights,
)
from tests.integrations.planned import AMPLE, OutOfMemory, Where, in_parts

SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}


def exact(budget: str = AMPLE) -> DAFCallback:
    return DAFCallback(precision="exact", memory_budget=budget)


def largest(one: Trainer, other: Trainer) -> float:
    """Returns the largest difference between the weights of two trainers."""
    before, after = weights(one), weights(other)
    return max(float((before[name].float() - after[name].float()).abs().max()) for name in before)


def evaluated(trainer: Trainer) -> list[float]:
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def _own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs["logits"]
    total = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum")
    return total / num_items_in_batch


class TestParts:
    """Micro-batches have the weights and the logged losses of whole batches."""

    @pytest.mark.parametrize(
        ("make", "options"),
        [
            (causal, {"gradient_accumulation_steps": 2}),
            (causal_without_count, {"label_smoothing_factor": 0.1, "eval_strategy": "steps"}),
            (tagger, {"compute_loss_func": _own_loss, "gradient_accumulation_steps": 2}),
        ],
        ids=["counted tokens", "smoothed", "own loss"],
    )
    def test_train_alike(self, make: Callable[[], nn.Module], options: dict[str, Any], tmp_path: Path) -> None:
        plain, cut = (padded_trainer(tmp_path, made(make), **options) for _ in range(2))
        before = weights(plain)
        callback = exact()
        cut.add_callback(callback)
        run(plain)
        with in_parts(3):
            run(cut)
        assert callback._session.runner is None
        assert differing(weights(plain), before)
        assert losses(cut) == pytest.approx(losses(plain), rel=1e-4)
        assert evaluated(cut) == pytest.approx(evaluated(plain), rel=1e-4)
        assert len(evaluated(cut)) == (3 if "eval_strategy" in options else 0)
        assert largest(cut, plain) < 1e-6
        assert steps_of(callback) == 3
        assert left_behind(cut) == []

    def test_in_half_precision(self, tmp_path: Path) -> None:
        plain, cut = (padded_trainer(tmp_path, made(causal), bf16=True) for _ in range(2))
        cut.add_callback(exact())
        run(plain)
        with in_parts(3):
            run(cut)
        assert largest(cut, plain) < 5e-3


class Adversarial(Trainer):
    """Adds to a batch's gradient that of embeddings which the first one has moved (FGM)."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, dict(inputs), num_items_in_batch)
        weight = model.get_input_embeddings().weight
        before, moved = weight.detach().clone(), weight.grad / weight.grad.norm()
        with torch.no_grad():
            weight.add_(moved)
        super().training_step(model, dict(inputs), num_items_in_batch)
        with torch.no_grad():
            weight.copy_(before)
        return loss


class OwnBackward(Trainer):
    """Computes the loss itself."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = model(**self._prepare_inputs(inputs)).loss
        self.accelerator.backward(loss)
        return loss.detach()


class TestOwnSteps:
    """Batches stay whole where a part's share of the gradient is not what its step computes."""

    @pytest.mark.parametrize(("kind", "calls"), [(Adversarial, 2), (OwnBackward, 0)])
    def test_train_alike(
        self, kind: type[Trainer], calls: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        plain, cut = (padded_trainer(tmp_path, made(tagger)) for _ in range(2))
        plain.__class__ = cut.__class__ = kind
        cut.add_callback(exact())
        run(plain)
        with in_parts(3):
            run(cut)
        assert losses(cut) == pytest.approx(losses(plain), rel=1e-5)
        assert largest(cut, plain) < 1e-6
        told = f"training_step of {kind.__name__} calls compute_loss {calls} times for a batch"
        assert sum(told in record.message for record in daf_records(caplog)) == 1
        assert left_behind(cut) == []


class TestOutOfMemory:
    """A step that runs out of memory is run again: nothing is lost, nothing counts twice."""

    @pytest.mark.parametrize("accumulation", [1, 2])
    @pytest.mark.parametrize("where", ["forward", "backward"])
    def test_changes_nothing(
        self, where: Where, accumulation: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        options = {"gradient_accumulation_steps": accumulation, "label_smoothing_factor": 0.1}
        plain, failing = (padded_trainer(tmp_path, made(tagger), **options) for _ in range(2))
        callback = exact()
        failing.add_callback(callback)
        embeddings = failing.model.get_input_embeddings()
        failure = OutOfMemory(embeddings, where, lambda: failing.state.global_step == 1)
        run(plain)
        run(failing)
        assert failure.raised == 1
        [warning] = [record for record in daf_records(caplog) if record.levelno == logging.WARNING]
        assert "out of memory" in warning.message
        assert failing.state.global_step == plain.state.global_step == 3
        assert losses(failing) == pytest.approx(losses(plain), rel=1e-5)
        assert largest(failing, plain) < 1e-6
        assert steps_of(callback) == 3

    def test_is_no_occasion_to_count_twice(self, tmp_path: Path) -> None:
        """What a trainer counts in compute_loss is what it would count without."""

        class Counting(Trainer):
            tokens = 0

            def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                self.tokens += inputs["input_ids"].numel() if model.training else 0
                return super().compute_loss(model, inputs, *args, **kwargs)

        trainer = padded_trainer(tmp_path, made(tagger))
        trainer.__class__ = Counting
        trainer.add_callback(exact())
        failure = OutOfMemory(trainer.model.get_input_embeddings(), "backward", lambda: trainer.state.global_step == 1)
        run(trainer)
        assert failure.raised == 1
        assert trainer.tokens == 3 * 8 * 12


class TestTrainers:
    def test_one_piece_is_bit_identical(self, make_trainer: MakeTrainer) -> None:
        """With dropout, and with accumulated batches."""
        plain, budgeted = (make_trainer(*each, gradient_accumulation_steps=2) for each in ([], [exact()]))
        run(plain)
        with in_parts(1):
            run(budgeted)
        assert losses(budgeted) == losses(plain)
        assert differing(weights(budgeted), weights(plain)) == []

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpointing_of_the_users_own_is_part_of_the_plan(
        self, reentrant: bool, make_trainer: MakeTrainer
    ) -> None:
        options = checkpointed(use_reentrant=reentrant)
        callback = DAFCallback(precision="exact", memory_budget=AMPLE)
        plain, budgeted = (make_trainer(*each, model=roberta(0.0), **SGD, **options) for each in ([], [callback]))
        run(plain)
        with in_parts(2):
            run(budgeted)
        assert largest(budgeted, plain) < 1e-6
        assert last_step(callback).raw_bytes > 0

    def test_a_resumed_run_keeps_the_budget(self, make_trainer: MakeTrainer) -> None:
        options = {"save_strategy": "steps", "save_steps": 2, **SGD, "max_steps": 4}
        whole = make_trainer(exact(), model=lora(0.0), **options)
        run(whole)
        callback = exact()
        resumed = make_trainer(callback, model=lora(0.0), **options)
        with in_parts(2):
            run(resumed, resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-2")
        assert steps_of(callback) == 4
        assert largest(resumed, whole) < 1e-6

    def test_no_batch_size_is_looked_for_where_a_plan_helps(self, make_trainer: MakeTrainer) -> None:
        """DAF's own retry comes before that of auto_find_batch_size, which would begin from the first batch."""
        trainer = make_trainer(exact(), model=gpt2(), auto_find_batch_size=True, max_steps=2)
        failure = OutOfMemory(trainer.model.transformer.wte, "forward", lambda: trainer.state.global_step == 1)
        run(trainer)
        assert failure.raised == 1
        assert trainer.state.global_step == 2
        assert trainer.state.train_batch_size == trainer.args.per_device_train_batch_size

    def test_a_compiled_model_is_refused(self, make_trainer: MakeTrainer) -> None:
        """What its graphs take cannot be measured."""
        model = lora()
        model.base_model.model.roberta.encoder.layer[0].compile(backend="eager")
        trainer = make_trainer(exact(), model=model)
        with pytest.raises(ConfigError, match=r'RobertaLayer is compiled.*budget_covers="activations"'):
            run(trainer)
        assert left_behind(trainer) == []
        allowed = DAFCallback(precision="exact", memory_budget=AMPLE, budget_covers="activations")
        run(make_trainer(allowed, model=model, max_steps=1))

    def test_an_optimizer_that_steps_in_backward_sees_no_measurement(self, make_trainer: MakeTrainer) -> None:
        plain, budgeted = (make_trainer(*each, model=roberta(0.0)) for each in ([], [exact()]))
        for trainer in (plain, budgeted):
            for parameter in trainer.model.parameters():
                parameter.register_post_accumulate_grad_hook(_descend)
            run(trainer)
        assert differing(weights(budgeted), weights(plain)) == []


def _descend(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None
