"""Training through transformers' Trainer: what DAF changes in a run, and what it must not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers.modeling_utils
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import Trainer

from daf_core import ConfigError, StepStatistics
from daf_core.autograd.torch_private import in_backward, innermost_hooks
from daf_integrations import DAFCallback
from tests.integrations.hf_runs import (
    BATCH,
    LENGTH,
    METRICS,
    NEWER_CHECKPOINTS,
    STEPS,
    VOCABULARY,
    MakeModel,
    MakeTrainer,
    OwnStep,
    Relay,
    checkpointed,
    daf_records,
    differing,
    gpt2,
    last_step,
    left_behind,
    lora,
    losses,
    resnet,
    roberta,
    run,
    steps_of,
    weights,
)

REENTRANT = checkpointed(use_reentrant=True)
NON_REENTRANT = checkpointed(use_reentrant=False)
EVERY_SECOND = checkpointed(use_reentrant=False, every_n_layers=2)
OFFLOADED = checkpointed(use_reentrant=False, offload=True)

CLOCKS = ("runtime", "per_second")


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: int | None = None) -> Tensor:
    """A loss outside of the model, whose log-softmax autograd saves."""
    logits = outputs.logits.flatten(0, -2)
    targets = labels.flatten()
    return -logits.log_softmax(-1)[torch.arange(len(targets)), targets].mean()


def without_clocks(metrics: dict[str, float]) -> dict[str, float]:
    """Leaves out what differs from run to run, and what a callback after DAF's takes out of the log."""
    return {name: value for name, value in metrics.items() if not name.endswith(CLOCKS)}


RUNS: dict[str, tuple[MakeModel, dict[str, Any]]] = {
    "lora": (lora, {}),
    "all parameters": (roberta, {}),
    "causal language model": (gpt2, {}),
    "convolutions": (resnet, {}),
    "accumulation": (lora, {"gradient_accumulation_steps": 2}),
    "bfloat16": (lora, {"bf16": True}),
    "bfloat16, all parameters": (roberta, {"bf16": True}),
    "label smoothing": (gpt2, {"label_smoothing_factor": 0.1}),
    "compute_loss_func": (gpt2, {"compute_loss_func": own_loss}),
    "noise on embeddings": (lora, {"neftune_noise_alpha": 5.0}),
    "evaluation in between": (lora, {"eval_strategy": "steps", "eval_steps": 1}),
    "evaluation at first": (lora, {"eval_on_start": True}),
    "reentrant checkpoints": (roberta, REENTRANT),
    "reentrant checkpoints, lora": (lora, REENTRANT),
    "checkpoints": (roberta, NON_REENTRANT),
    "checkpoints, lora, bfloat16": (lora, {**NON_REENTRANT, "bf16": True}),
}


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        *(pytest.param(*run, id=name) for name, run in RUNS.items()),
        pytest.param(lora, EVERY_SECOND, id="every second layer", marks=NEWER_CHECKPOINTS),
    ],
)
def test_exact_mode_changes_no_bit_of_a_run(
    make_trainer: MakeTrainer, model: MakeModel, arguments: dict[str, Any]
) -> None:
    plain, callback = make_trainer(model=model(), **arguments), DAFCallback(precision="exact")
    compressed = make_trainer(callback, model=model(), **arguments)
    before = weights(compressed)
    expected, actual = run(plain).metrics, run(compressed).metrics

    assert differing(weights(compressed), weights(plain)) == []
    assert differing(weights(compressed), before), "nothing was trained"
    assert losses(compressed) == losses(plain)
    assert without_clocks(actual) == without_clocks(expected)
    assert last_step(callback).raw_bytes > 500_000
    assert left_behind(compressed) == left_behind(plain)


