"""What of a model keeps its steps from being planned: what a look at it tells, before training."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from daf_core.autograd.torch_private import is_compiled
from daf_core.distributed import communication
from daf_core.errors import ConfigError
from daf_core.snapshots.measurement import missing_values
from daf_core.snapshots.rng_and_buffers import devices_of


def refuse_unplannable(model: nn.Module, inner: nn.Module) -> None:
    """Checks that what a step takes can be measured, and may be another plan in each process.

    Args:
        model: The model as it is called.
        inner: The model inside of what wraps it.

    Raises:
        ConfigError: It cannot.
    """
    reason = next(_reasons(model, inner), None)
    if reason is not None:
        raise unplannable(reason)


def unplannable(reason: str) -> ConfigError:
    """Returns the error that says why steps cannot be planned."""
    return ConfigError(
        f"memory_budget covers whole steps here, and those of this training cannot be planned: {reason}. Set "
        'budget_covers="activations", which limits saved activations alone'
    )


def _reasons(model: nn.Module, inner: nn.Module) -> Iterator[str]:
    reason = communication(model)
    if reason is not None:
        yield f"{reason}, so no process can measure or run a step again on its own"
    if (missing := missing_values(inner)) is not None:
        yield missing
    if len(devices_of(inner)) > 1:
        yield "its parameters are on several devices, and what a step takes is measured on one"
    on_gpu = next(inner.parameters()).device.type == "cuda"
    for module in model.modules():
        # Profiles are measured on the inner model as written; on a CPU no tensor inside of a graph is seen.
        if is_compiled(module) and (not on_gpu or inner in set(module.modules())):
            yield f"{type(module).__name__} is compiled, and what a graph of torch.compile takes is not measured"
