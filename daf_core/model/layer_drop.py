"""Layers that are skipped at random while a model trains (LayerDrop), as in BART, M2M100 and wav2vec 2.0."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from torch import nn

NAMES = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "speech_encoder_layerdrop")
"""What models of transformers call the share of steps in which a layer is skipped, in modules and configurations."""


class LayerDrop(NamedTuple):
    """A share that is not zero: its owner, a module or the configuration of one, its name there and that module."""

    owner: Any
    name: str
    rate: float
    module: nn.Module


def layer_drops(model: nn.Module) -> Iterator[LayerDrop]:
    """Yields the shares of a model, those of configurations first."""
    configured = [(getattr(module, "config", None), module) for module in model.modules()]
    for owner, module in (*configured, *((module, module) for module in model.modules())):
        for name in NAMES:
            rate = getattr(owner, name, 0.0)
            if isinstance(rate, float | int) and rate:
                yield LayerDrop(owner, name, rate, module)


@contextmanager
def all_layers(model: nn.Module) -> Generator[None]:
    """Inside, no layer is skipped, but where a share cannot be set."""
    with ExitStack() as stack:
        for owner, name, rate, _ in list(layer_drops(model)):
            of_class = name not in getattr(owner, "__dict__", {name: rate})
            with suppress(AttributeError):  # what cannot be set stays
                setattr(owner, name, 0.0)
                stack.callback(partial(delattr, owner, name) if of_class else partial(setattr, owner, name, rate))
        yield
