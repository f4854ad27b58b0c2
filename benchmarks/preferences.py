"""Language models tuned by the trainers of TRL: losses and held bytes, with DAF and without.

A small Llama with random weights reads texts of a random walk over words: each word has few that may follow it.
Answers that walk on are preferred to those that jump among half of the words, but for every fifth pair, whose labels
are wrong, so that no loss falls to zero.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast, Trainer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from benchmarks.harness import benchmark_parser, megabytes, whole_number, write_results
from daf_integrations import DAFCallback
from daf_integrations.cli.bench.tables import Grid

WORDS = 190
FOLLOWERS = 4  # words that may follow a word
PROMPT, ANSWER = 8, 24  # words
WRONG = 5  # of so many pairs one has its labels exchanged
SETTLED = 20  # steps at the end whose mean is shown

OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
    "bf16": False,
}
"""TRL trains in bfloat16 unless it is told not to."""

GENERATED: dict[str, Any] = {"num_generations": 4, "max_completion_length": 16}

CALLBACKS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "daf-exact": {"precision": "exact"},
    "daf-auto": {"audit_every": 10},
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = [*(f"w{number}" for number in range(WORDS)), "<pad>", "<eos>", "<unk>"]
    split = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=split, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def llama(kind: Any = LlamaForCausalLM, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": WORDS + 3, "pad_token_id": WORDS}
    return kind(LlamaConfig(**sizes, **heads, eos_token_id=WORDS + 1, bos_token_id=None, **options))


@cache
def _followers() -> list[list[int]]:
    chance = random.Random(0)
    return [chance.sample(range(WORDS), FOLLOWERS) for _ in range(WORDS)]


@dataclass(frozen=True)
class Pair:
    """A prompt, an answer that walks on from it, and one that jumps."""

    prompt: str
    good: str
    bad: str


def pairs(rows: int) -> list[Pair]:
    chance = random.Random(1)
    found: list[Pair] = []
    for _ in range(rows):
        walk = [chance.randrange(WORDS)]
        while len(walk) < PROMPT + ANSWER:
            walk.append(chance.choice(_followers()[walk[-1]]))
        jumps = [chance.randrange(WORDS // 2) for _ in range(ANSWER)]
        # An answer begins with a space: the prompt and it are tokenized together.
        found.append(Pair(_text(walk[:PROMPT]), f" {_text(walk[PROMPT:])}", f" {_text(jumps)}"))
    return found


def _text(numbers: Sequence[int]) -> str:
    return " ".join(f"w{number}" for number in numbers)


def _is_wrong(row: int) -> bool:
    return row % WRONG == WRONG - 1


def _texts(rows: int) -> Dataset:
    return Dataset.from_dict({"text": [pair.prompt + pair.good for pair in pairs(rows)]})


def _prompts(rows: int) -> Dataset:
    return Dataset.from_dict({"prompt": [pair.prompt for pair in pairs(rows)]})


def preferences(rows: int) -> Dataset:
    found = [(pair.bad, pair.good) if _is_wrong(row) else (pair.good, pair.bad) for row, pair in enumerate(pairs(rows))]
    chosen, rejected = zip(*found, strict=True)
    return Dataset.from_dict({**_prompts(rows).to_dict(), "chosen": chosen, "rejected": rejected})


def _judged(rows: int) -> Dataset:
    good = [row % 2 == 0 for row in range(rows)]
    answers = [pair.good if is_good else pair.bad for pair, is_good in zip(pairs(rows), good, strict=True)]
    labels = [is_good is not _is_wrong(row) for row, is_good in enumerate(good)]
    return Dataset.from_dict({**_prompts(rows).to_dict(), "completion": answers, "label": labels})


def reward(completions: list[str], **_: Any) -> list[float]:
    """Rewards completions of many different words."""
    return [len(set(completion.split())) / GENERATED["max_completion_length"] for completion in completions]


@dataclass(frozen=True)
class Kind:
    """A trainer of TRL, with what it needs, and the figure of its log that says how well it learns."""

    trainer: type[Trainer]
    config: Callable[..., Any]
    data: Callable[[int], Dataset]
    model: Callable[[], Any] = llama
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    arguments: Callable[[], dict[str, Any]] = dict[str, Any]
    figure: str = "loss"


KINDS = {
    "sft": Kind(SFTTrainer, SFTConfig, _texts),
    "dpo": Kind(DPOTrainer, DPOConfig, preferences, arguments=lambda: {"ref_model": llama()}),
    # Its loss is zero by definition: advantages have a mean of zero.
    "grpo": Kind(
        GRPOTrainer,
        GRPOConfig,
        _prompts,
        options=GENERATED,
        arguments=lambda: {"reward_funcs": reward},
        figure="reward",
    ),
    "reward": Kind(
        RewardTrainer, RewardConfig, preferences, lambda: llama(LlamaForSequenceClassification, num_labels=1)
    ),
    "kto": Kind(KTOTrainer, KTOConfig, _judged, arguments=lambda: {"ref_model": llama()}),
    # As opposed to those above it computes logits, of which it takes the `logsumexp`.
    "orpo": Kind(ORPOTrainer, ORPOConfig, preferences, options={"remove_unused_columns": False}),
}


def make(kind: str, folder: Path | str, *callbacks: Any, steps: int, model: Any = None, **options: Any) -> Trainer:
    """Returns a trainer of a kind for a number of steps; `options` go to its configuration."""
    found = KINDS[kind]
    return found.trainer(
        model=found.model() if model is None else model,
        args=found.config(str(folder), max_steps=steps, **{**OPTIONS, **found.options, **options}),
        train_dataset=found.data(8 * steps),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        **found.arguments(),
    )


def train(trainer: Trainer) -> list[dict[str, Any]]:
    """Returns the log of a training, an entry for each step."""
    torch.manual_seed(0)  # completions are drawn
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    model: Any = trainer.model
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What one training gave.

    Attributes:
        figure: The name in the log of what `mean` is the mean of, over the last steps.
        equal: Whether all figures and weights are those of plain training.
        error: Relative error of the gradient, as the last audit measured it; None without audits.
        raw_bytes: What autograd alone saves for a step.
        held_bytes: What is held instead.
    """

    kind: str
    method: str
    figure: str
    mean: float
    equal: bool
    error: float | None
    raw_bytes: float
    held_bytes: float


