"""What is said of the errors of gradients that audits measure."""

from __future__ import annotations

from logging import getLogger

from torch import nn

from daf_core import DAFConfig, GradientError
from daf_core.autograd.torch_private import is_compiled
from daf_integrations.session.metrics import RunTotals

LOW_COSINE = 0.5
"""Of the angle between compressed and exact gradient; below it a step goes mostly elsewhere, and a warning says so."""

LARGE_SHARE = 0.5
"""Part of a model's parameters in one compiled graph, above which its backward is most of the model's."""

log = getLogger("daf")


class AuditWarnings:
    """Counts audits, and warns where an error is large or could not be measured.

    Args:
        config: `max_gradient_error`.
    """

    def __init__(self, config: DAFConfig) -> None:
        self._bound = config.max_gradient_error
        self._tried = self._unmeasured = self._low = False

    def add(self, measured: GradientError | None, totals: RunTotals) -> None:
        """Takes what an audit has measured, None for nothing, and counts it in a run's totals."""
        if measured is None:
            first, self._tried = not self._tried, True  # before the first pass nothing is known of what it stores
            if not self._unmeasured and (self._bound is not None or not first):
                log.warning(
                    "DAF could not measure the error of the gradient: on a part of the batch the gradient is zero or "
                    "not finite. Until it can, precision is chosen without it"
                )
                self._unmeasured = True
            return
        totals.audits += 1
        totals.audits_above += self._bound is not None and measured.error > self._bound
        low = measured.cosine < LOW_COSINE
        if low and not self._low:
            log.warning(
                "DAF's compressed gradient differs from the exact one by %.0f%% of its length, and the cosine of the "
                "angle between them is %.2f: training will be slow or fail. Raise memory_budget or precision",
                100 * measured.error,
                measured.cosine,
            )
        elif self._bound is not None and measured.error > self._bound:
            log.warning("DAF measured a gradient error of %.3g; max_gradient_error=%.3g", measured.error, self._bound)
        self._low = low


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