@pytest.mark.parametrize(("model", "ratio"), [(lora, 4), (roberta, 4), (gpt2, 4), (resnet, 2)])
def test_four_bits_train_about_as_well_in_much_less(make_trainer: MakeTrainer, model: MakeModel, ratio: float) -> None:
    plain, callback = make_trainer(model=model()), DAFCallback(precision=4)
    compressed = make_trainer(callback, model=model())
    run(plain)
    run(compressed)
    assert losses(compressed) == pytest.approx(losses(plain), rel=0.02)
    assert differing(weights(compressed), weights(plain))
    assert last_step(callback).ratio > ratio


class TestAccumulation:
    def test_a_step_is_an_optimizer_step_and_raw_megabytes_are_of_one_forward_pass(
        self, make_trainer: MakeTrainer
    ) -> None:
        single, accumulated = (
            trained(make_trainer, lora(), gradient_accumulation_steps=passes, precision="exact") for passes in (1, 2)
        )
        assert accumulated.raw_bytes == single.raw_bytes
        assert accumulated.held_bytes == single.held_bytes
        assert sum(accumulated.stored_as.values()) == 2 * sum(single.stored_as.values())

    def test_steps_are_counted_once(self, make_trainer: MakeTrainer) -> None:
        callback = DAFCallback()
        run(make_trainer(callback, gradient_accumulation_steps=2))
        assert steps_of(callback) == STEPS


class TestAutocast:
    def test_casts_of_weights_pass_through(self, make_trainer: MakeTrainer) -> None:
        """They would count for every batch size alike, so that twice the batch needed less than twice the bytes."""
        one, two = (
            trained(make_trainer, lora(), bf16=True, per_device_train_batch_size=size).raw_bytes
            for size in (BATCH, 2 * BATCH)
        )
        casts = sum(2 * parameter.numel() for parameter in roberta().parameters() if parameter.ndim == 2)
        assert 0 <= 2 * one - two < casts / 10

    def test_activations_are_compressed(self, make_trainer: MakeTrainer) -> None:
        step = trained(make_trainer, lora(), bf16=True)
        assert step.stored_as["planes"] >= 10
        assert step.ratio > 2.5