def measure(kind: str, steps: int) -> list[Tuning]:
    """Trains with each method from the same weights, on the same data."""
    found: list[Tuning] = []
    plain: tuple[list[Any], dict[str, Tensor]] | None = None
    for method, options in CALLBACKS.items():
        callbacks = [] if options is None else [DAFCallback(**options)]
        with tempfile.TemporaryDirectory() as folder:
            trainer = make(kind, folder, *callbacks, steps=steps, gradient_checkpointing=False)
            log = train(trainer)
        figures = [entry[KINDS[kind].figure] for entry in log]
        losses, trained = [entry["loss"] for entry in log], weights(trainer)
        plain = plain or (losses, trained)
        same = losses == plain[0] and all(torch.equal(plain[1][name], each) for name, each in trained.items())
        found.append(
            Tuning(
                kind=kind,
                method=method,
                figure=KINDS[kind].figure,
                mean=statistics.mean(figures[-SETTLED:]),
                equal=same,
                error=log[-1].get("daf/gradient_error"),
                raw_bytes=1e6 * log[-1].get("daf/raw_mb", 0.0),
                held_bytes=1e6 * log[-1].get("daf/held_mb", 0.0),
            )
        )
    return found


def grid(tunings: Sequence[Tuning]) -> Grid:
    """Returns the table of what was measured."""
    headings = [
        "trainer",
        "method",
        "figure",
        f"mean of {SETTLED} steps",
        "equal",
        "gradient error",
        "saved MB",
        "held MB",
    ]
    return Grid("trainers of TRL", headings, [_row(each) for each in tunings])


def _row(each: Tuning) -> list[str]:
    error = "-" if each.error is None else f"{each.error:.3f}"
    sizes = [megabytes(size, 2) if size else "-" for size in (each.raw_bytes, each.held_bytes)]
    return [each.kind, each.method, each.figure, f"{each.mean:.4f}", "yes" if each.equal else "no", error, *sizes]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints its table and writes the files asked for."""
    parser = benchmark_parser(
        "preferences", "Trains a small Llama by TRL's trainers, with DAF and without.", "json", "markdown", threads=1
    )
    parser.add_argument("--steps", type=whole_number(1), default=100, help="steps of each training")
    parser.add_argument(
        "--trainers", nargs="+", choices=KINDS, default=list(KINDS), help="which of TRL's; default: all"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    disable_progress_bars()
    warnings.filterwarnings("ignore", module="trl")  # TRL says of its own interface that it will change
    console = Console(stderr=True)
    tunings = [
        each for kind in track(options.trainers, "training", console=console) for each in measure(kind, options.steps)
    ]
    write_results(options, {"steps": options.steps, "results": tunings}, [grid(tunings)])


if __name__ == "__main__":
    main()
