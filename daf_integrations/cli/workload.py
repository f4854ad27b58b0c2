"""The model that commands run, with random weights, and a batch for it: what a step takes does not depend on values.

It is one of transformers, or what a function in a file of the user's makes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from daf_core.errors import ModelError
from daf_core.plan.run.retry import is_out_of_memory

Task = Literal["causal-lm", "masked-lm", "seq2seq-lm", "sequence-classification", "token-classification"]

TASKS: tuple[Task, ...] = get_args(Task)

_CLASSES: dict[Task, tuple[str, str | None]] = {
    "causal-lm": ("AutoModelForCausalLM", "CAUSAL_LM"),
    "masked-lm": ("AutoModelForMaskedLM", None),
    "seq2seq-lm": ("AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM"),
    "sequence-classification": ("AutoModelForSequenceClassification", "SEQ_CLS"),
    "token-classification": ("AutoModelForTokenClassification", "TOKEN_CLS"),
}
"""The class of transformers and the task of peft."""

SEED = 0

CONTRACT = (
    "it is called with the rows of a batch and their length, and returns (model, batch): an nn.Module that is called "
    "with the batch as keywords and returns its loss, and a dictionary of tensors with that many rows"
)

MODULE = "__daf_model__"  # name of a user's file as a module; that of the file may be one of another module


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is to be trained."""

    model: str  # name of a Hugging Face model, a folder with its config.json, or FILE.py:FUNCTION
    batch: int  # rows of a batch
    length: int  # tokens of a row
    # What the model is trained for; None for "causal-lm" with models that predict the next token only, "seq2seq-lm"
    # with an encoder and a decoder, and "sequence-classification" with others.
    task: Task | None = None
    lora_rank: int | None = None  # rank of LoRA adapters where peft puts them by default; None to train all parameters


@dataclass(frozen=True)
class BuiltWorkload:
    """A model in training mode, a random batch, and the task; None for what a function of the user's has made."""

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

    @property
    def parameter(self) -> nn.Parameter:
        """The first parameter, which says where the model is."""
        return next(self.model.parameters())

    @property
    def dtype(self) -> str:
        """The type of its numbers, such as "float32"."""
        return str(self.parameter.dtype).removeprefix("torch.")


def build(workload: Workload, device: str | None = None) -> BuiltWorkload:
    """Makes a model with random weights, and a batch for it.

    Args:
        workload: What is to be trained.
        device: By default the GPU, or the CPU where there is none. On "meta" nothing has values; see `without_values`.

    Raises:
        ModelError: There is no such model, it does not do the task or does not run on such a batch.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED)
    if names_function(workload.model):
        model, batch, task = *_made(workload.model, workload.batch, workload.length), None
    else:
        config = _config(workload.model)
        task = workload.task or _usual_task(config)
        with torch.device(device) if device == "meta" else nullcontext():
            model = _model(config, task, workload)
        batch = _batch(config, task, workload)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    built = BuiltWorkload(model.to(device).train(), batch, task)
    _check(built, workload)
    return built


def names_function(model: str) -> bool:
    """Says whether a model is named as FILE.py:FUNCTION."""
    return model.rpartition(":")[0].endswith(".py")


def _check(built: BuiltWorkload, workload: Workload) -> None:
    """Refuses a model of transformers that does not run on a row, and a user's that gives no loss for its batch."""
    own = built.task is None
    of_users = (KeyError, AttributeError) if own else ()
    try:
        if own:
            loss = _loss_with_graph(built)
        else:
            with torch.no_grad():
                loss = built.loss_of(1)
    except (RuntimeError, ValueError, IndexError, TypeError, *of_users) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"the model of {workload.model} does not give a loss for its batch: {type(error).__name__}: "
            f"{_first_line(error)}; it is called as model(**batch) and returns the loss, or an object with a loss"
            if own
            else f"{workload.model} does not run on a row of {workload.length} tokens for the task {built.task!r}: "
            f"{_first_line(error)}. Pass a smaller --length, or another --task"
        ) from error
    if own and loss.shape not in ((), (1,)):
        raise ModelError(f"the loss of {workload.model} has the shape {tuple(loss.shape)}; it has to be one number")
    if own and not loss.requires_grad:
        from daf_core.saved_tensors.classify import check_trainable  # with the kernels, which others do not need

        check_trainable(built.model)
        raise ModelError("no gradient flows from the loss to the model; return the loss itself, not loss.detach()")


