"""What a training with DAF is about to do, in words."""

from __future__ import annotations

from humanfriendly import format_size
from torch import nn
from torch.nn.parameter import is_lazy

from daf_core import DAFConfig


def title(config: DAFConfig, description: str) -> str:
    """Returns one line that says what is about to happen.

    Args:
        config: How activations are stored.
        description: What `describe` said of the model.
    """
    stored = {
        "exact": "exact forms only",
        "auto": f"as many bits as each place needs, {config.rounding}",
    }.get(str(config.precision), f"{config.precision} bits, {config.rounding}")
    if config.max_gradient_error is not None:
        stored += f", gradient error at most {config.max_gradient_error:g}"
    size = config.memory_budget
    budget = f"budget {format_size(size)}" if isinstance(size, int) else f"{size or 'no'} budget"
    budget += " for a step" if config.plans_steps else ""
    return f"DAF stores saved activations in {stored}; {budget}{_elastic(config)}; {description}"


def describe(model: nn.Module) -> str:
    """Returns what is trained, and where."""
    parameters = [parameter for parameter in model.parameters() if not is_lazy(parameter)]  # of the first pass
    if not parameters:
        return f"{type(model).__name__}, whose parameters the first batch makes"
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in parameters)
    return f"{type(model).__name__} on {parameters[0].device}, {trained:,} of {total:,} parameters trained"


def _elastic(config: DAFConfig) -> str:
    if config.elastic is None:
        return ""
    shares = {"time": config.elastic.time, "memory": config.elastic.memory}
    said = [f"{share:.0%} of a step's {name}" for name, share in shares.items() if share is not None]
    return ", ".join(["; elastic", *said])
