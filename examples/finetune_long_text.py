"""Fine-tunes a Llama with LoRA on rows of thousands of tokens, one at a time, within a memory budget for each step.

    python examples/finetune_long_text.py
    python examples/finetune_long_text.py --model meta-llama/Llama-3.2-1B --length 32768 --budget 6GB

Needs no network: without --model the weights are random, and the vocabulary is learnt from the text. What to look at is
the plan that DAF logs before the first step. A row cannot be split into micro-batches, so the plan recomputes blocks,
stores their inputs in a few bits, and has the loss and the MLPs work on parts of the row.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

from daf_integrations import DAFCallback
from finetune_gpt2 import token_blocks
from support.command_line import InputError, loading, positive
from support.learnt_tokens import learn_tokenizer
from support.stdlib_text import stdlib_corpus


def train(options: argparse.Namespace, model: PreTrainedModel, rows: list[dict[str, list[int]]]) -> None:
    """Fine-tunes the model; the Trainer prints loss and DAF's figures at every step."""
    lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, target_modules="all-linear")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=get_peft_model(model, lora),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=1,
                learning_rate=options.learning_rate,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
                seed=options.seed,
            ),
            train_dataset=rows,
            callbacks=[DAFCallback(memory_budget=options.budget)],  # <- this one line is DAF
        )
        trainer.train()


def random_llama(options: argparse.Namespace, vocabulary: int) -> LlamaForCausalLM:
    """Returns a small Llama with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=options.length,
        )
    )


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser; every option has a default that needs no network."""
    parser = argparse.ArgumentParser(description="Fine-tune a language model on long rows within a memory budget.")
    add = parser.add_argument
    add("--model", help="a causal language model: a Hub name, or a folder; default: random weights, no network")
    add("--layers", type=positive(int), default=4, help="blocks of the random Llama (default: %(default)s)")
    add("--length", type=positive(int), default=2048, help="tokens of a row (default: %(default)s)")
    add("--budget", default="128MB", help="memory of a step beside model and optimizer (default: %(default)s)")
    add("--steps", type=positive(int), default=4, help="optimizer steps (default: %(default)s)")
    add("--learning-rate", type=positive(float), default=1e-3, help="initial learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="decides random weights, adapters and order (default: %(default)s)")
    return parser


def main(arguments: Sequence[str]) -> None:
    """Runs the script with these command-line arguments."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("daf").setLevel(logging.INFO)  # the plan
    set_seed(options.seed)
    texts = stdlib_corpus()
    try:
        if options.model is None:
            tokenizer = learn_tokenizer(texts)
            model = random_llama(options, len(tokenizer))
        else:
            with loading(options.model):
                model = AutoModelForCausalLM.from_pretrained(options.model)
                tokenizer = AutoTokenizer.from_pretrained(options.model)
        longest = model.config.max_position_embeddings
        if options.length > longest:
            raise InputError(f"--length {options.length}: the model knows {longest} positions; give at most as many")
    except InputError as error:
        parser.error(str(error))
    train(options, model, token_blocks(texts, tokenizer, options.length))


if __name__ == "__main__":
    main(sys.argv[1:])
