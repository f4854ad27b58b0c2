"""Argument types that the benchmarks share; a wrong value is answered with what is allowed and what to do."""

import argparse
from collections.abc import Callable, Iterable

import torch

from daf_integrations.cli.bench.methods import METHODS, is_method


def whole_number(smallest: int, largest: int | None = None) -> Callable[[str], int]:
    """Returns an argument type for whole numbers from ``smallest`` to ``largest``."""
    allowed = f"{smallest} or more" if largest is None else f"{smallest} to {largest}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if value < smallest or (largest is not None and value > largest):
            raise argparse.ArgumentTypeError(f"got {text!r}; allowed is a whole number, {allowed}")
        return value

    return parse


def usable_device(text: str) -> str:
    """Parses the kind of device to measure on, which has to be there."""
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed are cpu and cuda")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("got 'cuda', and torch sees no GPU here; pass cpu, or run it where one is")
    return text


def method_names(
    allowed: Iterable[str] = METHODS, known: Callable[[str], bool] = is_method
) -> Callable[[str], tuple[str, ...]]:
    """Returns an argument type for a comma-separated list of methods that ``plain`` is one of.

    Args:
        allowed: Names for the message; sizes, bounds and shares in them are examples.
        known: Says whether a name is allowed.
    """

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(","))
        unknown = [name for name in names if not known(name)]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"got {', '.join(map(repr, unknown))}; allowed are {', '.join(allowed)}; separated by commas"
            )
        if len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"got {text!r}, which repeats a method; name each one once")
        if "plain" not in names:
            raise argparse.ArgumentTypeError(
                f"got {text!r} without 'plain', which the others are compared with; add it"
            )
        return names

    return parse
