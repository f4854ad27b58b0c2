"""Fine-tunes a pre-trained encoder with LoRA twice in about the same time: fully, and elastically in more steps.

    python examples/finetune_elastic.py

Needs no network, as finetune_text_classifier.py. Elastic training lets most steps train the upper blocks alone, whose
backward pass is short, so that the time of 80 full steps is enough for 133 at --time 0.6.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence

from peft import LoraConfig, TaskType, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    set_seed,
)

from daf_integrations import DAFCallback
from finetune_text_classifier import TokenizedTexts, accuracy, training_arguments
from support.classifier_data import load_task
from support.classifier_options import load_tokenizer, packaged_encoder
from support.command_line import InputError, positive
from support.text_task import TextTask

BATCH, SEQ = 32, 64


def train(
    options: argparse.Namespace,
    task: TextTask,
    tokenizer: PreTrainedTokenizerBase,
    steps: int,
    callbacks: list[TrainerCallback],
) -> tuple[float, float]:
    """Fine-tunes so many steps, and returns the seconds that it took and the accuracy on the test texts."""
    set_seed(options.seed)
    encoder = packaged_encoder()
    model = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=len(task.label_names))
    model = get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16))
    with tempfile.TemporaryDirectory() as folder:
        recipe = {"steps": steps, "epochs": None, "batch": BATCH, "learning_rate": 5e-3}
        trainer = Trainer(
            model=model,
            args=training_arguments(argparse.Namespace(**recipe), folder, options.seed),
            train_dataset=TokenizedTexts(task.train, tokenizer, SEQ),
            eval_dataset=TokenizedTexts(task.test, tokenizer, SEQ),
            compute_metrics=accuracy,
            callbacks=callbacks,
        )
        start = time.perf_counter()
        trainer.train()
        return time.perf_counter() - start, trainer.evaluate()["eval_accuracy"]


def main(arguments: Sequence[str]) -> None:
    """Runs the script with these command-line arguments."""
    parser = argparse.ArgumentParser(description="Fine-tune with LoRA fully, and elastically in more steps.")
    parser.add_argument("--time", type=share, default=0.6, help="mean time of a step, of a full one (%(default)s)")
    parser.add_argument("--steps", type=positive(int), default=80, help="full optimizer steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides split, order, dropout and adapters (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        tokenizer = load_tokenizer(str(packaged_encoder()), SEQ)
        task = load_task(None, None, options.seed)
    except InputError as error:
        parser.error(str(error))
    table = Table("training", "steps", "seconds", "test accuracy")
    elastic = DAFCallback(precision="exact", elastic={"time": options.time})  # <- all that there is to it
    runs: list[tuple[str, int, list[TrainerCallback]]] = [
        ("full", options.steps, []),
        (f"{options.time:.0%} of the time", round(options.steps / options.time), [elastic]),
    ]
    for title, steps, callbacks in runs:
        Console().rule(title)
        seconds, found = train(options, task, tokenizer, steps, callbacks)
        table.add_row(title, str(steps), f"{seconds:.0f}", f"{found:.1%}")
    Console().print(table)


def share(text: str) -> float:
    """Parses a share above 0 and below 1."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"got {text}; give a share above 0 and below 1, such as 0.6")
    return value


if __name__ == "__main__":
    main(sys.argv[1:])
