"""A model with random weights, and a batch for it: what a step takes does not depend on their values."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from daf_core.errors import ModelError
from daf_core.plan.run.retry import is_out_of_memory
from daf_integrations.cli.workload.user_model import make, names_function

Task = Literal["causal-lm", "masked-lm", "seq2seq-lm", "sequence-classification", "token-classification"]

TASKS: tuple[Task, ...] = get_args(Task)

_CLASSES: dict[Task, str] = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
}
_PEFT_TASKS: dict[Task, str | None] = {
    "causal-lm": "CAUSAL_LM",
    "masked-lm": None,
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
}

SEED = 0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is to be trained.

    Attributes:
        model: Name of a Hugging Face model, a folder with its config.json, or FILE.py:FUNCTION for what a function
            makes, see `daf_integrations.cli.workload.user_model`.
        batch: Rows of a batch.
        length: Tokens of a row.
        task: What the model is trained for; None for "causal-lm" with models that predict the next token only,
            "seq2seq-lm" with an encoder and a decoder, and "sequence-classification" with others.
        lora_rank: Rank of LoRA adapters where peft puts them by default; None to train all parameters.
    """

    model: str
    batch: int
    length: int
    task: Task | None = None
    lora_rank: int | None = None


@dataclass(frozen=True)
class BuiltWorkload:
    """A workload that can be run.

    Attributes:
        model: The model, in training mode.
        batch: Random tokens and labels.
        task: What it is trained for; None for what a function of the user's has made.
    """

    model: nn.Module
    batch: dict[str, Tensor]
    task: Task | None

    def loss_of(self, rows: int) -> Tensor:
        """Returns the loss of so many rows."""
        return self.loss({name: tensor[:rows] for name, tensor in self.batch.items()})

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the loss of a batch."""
        output = self.model(**batch)
        if isinstance(output, Mapping):
            output = cast("Mapping[str, Any]", output)["loss"]
        return output if isinstance(output, Tensor) else output.loss


def build(workload: Workload) -> BuiltWorkload:
    """Makes a model with random weights on the GPU, or on the CPU where there is none, and a batch for it.

    Raises:
        ModelError: There is no such model, it does not do the task or does not run on such a batch.
    """
    if names_function(workload.model):
        return _made(workload)
    config = _config(workload.model)
    task = workload.task or _usual_task(config)
    torch.manual_seed(SEED)
    with warnings.catch_warnings():  # of how a model is made, such as peft's of weights that are transposed
        warnings.simplefilter("ignore")
        model = _model(config, task, workload)
        if workload.lora_rank is not None:
            model = _with_lora(model, task, workload.lora_rank, config)
    model = model.to(_device()).train()
    sized = BuiltWorkload(model, _batch(config, task, workload, model.device), task)
    _try(sized, workload)
    return sized


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _made(workload: Workload) -> BuiltWorkload:
    torch.manual_seed(SEED)
    model, batch = make(workload.model, workload.batch, workload.length)
    device = _device()
    sized = BuiltWorkload(model.to(device).train(), {name: tensor.to(device) for name, tensor in batch.items()}, None)
    try:
        with torch.no_grad():
            shape = tuple(sized.loss(sized.batch).shape)
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"the model of {workload.model} does not give a loss for its batch: {type(error).__name__}: "
            f"{_first_line(error)}; it is called as model(**batch) and returns the loss, or an object with a loss"
        ) from error
    if shape not in ((), (1,)):
        raise ModelError(f"the loss of {workload.model} has the shape {shape}; it has to be one number")
    return sized


def _framework(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModelError(
            f"a Hugging Face model needs {name}, which is not installed; "
            "install DAF with its extra: pip install -e '.[hf]'"
        ) from error


def _config(name: str) -> Any:
    transformers = _framework("transformers")
    try:
        return transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        kind = "folder" if Path(name).is_dir() else "name"
        raise ModelError(
            f"no configuration is found for the {kind} {name!r}: {_first_line(error)}. Give a folder with a "
            "config.json, or the name of a model on the Hugging Face Hub, which has to be reachable or in the cache"
        ) from error


def _usual_task(config: Any) -> Task:
    auto = _framework("transformers.models.auto.modeling_auto")
    causal, masked = auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_MASKED_LM_MAPPING
    if config.is_encoder_decoder and type(config) in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        return "seq2seq-lm"
    return "causal-lm" if type(config) in causal and type(config) not in masked else "sequence-classification"


def _model(config: Any, task: Task, workload: Workload) -> Any:
    config.use_cache = False  # trainers switch it off, too
    transformers = _framework("transformers")
    try:
        return getattr(transformers, _CLASSES[task]).from_config(config)
    except ValueError as error:
        raise ModelError(
            f"{workload.model} cannot be made for the task {task!r}: {_first_line(error)}. "
            f"Pass --task with one that it does: {', '.join(TASKS)}"
        ) from error


def _with_lora(model: Any, task: Task, rank: int, config: Any) -> Any:
    peft = _framework("peft")
    try:
        return peft.get_peft_model(model, peft.LoraConfig(r=rank, task_type=_PEFT_TASKS[task], lora_dropout=0.1))
    except ValueError as error:
        raise ModelError(
            f"peft {peft.__version__} has no adapters for models of type {config.model_type!r}: {_first_line(error)}. "
            "Pass --full to train all parameters"
        ) from error


def _batch(config: Any, task: Task, workload: Workload, device: torch.device) -> dict[str, Tensor]:
    config = config.get_text_config()
    shape = workload.batch, workload.length
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(config.vocab_size, shape, generator=generator)
    if isinstance(config.pad_token_id, int):  # a row that ends with padding would be shorter
        tokens = torch.where(tokens == config.pad_token_id, (tokens + 1) % config.vocab_size, tokens)
    sizes = {"sequence-classification": shape[:1], "token-classification": shape}
    labels = torch.zeros(sizes[task], dtype=torch.long) if task in sizes else tokens
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _try(sized: BuiltWorkload, workload: Workload) -> None:
    """Refuses a model that one row does not run through."""
    try:
        with torch.no_grad():
            sized.loss_of(1)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{workload.model} does not run on a row of {workload.length} tokens for the task {sized.task!r}: "
            f"{_first_line(error)}. Pass a smaller --length, or another --task"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
