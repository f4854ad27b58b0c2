"""Fine-tunes a Llama whose weights are frozen in 4 bits (QLoRA) on docstrings while DAF stores the activations.

    python examples/finetune_qlora.py

Needs bitsandbytes, and no network: without --model the Llama is small and has random weights. What to look at is the
memory: in the Trainer's own log, daf/raw_mb is what autograd saves in a step and daf/held_mb what DAF holds of it.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence

import torch
from peft import LoraConfig, TaskType, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from daf_integrations import DAFCallback
from finetune_gpt2 import load_tokenizer, token_blocks
from support.command_line import PRECISIONS, InputError, check_seq, loading, positive, precision
from support.learnt_tokens import LEARNT_TOKENS
from support.stdlib_text import stdlib_corpus

ON_GPU = torch.cuda.is_available()


def train(options: argparse.Namespace, model: nn.Module, blocks: list[dict[str, list[int]]]) -> None:
    """Fine-tunes adapters of all linear layers; the Trainer prints loss and DAF's figures at every step."""
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # DAF is there instead
    lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=16, lora_alpha=32, target_modules="all-linear")
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
                use_cpu=not ON_GPU,
                bf16=ON_GPU,
                seed=options.seed,
            ),
            train_dataset=blocks,
            callbacks=[DAFCallback(precision=options.precision)],  # <- this one line is DAF
        )
        trainer.train()


def quantization(bits: int) -> BitsAndBytesConfig:
    """Returns how weights are stored: as QLoRA's paper has it, or in 8 bits."""
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if ON_GPU else torch.float32,
    )


def load_model(options: argparse.Namespace) -> nn.Module:
    """Returns the named model with quantized weights, by default a small Llama with random ones.

    Raises:
        InputError: the model cannot be loaded, or cannot read --seq tokens.
    """
    name = options.model
    with tempfile.TemporaryDirectory() as folder, loading(name or "the small Llama"):
        if name is None:
            sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": options.layers}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
            LlamaForCausalLM(LlamaConfig(vocab_size=LEARNT_TOKENS, **sizes, **heads)).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            name or folder,
            quantization_config=quantization(options.bits),
            dtype=torch.bfloat16 if ON_GPU else torch.float32,
            device_map="auto" if ON_GPU else "cpu",
        )
    check_seq(options.seq, model.config.max_position_embeddings)
    return model


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser; every option has a default that needs no network."""
    parser = argparse.ArgumentParser(description="Fine-tune a quantized Llama (QLoRA) while DAF stores activations.")
    add = parser.add_argument
    add("--model", help="a Hub name such as Qwen/Qwen3-1.7B, or a folder; default: random weights, no network")
    add("--bits", type=int, choices=(4, 8), default=4, help="bits of a frozen weight (default: %(default)s)")
    add(
        "--layers",
        type=positive(int),
        default=4,
        help="blocks of the random Llama; a --model brings its own number (default: %(default)s)",
    )
    add(
        "--precision",
        type=precision,
        default=4,
        help=f"bits of a stored activation: {', '.join(PRECISIONS)} (default: %(default)s)",
    )
    add("--steps", type=positive(int), default=12, help="optimizer steps (default: %(default)s)")
    add("--batch", type=positive(int), default=4, help="blocks of text in a step (default: %(default)s)")
    add("--seq", type=positive(int), default=256, help="tokens in a block of text (default: %(default)s)")
    add("--learning-rate", type=positive(float), default=2e-3, help="initial learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="decides random weights, adapters and order (default: %(default)s)")
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