class TestLossOutsideTheModel:
    def test_is_covered(self, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
        step = trained(make_trainer, gpt2(), compute_loss_func=own_loss)
        assert daf_records(caplog) == []

        outside = DAFCallback()
        run(make_trainer(Relay(outside), model=gpt2(), compute_loss_func=own_loss))
        log_softmax = 4 * BATCH * (LENGTH - 1) * VOCABULARY
        assert step.raw_bytes - last_step(outside).raw_bytes >= log_softmax
        assert step.stored_as["logarithms"] == 1
        assert "logarithms" not in last_step(outside).stored_as


class TestEvaluation:
    def test_gives_the_figures_of_a_run_without_daf(self, make_trainer: MakeTrainer) -> None:
        runs = [
            make_trainer(*callbacks, eval_strategy="steps", eval_steps=1, eval_on_start=True)
            for callbacks in ([], [DAFCallback(precision="exact")])
        ]
        for trainer in runs:
            run(trainer)
        plain, compressed = (
            [without_clocks(entry) for entry in trainer.state.log_history if "eval_loss" in entry] for trainer in runs
        )
        assert len(compressed) == STEPS + 1
        assert compressed == plain

    def test_returns_what_it_returns_without_daf(self, make_trainer: MakeTrainer) -> None:
        """Trainer.log adds to the metrics that evaluate() then returns."""
        plain, compressed = make_trainer(), make_trainer(DAFCallback(precision="exact"))
        returned: list[dict[str, float]] = []
        for trainer in (plain, compressed):
            trainer.add_callback(EvaluateAtEnd(trainer, returned))
            run(trainer)
        assert without_clocks(returned[1]) == without_clocks(returned[0])
        assert "epoch" in returned[0]

    def test_in_between_leaves_the_steps_alone(self, make_trainer: MakeTrainer) -> None:
        """Stochastic rounding numbers the passes that are stored, so that one of an evaluation would show."""
        runs = [
            make_trainer(
                DAFCallback(precision=4, rounding="stochastic"), model=lora(dropout=0.0), eval_strategy=strategy
            )
            for strategy in ("no", "steps")
        ]
        for trainer in runs:
            run(trainer)
        assert differing(weights(runs[0]), weights(runs[1])) == []


class EvaluateAtEnd(transformers.TrainerCallback):
    """Evaluates after the first step, while a run is on."""

    def __init__(self, trainer: Trainer, returned: list[dict[str, float]]) -> None:
        self.trainer, self.returned = trainer, returned

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.returned.append(self.trainer.evaluate())


class TestCheckpointing:
    @pytest.mark.parametrize("model", [roberta, lora])
    @pytest.mark.parametrize("kind", [REENTRANT, NON_REENTRANT], ids=["reentrant", "non-reentrant"])
    def test_only_what_the_checkpoints_keep_is_stored(
        self, make_trainer: MakeTrainer, model: MakeModel, kind: dict[str, Any]
    ) -> None:
        whole, checkpointed = trained(make_trainer, model()), trained(make_trainer, model(), **kind)
        assert checkpointed.raw_bytes < 0.3 * whole.raw_bytes
        assert sum(checkpointed.stored_as.values()) < 0.6 * sum(whole.stored_as.values())
        assert checkpointed.ratio > 3

    @pytest.mark.parametrize("kind", [REENTRANT, NON_REENTRANT], ids=["reentrant", "non-reentrant"])
    def test_recomputation_is_not_packed(self, make_trainer: MakeTrainer, kind: dict[str, Any]) -> None:
        model, owners = roberta(), {False: set[str](), True: set[str]()}
        block = model.roberta.encoder.layer[0].intermediate
        watch = block.register_forward_pre_hook(lambda *_: owners[in_backward()].add(owner_of_hooks()))
        run(make_trainer(DAFCallback(), model=model, **kind))
        watch.remove()
        assert owners[True], "nothing was recomputed"
        assert "Packer.pack" not in owners[True]

    @NEWER_CHECKPOINTS
    def test_layers_without_a_checkpoint_are_compressed(self, make_trainer: MakeTrainer) -> None:
        whole, half, none = (trained(make_trainer, lora(), **kind) for kind in ({}, EVERY_SECOND, NON_REENTRANT))
        assert none.raw_bytes < half.raw_bytes < whole.raw_bytes
        assert half.ratio > 4

    @NEWER_CHECKPOINTS
    def test_offloaded_checkpoints_keep_their_own_hooks(
        self, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """transformers moves what a checkpoint keeps by hooks inside DAF's: DAF sees only what is outside of them."""

        def pageable(pin_memory: bool, device_type: str) -> save_on_cpu:
            return save_on_cpu(pin_memory=False, device_type=device_type)

        monkeypatch.setattr(transformers.modeling_utils, "save_on_cpu", pageable)
        callback = DAFCallback(precision="exact")
        plain, compressed = make_trainer(**OFFLOADED), make_trainer(callback, **OFFLOADED)
        run(plain)
        run(compressed)
        assert differing(weights(compressed), weights(plain)) == []
        assert last_step(callback).raw_bytes < trained(make_trainer, lora(), **NON_REENTRANT).raw_bytes

    @NEWER_CHECKPOINTS
    @pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator, so memory can be pinned")
    def test_offload_without_an_accelerator_ends_as_it_does_without_daf(self, make_trainer: MakeTrainer) -> None:
        """Before torch 2.14 memory could not be pinned there."""
        messages = []
        for callbacks in ([], [DAFCallback()]):
            trainer = make_trainer(*callbacks, **OFFLOADED)
            try:
                run(trainer)
                messages.append("trained")
            except RuntimeError as error:
                messages.append(str(error))
            assert innermost_hooks() is None
        assert messages[0] == messages[1]
        assert ("trained" if torch.__version__ >= "2.14" else "pin_memory") in messages[0]


class OwnLoss(Trainer):
    """Computes the loss itself, as many scripts do."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.1)
        return (loss, outputs) if return_outputs else loss


class CachesGradients(Trainer):
    """Runs each half of a batch again in backward, as sentence-transformers' losses with a cache do."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        half = len(inputs["labels"]) // 2
        parts = [{name: each[start : start + half] for name, each in inputs.items()} for start in (0, half)]
        with torch.no_grad():
            loss = torch.stack([model(**part).loss for part in parts]).mean().requires_grad_()

        def again(gradient: Tensor) -> None:
            with torch.enable_grad():
                for part in parts:
                    (gradient / 2 * model(**part).loss).backward()

        loss.register_hook(again)
        return loss


class CallsSuper(Trainer):
    """Wraps the training step and the log, as trainers of other libraries do."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, "own": 1.0}, *args, **kwargs)


class TestSubclasses:
    @pytest.mark.parametrize("trainer", [OwnLoss, CallsSuper])
    def test_that_keep_the_chain_are_covered(
        self, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, trainer: type[Trainer]
    ) -> None:
        callback = DAFCallback(precision="exact")
        plain, compressed = make_trainer(trainer=trainer), make_trainer(callback, trainer=trainer)
        run(plain)
        run(compressed)
        assert differing(weights(compressed), weights(plain)) == []
        assert last_step(callback).raw_bytes > 500_000
        assert compressed.state.log_history[0].keys() >= METRICS
        assert left_behind(compressed) == []
        assert daf_records(caplog) == []

    @pytest.mark.parametrize("precision", ["exact", 4])
    def test_that_run_the_model_again_in_backward_are_covered(
        self, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, precision: Any
    ) -> None:
        callback = DAFCallback(precision=precision, audit_every=None)
        plain, compressed = (
            make_trainer(*each, trainer=CachesGradients, model=lora(dropout=0.0)) for each in ((), (callback,))
        )
        run(plain)
        run(compressed)
        assert precision == 4 or differing(weights(compressed), weights(plain)) == []
        step = last_step(callback)
        assert step.raw_bytes > 500_000
        assert precision == "exact" or step.ratio > 3
        assert left_behind(compressed) == []
        assert daf_records(caplog) == []

    def test_that_run_the_model_again_in_backward_are_not_planned(self, make_trainer: MakeTrainer) -> None:
        trainer = make_trainer(DAFCallback(memory_budget="600MB"), trainer=CachesGradients)
        with pytest.raises(ConfigError, match=r'run in backward, as for a cache .* Set budget_covers="activations"'):
            run(trainer)
        assert left_behind(trainer) == []
        run(make_trainer(DAFCallback(memory_budget="600MB", budget_covers="activations"), trainer=CachesGradients))

    def test_that_compute_the_loss_elsewhere_are_warned_once(
        self, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
    ) -> None:
        callback = DAFCallback()
        run(make_trainer(callback, trainer=OwnStep))
        warnings = daf_records(caplog)
        assert [record.levelno for record in warnings] == [logging.WARNING]
        for part in ("no activations in the first step", "compute_loss", "daf_integrations.prepare()"):
            assert part in warnings[0].message
        assert last_step(callback).raw_bytes == 0


def owner_of_hooks() -> str:
    """Names the innermost saved-tensor hook, "" if there is none."""
    hooks = innermost_hooks()
    return "" if hooks is None else getattr(hooks[0], "__qualname__", repr(hooks[0]))


def trained(make: MakeTrainer, model: nn.Module, *, precision: Any = 4, **options: Any) -> StepStatistics:
    """Trains a model and returns the statistics of the last step."""
    callback = DAFCallback(precision=precision)
    run(make(callback, model=model, **options))
    return last_step(callback)
