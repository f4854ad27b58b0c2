"""Small Trainer runs: models and data of a few kilobytes, whose activations are large enough to be stored."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from typing_extensions import override

from daf_core import StepStatistics
from daf_core.autograd.torch_private import innermost_hooks
from daf_integrations import DAFCallback

STEPS = 3
VOCABULARY = 200
LENGTH = 64
BATCH = 8

METRICS = {"daf/raw_mb", "daf/held_mb", "daf/ratio", "daf/pack_ms", "daf/unpack_ms"}

QUICK: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "per_device_eval_batch_size": BATCH,
    "logging_steps": 1,
    "learning_rate": 5e-3,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
}

ARGUMENTS = {field.name for field in fields(TrainingArguments)}

CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in ARGUMENTS else "gradient_checkpointing"
"""What transformers 5.23 and 5.12 call it."""

NEWER_CHECKPOINTS = pytest.mark.skipif(
    CHECKPOINTING == "gradient_checkpointing", reason="this transformers checkpoints all layers, and offloads none"
)

Rows = list[dict[str, Any]]
MakeModel = Callable[[], nn.Module]


class MakeTrainer(Protocol):
    """Makes a Trainer of a new model; keywords that it does not know are training arguments."""

    def __call__(
        self,
        *callbacks: Any,
        model: nn.Module | None = None,
        trainer: type[Trainer] = Trainer,
        compute_loss_func: Callable[..., Any] | None = None,
        **arguments: Any,
    ) -> Trainer: ...


def roberta(dropout: float = 0.1, layers: int = 2, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * width,
        max_position_embeddings=LENGTH + 2,
        attention_probs_dropout_prob=dropout,
        hidden_dropout_prob=dropout,
        num_labels=3,
    )
    return RobertaForSequenceClassification(config)


def lora(dropout: float = 0.1) -> nn.Module:
    return peft.get_peft_model(
        roberta(dropout), peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS")
    )


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=2, n_positions=LENGTH, **tokens)
    )


def resnet() -> nn.Module:
    torch.manual_seed(0)
    shape = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}
    return ResNetForImageClassification(ResNetConfig(**shape, layer_type="basic", num_labels=3))


def rows_for(model: nn.Module, count: int = 64) -> Rows:
    """Returns random inputs of the kind that a model takes."""
    random = torch.Generator().manual_seed(1)
    model = model.get_base_model() if isinstance(model, peft.PeftModel) else model

    def tokens() -> Tensor:
        return torch.randint(3, VOCABULARY, (LENGTH,), generator=random)

    def label() -> int:
        return int(torch.randint(0, 3, (), generator=random))

    if isinstance(model, ResNetForImageClassification):
        return [{"pixel_values": torch.randn(3, 32, 32, generator=random), "labels": label()} for _ in range(count)]
    if isinstance(model, GPT2LMHeadModel):
        return [{"input_ids": ids, "labels": ids} for ids in (tokens() for _ in range(count))]
    return [{"input_ids": tokens(), "labels": label()} for _ in range(count)]


def checkpointed(**options: Any) -> dict[str, Any]:
    """Returns training arguments that switch activation checkpointing on."""
    return {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": options}


def run(trainer: Trainer, **options: Any) -> Any:
    """Trains from a fixed state of torch's generator, as the Trainer seeds it only when it is made."""
    torch.manual_seed(0)
    return trainer.train(**options)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Returns the names of the weights that are not the same bit for bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def last_step(callback: DAFCallback) -> StepStatistics:
    assert callback.last_step is not None
    return callback.last_step


def steps_of(callback: DAFCallback) -> int:
    """Returns the steps that the table at the end of the run counts."""
    return callback.state()["attributes"]["totals"]["steps"]


def left_behind(trainer: Trainer) -> list[str]:
    """Names what a run left installed: hooks for saved tensors, methods of the trainer or the model, module hooks."""
    modules = list(trainer.model.named_modules())
    methods = ("compute_loss", "log", "training_step", "_run_epoch")
    return [
        *(["saved-tensor hooks"] if innermost_hooks() is not None else []),
        *(f"trainer.{name}" for name in methods if name in vars(trainer)),
        *(f"handler.{name}" for name in ("on_epoch_begin", "on_train_end") if name in vars(trainer.callback_handler)),
        *(f"{name}.forward" for name, module in modules if "forward" in vars(module)),
        *(f"{name}: forward hook" for name, module in modules if module._forward_hooks or module._forward_pre_hooks),
    ]


def daf_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Returns what DAF said through logging."""
    return [record for record in caplog.records if record.name == "daf"]


def raise_at_pass(module: nn.Module, number: int, error: BaseException) -> Any:
    """Makes a module raise in its `number`-th training pass; returns the handle that heals it."""
    count = 0

    def fail(module: nn.Module, _inputs: object) -> None:
        nonlocal count
        count += module.training
        if count == number:
            count += 1
            raise error

    return module.register_forward_pre_hook(fail)


class OwnStep(Trainer):
    """Calls neither compute_loss nor its context."""

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        model.train()
        loss = model(**inputs).loss
        self.accelerator.backward(loss)
        return loss.detach()


class Recorder(TrainerCallback):
    """Keeps what on_log is given, as the callbacks that report to TensorBoard and the like do."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    @override
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.logged.append(dict(logs or {}))


class Relay(TrainerCallback):
    """Passes events on to a callback that no Trainer knows of, as a training loop of one's own would."""

    def __init__(self, target: DAFCallback) -> None:
        self.target = target

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.target.on_train_begin(args, state, control, **kwargs)

    @override
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.target.on_optimizer_step(args, state, control, **kwargs)

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.target.on_train_end(args, state, control, **kwargs)


def begin_by_hand(callback: DAFCallback, args: TrainingArguments, model: nn.Module, *, zero: bool = True) -> None:
    callback.on_train_begin(args, TrainerState(is_world_process_zero=zero), TrainerControl(), model=model)


def end_by_hand(callback: DAFCallback, args: TrainingArguments, *, zero: bool = True) -> None:
    callback.on_train_end(args, TrainerState(is_world_process_zero=zero), TrainerControl())
