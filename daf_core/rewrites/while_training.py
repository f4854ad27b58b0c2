"""What a training rewrites in its model, with or without a budget."""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn

from daf_core.config import DAFConfig
from daf_core.rewrites.base import Undo
from daf_core.rewrites.frozen_inputs import release_frozen_inputs
from daf_core.rewrites.loss_option import chunk_loss
from daf_core.rewrites.registry import GELU, OperatorRewrites


def rewrite_model(config: DAFConfig, model: nn.Module, called: nn.Module | None = None) -> Undo:
    """Rewrites what takes memory in any training, and no time; `called` is what wraps the model, if something does.

    In exact mode, whose results are plain's bit for bit, inputs of frozen layers are released, and nothing else unless
    the option `chunked_loss` says so.

    Returns:
        What undoes it, to be called once.

    Raises:
        ConfigError: ``chunked_loss=True``, and the model's loss cannot be computed so.
    """
    with ExitStack() as undo:
        undo.callback(release_frozen_inputs(model))
        if config.precision != "exact":
            gelus = OperatorRewrites(model, {GELU})
            gelus.apply()
            undo.callback(gelus.undo)
        if (undo_chunks := chunk_loss(config, model if called is None else called)) is not None:
            undo.callback(undo_chunks)
        return undo.pop_all().close
