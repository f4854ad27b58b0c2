"""What of a model keeps DAF from measuring the error of the gradient, or from lowering the peak of memory."""

from __future__ import annotations

from logging import getLogger

from torch import nn

from daf_core.autograd.torch_private import is_compiled
from daf_core.precision.probe import COMPILED

LARGE_SHARE = 0.5
"""Part of a model's parameters in one compiled graph, above which its backward is most of the model's."""

SHARDED = "each parameter is spread over several processes, which would have to measure together"

log = getLogger("daf")


def audit_obstacle(model: nn.Module) -> str | None:
    """Says why the error of the gradient cannot be measured on a part of a batch; None where it can.

    Args:
        model: The model as it is called, perhaps compiled.
    """
    if any(is_compiled(module) for module in model.modules()):
        return COMPILED
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):  # DTensor takes a second to import
        return SHARDED
    return None


def warn_of_large_graphs(model: nn.Module) -> None:
    """Says where one compiled graph holds most of a model: its backward begins by decoding all that it has saved.

    Args:
        model: The model as it is called, perhaps compiled.
    """
    total = _size(model)
    for module in model.modules():
        if is_compiled(module) and _size(module) > LARGE_SHARE * total:
            log.warning(
                "One graph of torch.compile holds %.0f%% of the model's parameters. Its backward begins by decoding "
                "all that it has saved: DAF frees that memory until then, and the peak of the step stays. Compile "
                "block by block (`for block in model.layers: block.compile()`), or set "
                "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=1 for Trainer and Accelerate",
                100 * _size(module) / total,
            )
            return


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
