"""Fine-tunes GPT-2 with LoRA on the standard library's docstrings while DAF stores the activations.

    python examples/finetune_gpt2.py

Needs no network: without --model the weights are random, in GPT-2's real configuration, and the byte-pair
vocabulary is learnt from the text itself. The loss then starts near that of guessing; what to look at is the
memory: in the Trainer's own log, daf/raw_mb is what autograd saves in a step and daf/held_mb what DAF holds of it.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from daf_integrations import DAFCallback
from support.command_line import PRECISIONS, InputError, check_seq, loading, positive, precision
from support.learnt_tokens import learn_tokenizer
from support.stdlib_text import stdlib_corpus


def train(options: argparse.Namespace, model: GPT2LMHeadModel, blocks: list[dict[str, list[int]]]) -> None:
    """Fine-tunes the model; the Trainer prints loss and DAF's figures at every step."""
    lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=get_peft_model(model, lora),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=options.batch,
                learning_rate=options.learning_rate,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,  # plain log lines instead of bars: they show DAF's own figures
                use_cpu=not torch.cuda.is_available(),
                seed=options.seed,
            ),
            train_dataset=blocks,
            callbacks=[DAFCallback(precision=options.precision)],  # <- this one line is DAF
        )
        trainer.train()


def token_blocks(texts: list[str], tokenizer: PreTrainedTokenizerBase, seq: int) -> list[dict[str, list[int]]]:
    """Joins the texts, with the end-of-text token between them, and cuts them into blocks of `seq` tokens."""
    joined = tokenizer.eos_token.join(texts)
    tokens = tokenizer(joined, verbose=False)["input_ids"]
    blocks = [tokens[start : start + seq] for start in range(0, len(tokens) - seq + 1, seq)]
    return [{"input_ids": block, "labels": block} for block in blocks]


def load_model(options: argparse.Namespace) -> GPT2LMHeadModel:
    """Returns the named GPT-2, by default one with random weights.

    Raises:
        InputError: the model cannot be loaded, is no GPT-2, or cannot read --seq tokens.
    """
    if options.model is None:
        model = GPT2LMHeadModel(GPT2Config(n_layer=options.layers))
    else:
        with loading(options.model):
            model = AutoModelForCausalLM.from_pretrained(options.model)
    if not isinstance(model, GPT2LMHeadModel):
        raise InputError(f"--model {options.model}: is a {model.config.model_type}; give a GPT-2, such as gpt2-medium")
    check_seq(options.seq, model.config.n_positions)
    return model


def load_tokenizer(options: argparse.Namespace, texts: list[str]) -> PreTrainedTokenizerBase:
    """Returns the named model's tokenizer, by default one learnt from the texts."""
    if options.model is None:
        return learn_tokenizer(texts)
    with loading(options.model):
        return AutoTokenizer.from_pretrained(options.model)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser; every option has a default that needs no network."""
    parser = argparse.ArgumentParser(description="Fine-tune GPT-2 with LoRA while DAF stores the activations.")
    add = parser.add_argument
    add("--model", help="a GPT-2: a Hub name such as gpt2, or a folder; default: random weights, no network")
    add(
        "--layers",
        type=positive(int),
        default=12,
        help="blocks of the random GPT-2; a --model brings its own number (default: %(default)s)",
    )
    add(
        "--precision",
        type=precision,
        default=4,
        help=f"bits of a stored activation: {', '.join(PRECISIONS)} (default: %(default)s)",
    )
    add("--steps", type=positive(int), default=12, help="optimizer steps (default: %(default)s)")
    add("--batch", type=positive(int), default=2, help="blocks of text in a step (default: %(default)s)")
    add("--seq", type=positive(int), default=256, help="tokens in a block of text (default: %(default)s)")
    add("--learning-rate", type=positive(float), default=5e-3, help="initial learning rate (default: %(default)s)")
    add(
        "--seed", type=int, default=0, help="decides random weights, adapters, order and dropout (default: %(default)s)"
    )
    return parser


def main(arguments: Sequence[str]) -> None:
    """Runs the script with these command-line arguments."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    set_seed(options.seed)
    try:
        model = load_model(options)
        texts = stdlib_corpus()
        tokenizer = load_tokenizer(options, texts)
    except InputError as error:
        parser.error(str(error))
    train(options, model, token_blocks(texts, tokenizer, options.seq))


if __name__ == "__main__":
    main(sys.argv[1:])
