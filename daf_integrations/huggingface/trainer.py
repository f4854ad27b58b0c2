"""Hugging Face: a Trainer with DAF inside, for those who subclass rather than add callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Trainer

from daf_core import ConfigError, DAFConfig
from daf_integrations.huggingface.callback import DAFCallback


class DAFTrainerMixin:
    """Adds a `DAFCallback` to a Trainer; to be named before it: ``class Mine(DAFTrainerMixin, SFTTrainer)``.

    A Trainer that exists already needs none: ``trainer.add_callback(DAFCallback(precision=4))``.

    Args:
        args: Those of the Trainer.
        daf: The configuration, or a mapping of its fields; None for the defaults.
        callbacks: As for the Trainer. A `DAFCallback` among them is the one that is used.
        kwargs: Those of the Trainer.

    Raises:
        ConfigError: A field is unknown or its value is not allowed, or both `daf` and a `DAFCallback` are given.
    """

    def __init__(
        self,
        *args: Any,
        daf: DAFConfig | Mapping[str, Any] | None = None,
        callbacks: list[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        given = list(callbacks or [])
        if not any(isinstance(each, DAFCallback) or each is DAFCallback for each in given):
            given.append(DAFCallback(daf))
        elif daf is not None:
            raise ConfigError("both daf and a DAFCallback are given; leave one out")
        super().__init__(*args, **{**kwargs, "callbacks": given})


class DAFTrainer(DAFTrainerMixin, Trainer):
    """A Trainer whose activations are compressed.

    Example:
        >>> DAFTrainer(model, args, train_dataset=data, daf={"memory_budget": "600MB"}).train()
    """
