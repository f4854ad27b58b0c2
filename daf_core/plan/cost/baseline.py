"""Forecasts a step without DAF from a few rows, as the whole batch may not fit."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

from daf_core import timing
from daf_core.plan.cost.profile import Forecast
from daf_core.plan.observe.meter import meter_on
from daf_core.snapshots.measurement import Measurement
from daf_core.snapshots.step import backward_beside, gradients_aside

REPEATS = 2  # passes whose shortest time counts


def forecast_plain(model: nn.Module, loss_of: Callable[[int], Tensor], rows: int, limit: int) -> Forecast:
    """Returns the forecast of a step with the whole batch in which autograd keeps everything.

    It is on the line through two passes beside training, of one row and of as many as fit in `limit` bytes, up to half
    of the batch.
    """
    seconds, peak = _measured(model, loss_of, 1)
    many = 1
    while 2 * many <= rows // 2 and 2 * many * peak <= limit:
        many *= 2
    if many == 1:
        return Forecast(seconds * rows, *[int(peak * rows)] * 3)
    more_seconds, more_peak = _measured(model, loss_of, many)
    share = (rows - 1) / (many - 1)
    whole = int(peak + share * (more_peak - peak))
    return Forecast(seconds + share * (more_seconds - seconds), whole, whole, whole)


def _measured(model: nn.Module, loss_of: Callable[[int], Tensor], rows: int) -> tuple[float, int]:
    measurement = Measurement(model)
    with measurement.running(), gradients_aside(model), meter_on(next(model.parameters()).device) as meter:
        backward_beside(loss_of(rows), model.parameters())
        peak = meter.take_peak()
    seconds = math.inf
    with measurement.running(timed=True), gradients_aside(model):
        for _ in range(REPEATS):
            started = timing.synchronized_time()
            backward_beside(loss_of(rows), model.parameters())
            seconds = min(seconds, timing.synchronized_time() - started)
    return seconds, peak