class _ReadError(Exception):
    """Something asks for a saved tensor of which nothing was kept."""


def _loss_with_graph(built: BuiltWorkload) -> Tensor:
    """Returns the loss of the batch, without the memory of what is saved, unless forward itself runs a backward."""

    def read(_: object) -> Tensor:
        raise _ReadError

    try:
        with saved_tensors_hooks(lambda _: None, read):
            return built.loss(built.batch)
    except _ReadError:
        return built.loss(built.batch)


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
    except Exception as error:  # the hub has classes of its own, as for a field of another type
        kind = "folder" if Path(name).is_dir() else "name"
        if name.endswith(".py"):
            raise ModelError(f"{name} names no function in it; give MODEL as FILE.py:FUNCTION. {CONTRACT}") from error
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
    name, peft_task = _CLASSES[task]
    with warnings.catch_warnings():  # of how a model is made, such as peft's of weights that are transposed
        warnings.simplefilter("ignore")
        try:
            model = getattr(_framework("transformers"), name).from_config(config)
        except ValueError as error:
            raise ModelError(
                f"{workload.model} cannot be made for the task {task!r}: {_first_line(error)}. "
                f"Pass --task with one that it does: {', '.join(TASKS)}"
            ) from error
        if workload.lora_rank is None:
            return model
        peft = _framework("peft")
        try:
            adapters = peft.LoraConfig(r=workload.lora_rank, task_type=peft_task, lora_dropout=0.1)
            return peft.get_peft_model(model, adapters)
        except ValueError as error:
            raise ModelError(
                f"peft {peft.__version__} has no adapters for models of type {config.model_type!r}: "
                f"{_first_line(error)}. Pass --full to train all parameters"
            ) from error


def _batch(config: Any, task: Task, workload: Workload) -> dict[str, Tensor]:
    config = config.get_text_config()
    shape = workload.batch, workload.length
    generator = torch.Generator("cpu").manual_seed(SEED)
    tokens = torch.randint(config.vocab_size, shape, generator=generator, device="cpu")
    if isinstance(config.pad_token_id, int):  # a row that ends with padding would be shorter
        tokens = torch.where(tokens == config.pad_token_id, (tokens + 1) % config.vocab_size, tokens)
    sizes = {"sequence-classification": shape[:1], "token-classification": shape}
    labels = tokens.new_zeros(sizes[task]) if task in sizes else tokens
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def _made(name: str, rows: int, length: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns the model and the batch of a function that is named as FILE.py:FUNCTION."""
    file, _, function = name.rpartition(":")
    try:
        made = _function(Path(file), function)(rows, length)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{name} raised {type(error).__name__}: {error}; {CONTRACT}") from error
    parts = cast("tuple[Any, ...]", made) if isinstance(made, tuple) else ()
    if len(parts) != 2 or not isinstance(parts[0], nn.Module) or not isinstance(parts[1], Mapping):
        raise ModelError(f"{name} returned {_kind(made)}; {CONTRACT}")
    if any(each.is_meta for each in parts[0].parameters()):
        raise ModelError(f"{name} returned a model on device 'meta', which has no values; build it on the CPU")
    batch = dict(cast("Mapping[str, Any]", parts[1]))
    if not batch:
        raise ModelError(f"{name} returned an empty batch; {CONTRACT}")
    for key, value in batch.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (rows,):
            raise ModelError(f"{name} returned a batch of {rows} rows in which {key!r} is {_kind(value)}; {CONTRACT}")
    return parts[0], batch


def _function(file: Path, name: str) -> Callable[[int, int], object]:
    if not file.is_file():
        raise ModelError(f"there is no file {str(file)!r}; give MODEL as FILE.py:FUNCTION")
    spec: Any = spec_from_file_location(MODULE, file)
    module = module_from_spec(spec)
    sys.modules[MODULE] = module  # dataclasses look their module up there
    sys.path.insert(0, str(file.resolve().parent))  # as if Python ran the file
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    found = getattr(module, name, None)
    if not callable(found):
        functions = [each for each, value in vars(module).items() if callable(value) and not isinstance(value, type)]
        there = ", ".join(functions) or "none"
        raise ModelError(f"{file} has no function {name!r}; functions in it: {there}. {CONTRACT}")
    return found


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_kind, cast('tuple[object, ...]', value)))})"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
