"""What the command lines of the examples share: readers of single options, and the error for bad ones."""

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PRECISIONS = ("exact", "8", "4", "2", "1")
_KINDS = {int: "a whole number", float: "a number"}


class InputError(ValueError):
    """What the user asked for cannot be done; the message says what to change."""


def precision(text: str) -> int | str:
    """Reads --precision: "exact", or a number of bits."""
    if text not in PRECISIONS:
        raise argparse.ArgumentTypeError(f"{text} is not supported; choose one of {', '.join(PRECISIONS)}")
    return text if text == "exact" else int(text)


def positive(number: type[int] | type[float]) -> Callable[[str], float]:
    """Returns a reader for options that must be above zero."""

    def read(text: str) -> float:
        try:
            value = number(text)
        except ValueError:
            value = 0
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not allowed; give {_KINDS[number]} above 0")
        return value

    return read


def check_seq(seq: int, longest: int) -> None:
    """Refuses a --seq that a model cannot learn from.

    Raises:
        InputError: It is below 2, or above the longest row that the model knows.
    """
    if not 2 <= seq <= longest:
        raise InputError(f"--seq {seq}: the model learns from 2 to {longest} tokens; give a number in that range")


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Turns a failure to load a model that the user named into an `InputError`."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise InputError(
            f"--model {model}: cannot be loaded ({error}). Give a folder that holds a model, a name on the "
            "Hugging Face Hub (needs a connection), or leave --model out for the default"
        ) from error
