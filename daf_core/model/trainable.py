"""Whether there is anything to train."""

from __future__ import annotations

from torch import nn

from daf_core.errors import ConfigError, NothingToTrainError, shown


def check_trainable(model: object) -> None:
    """Checks that a model has parameters to train.

    Raises:
        ConfigError: It is no module.
        NothingToTrainError: No parameter requires a gradient.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"a model is a torch.nn.Module, got {shown(model)}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise NothingToTrainError(
            f"{type(model).__name__} has no parameter that requires a gradient, so nothing is saved for backward; "
            "set requires_grad on the parameters to train, for example with peft.get_peft_model"
        )
