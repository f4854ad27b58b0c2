"""Mistakes that DAF finds before the first forward pass, and the memory budget."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.autograd.graph import save_on_cpu
from transformers import TrainingArguments

from daf_core import ActivationBudgetError, ConfigError, HooksActiveError, NothingToTrainError, UnsupportedDeviceError
from daf_core.autograd.torch_private import innermost_hooks
from daf_integrations import DAFCallback
from tests.integrations.hf_runs import (
    METRICS,
    STEPS,
    MakeTrainer,
    begin_by_hand,
    last_step,
    left_behind,
    lora,
    roberta,
    run,
    steps_of,
)


def that_never_runs(model: nn.Module) -> nn.Module:
    """Fails the test as soon as the model is called."""
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran before the error"))
    return model


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"precisoin": 4}, ["'precisoin'", "did you mean 'precision'", "memory_budget"]),
        ({"precision": 3}, ["precision=3", "'exact', 8, 4, 2, 1"]),
        ({"precision": "4"}, ["precision='4'", "'exact', 8, 4, 2, 1"]),
        ({"memory_budget": "12 parsecs"}, ["memory_budget='12 parsecs'", '"400MB"']),
        ({"memory_budget": 0}, ["memory_budget=0", "positive"]),
        ({"rounding": "up"}, ["rounding='up'", "'nearest', 'stochastic'"]),
        ({"backend": "cuda"}, ["backend='cuda'", "'auto', 'reference'"]),
        ({"seed": -1}, ["seed=-1", "0 to 2**64 - 1"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_named_when_the_callback_is_made(options: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        DAFCallback(**options)
    for part in parts:
        assert part in str(error.value)


class TestBeforeTheFirstForward:
    def test_nothing_to_train(self, make_trainer: MakeTrainer) -> None:
        model = that_never_runs(roberta()).requires_grad_(False)
        trainer = make_trainer(DAFCallback(), model=model)
        with pytest.raises(NothingToTrainError) as error:
            run(trainer)
        for part in ("RobertaForSequenceClassification", "no parameter that requires a gradient", "get_peft_model"):
            assert part in str(error.value)
        assert not {"compute_loss", "log"} & vars(trainer).keys()

    def test_saved_tensor_hooks_of_someone_else(self, make_trainer: MakeTrainer) -> None:
        trainer = make_trainer(DAFCallback(), model=that_never_runs(lora()))
        with save_on_cpu(), pytest.raises(HooksActiveError) as error:
            run(trainer)
        for part in ("torch.autograd.graph", "save_on_cpu", "already active", "Leave the other scope first"):
            assert part in str(error.value)
        assert innermost_hooks() is None
        assert not {"compute_loss", "log"} & vars(trainer).keys()

    def test_a_model_without_values(self, arguments: TrainingArguments) -> None:
        callback, model = DAFCallback(), roberta().to("meta")
        with pytest.raises(UnsupportedDeviceError) as error:
            begin_by_hand(callback, arguments, model)
        for part in ("'meta'", "no values", "to_empty"):
            assert part in str(error.value)
        assert "forward" not in vars(model)
        assert not any(module._forward_hooks for module in model.modules())

    def test_several_gpus_in_one_process(self) -> None:
        with pytest.raises(UnsupportedDeviceError) as error:
            begin_by_hand(DAFCallback(), SimpleNamespace(n_gpu=2), that_never_runs(lora()))
        for part in ("2 GPUs in one process", "DataParallel", "torchrun --nproc-per-node"):
            assert part in str(error.value)

    def test_the_callback_works_after_the_mistake_is_mended(self, make_trainer: MakeTrainer) -> None:
        callback = DAFCallback()
        trainer = make_trainer(callback)
        with save_on_cpu(), pytest.raises(HooksActiveError):
            run(trainer)
        run(trainer)
        assert steps_of(callback) == STEPS
        assert left_behind(trainer) == []


class TestMemoryBudget:
    @pytest.mark.parametrize("precision", ["exact", 4])
    def test_too_small_a_one_stops_the_run(self, make_trainer: MakeTrainer, precision: Any) -> None:
        trainer = make_trainer(DAFCallback(precision=precision, memory_budget="20kB", budget_covers="activations"))
        with pytest.raises(ActivationBudgetError) as error:
            run(trainer)
        assert error.value.allowed == 20_000 < error.value.needed
        for part in ("memory_budget allows 20 KB", "Raise memory_budget", "smaller batches"):
            assert part in str(error.value)
        assert innermost_hooks() is None

    def test_is_no_reason_to_try_smaller_batches(self, make_trainer: MakeTrainer) -> None:
        """auto_find_batch_size answers the device's out-of-memory errors alone."""
        callback = DAFCallback(memory_budget="20kB", budget_covers="activations")
        trainer = make_trainer(callback, auto_find_batch_size=True)
        with pytest.raises(ActivationBudgetError):
            run(trainer)

    def test_is_kept_where_plain_training_would_not_fit(self, make_trainer: MakeTrainer) -> None:
        callback = DAFCallback(memory_budget="1MB", budget_covers="activations")
        trainer = make_trainer(callback)
        run(trainer)
        entries = [entry for entry in trainer.state.log_history if entry.keys() >= METRICS]
        assert len(entries) == STEPS
        for entry in entries:
            assert entry["daf/held_mb"] <= 1.0 < entry["daf/raw_mb"]
        assert last_step(callback).held_bytes <= 1_000_000
