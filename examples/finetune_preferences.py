"""Tunes a language model with TRL, on texts, preferences or a reward, while DAF stores the activations.

    python examples/finetune_preferences.py --method dpo
    python examples/finetune_preferences.py --method dpo --model Qwen/Qwen2.5-0.5B

Needs no network: without --model a small Llama has random weights, and the byte-pair vocabulary is learnt from the
text, the docstrings of the standard library. The first words of a docstring are the prompt, the next ones the answer
that is preferred, and those of another docstring the one that is not. Look at daf/raw_mb and daf/held_mb in the log.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from daf_integrations import DAFCallback
from support.command_line import PRECISIONS, InputError, check_seq, loading, positive, precision
from support.learnt_tokens import learn_tokenizer
from support.stdlib_text import stdlib_corpus

PROMPT, ANSWER = 8, 40  # words


class Answers(NamedTuple):
    """A prompt, the answer that goes on from it, and one of another text."""

    prompt: str
    chosen: str
    rejected: str


def train(options: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Tunes LoRA adapters of the model; the Trainer prints loss and DAF's figures at every step."""
    trainer_class, config_class, own = METHODS[options.method]
    arguments, others = own(options)
    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=model,
            args=config_class(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=options.batch,
                learning_rate=options.learning_rate,
                gradient_checkpointing=False,  # DAF holds what layers save, instead of computing it twice
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,  # plain log lines instead of bars: they show DAF's own figures
                use_cpu=not gpu,
                bf16=gpu,
                seed=options.seed,
                **arguments,
            ),
            processing_class=tokenizer,
            peft_config=LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"),
            callbacks=[DAFCallback(precision=options.precision or "auto")],  # <- this one line is DAF
            **others,
        )
        trainer.train()


def answers(count: int) -> list[Answers]:
    """Returns so many prompts with two answers, from docstrings that are long enough."""
    texts = [text.split() for text in stdlib_corpus()]
    long = [words for words in texts if len(words) >= 2 * PROMPT][: count + 1]
    parts = [(" ".join(words[:PROMPT]), " " + " ".join(words[PROMPT : PROMPT + ANSWER])) for words in long]
    return [Answers(*one, other) for one, (_, other) in pairwise(parts)]


def texts(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what is for supervised tuning alone: arguments of its configuration, and of its trainer."""
    data = [{"text": each.prompt + each.chosen} for each in answers(options.steps * options.batch)]
    return {"max_length": options.seq}, {"train_dataset": Dataset.from_list(data)}


def preferences(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the same for preferences."""
    data = [each._asdict() for each in answers(options.steps * options.batch)]
    return {"max_length": options.seq}, {"train_dataset": Dataset.from_list(data)}


def rewards(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the same for a reward; a batch holds completions of one prompt."""
    data = [{"prompt": each.prompt} for each in answers(options.steps)]
    arguments = {"num_generations": options.batch, "max_completion_length": options.seq // 2}
    return arguments, {"train_dataset": Dataset.from_list(data), "reward_funcs": brevity}


def brevity(completions: list[str], **_: Any) -> list[float]:
    """Rewards short words, by the letters of completions of equally many tokens."""
    return [-len(completion) / 100 for completion in completions]


Own = Callable[[argparse.Namespace], tuple[dict[str, Any], dict[str, Any]]]
METHODS: dict[str, tuple[Any, Any, Own]] = {
    "sft": (SFTTrainer, SFTConfig, texts),
    "dpo": (DPOTrainer, DPOConfig, preferences),
    "grpo": (GRPOTrainer, GRPOConfig, rewards),
}


def load(options: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns the named model and its tokenizer, by default a small Llama with random weights and learnt tokens.

    Raises:
        InputError: the model cannot be loaded, or cannot read --seq tokens.
    """
    if options.model is None:
        tokenizer = learn_tokenizer(stdlib_corpus())
        tokenizer.pad_token = tokenizer.eos_token
        shape = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
        special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape, **special))
    else:
        with loading(options.model):
            model = AutoModelForCausalLM.from_pretrained(options.model)
            tokenizer = AutoTokenizer.from_pretrained(options.model)
    check_seq(options.seq, model.config.max_position_embeddings)
    return model, tokenizer


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser; every option has a default that needs no network."""
    parser = argparse.ArgumentParser(description="Tune a language model with TRL while DAF stores the activations.")
    add = parser.add_argument
    add("--method", choices=METHODS, default="dpo", help="texts, preferences or a reward (default: %(default)s)")
    add("--model", help="a Hub name such as Qwen/Qwen2.5-0.5B, or a folder; default: random weights, no network")
    add(
        "--precision",
        type=precision,
        help=f"bits of a stored activation: {', '.join(PRECISIONS)} (default: what each place needs)",
    )
    add("--steps", type=positive(int), default=12, help="optimizer steps (default: %(default)s)")
    add("--batch", type=positive(int), default=4, help="texts, pairs or completions in a step (default: %(default)s)")
    add("--seq", type=positive(int), default=128, help="tokens of a text at most (default: %(default)s)")
    add("--learning-rate", type=positive(float), default=1e-3, help="initial learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="decides random weights, adapters and order (default: %(default)s)")
    return parser


def main(arguments: Sequence[str]) -> None:
    """Runs the script with these command-line arguments."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    set_seed(options.seed)
    try:
        model, tokenizer = load(options)
    except InputError as error:
        parser.error(str(error))
    train(options, model, tokenizer)


if __name__ == "__main__":
    main(sys.argv[1:])
