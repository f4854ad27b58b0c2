"""Measures the error of the compressed gradient while training, and steers precision by it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from daf_core.codecs.common_row import CommonRows
from daf_core.codecs.plane_importance import LEVELS
from daf_core.config import DAFConfig
from daf_core.errors import StateError, shown
from daf_core.model.treatments import Treatments
from daf_core.precision.calibration import calibrate
from daf_core.precision.policy import PrecisionPolicy
from daf_core.precision.probe import ProbePass
from daf_core.precision.site_stats import KindsOfPasses, PassStatistics, Sizes
from daf_core.state_checks import as_a_whole, count, flag, number
from daf_core.telemetry import GradientError

EARLY = (1, 3, 10, 30, 100, 300)
"""Steps at which importances are calibrated before it is done every `CALIBRATE_EVERY` steps: gradients change most at
the beginning, where LoRA's second matrix is still zero."""

CALIBRATE_EVERY = 1000

SETTLED = 3  # calibrations before this step say little of later ones: at the first one LoRA's second matrix is zero

UNSETTLED_EXCESS = 50.0
"""Squared error that steps before `SETTLED` are ready for, over what is predicted: on MiniLM errors of adapters' sites
are 7 times as large two steps later. No code has fewer than 8 bits then."""

DEVIATIONS = 2.5
"""Standard deviations above the mean that a prediction is taken for: with as many audits as `MEMORY`, 97.5% of what
Student's distribution expects of the next one."""

PRIOR = (0.0, math.log(2.0), math.log(4.0))
"""Natural logarithms of squared errors over predicted ones, before any was seen."""

MEMORY = 8  # audits, counting those of `PRIOR`, whose errors say how far a prediction may be off

OWN_SHARE = 0.5
"""Share of the error that counts parameter by parameter, unless the error of all of them together is bounded."""

CORRECTIONS = 3  # how often a plan is corrected at most in an audit that finds its error too large on the same rows


class Auditor:
    """Decides when an audit is due, and steers the policy by what it finds."""

    def __init__(self, config: DAFConfig, policy: PrecisionPolicy) -> None:
        self._every, self._auto = config.audit_every, config.precision == "auto"
        self._learns = self._auto or config.memory_budget is not None
        self._own_share = OWN_SHARE if config.max_gradient_error is None else 0.0
        self._bound = config.max_gradient_error
        self._policy = policy
        self._step = 1
        self._done = self._late = self._late_calibration = False
        self._misses = deque(PRIOR, maxlen=MEMORY)

    @property
    def due(self) -> bool:
        """Whether this step is to be audited, and was not yet."""
        if self._every is None or self._done:
            return False
        return self._late or self._calibrates or self._step % self._every == 0

    def postpone(self) -> None:
        """Has the next step be audited in place of this one."""
        self._late_calibration = self._calibrates
        self._done = self._late = True

    def finish_step(self) -> None:
        """Counts a training step."""
        self._step += 1
        self._done = False

    def audit(self, rehearsal: ProbePass, last_pass: PassStatistics) -> GradientError | None:
        """Measures the error of the gradient, and corrects the plan where there is an error to keep.

        Given a forward pass of some rows of the step's batch, and what the last pass stored, returns the error before
        any correction; None where the gradient is zero or not finite, or nothing is known yet of what will be stored.
        """
        self._done = True
        stored, sizes = last_pass.precisions, last_pass.sizes
        # Where the pass before has stored nothing with loss, as of tensors that are too small, its gradient was exact.
        exact = GradientError(0.0, 1.0) if last_pass.known else None
        measured = rehearsal.compare(stored) if stored else exact
        predicted = self._policy.predict(stored)
        if self._step > SETTLED and measured is not None and measured.finite and measured.error and predicted:
            self._misses.append(math.log(measured.error**2 / predicted))
        if self._learns and (self._calibrates or not self._policy.calibrated):
            found = calibrate(rehearsal, self._auto, own_share=self._own_share)
            if found is not None:
                self._policy.learn(found, replace=self._step <= SETTLED)
        if self._bound is not None and self._policy.calibrated:
            planned = self._steer(rehearsal, sizes or rehearsal.sizes, self._bound)
            measured = measured or planned
        self._late = self._late_calibration = False
        return measured if measured is not None and measured.finite else None

    @property
    def _calibrates(self) -> bool:
        return self._late_calibration or self._step in EARLY or self._step % CALIBRATE_EVERY == 0

    def _steer(self, rehearsal: ProbePass, sizes: Sizes, bound: float) -> GradientError:
        """Plans for the error bound, and returns what the plan's error is on these rows."""
        excess, least, corrections = UNSETTLED_EXCESS, LEVELS[-1], 0
        if self._step >= SETTLED:
            excess = math.exp(np.mean(self._misses) + DEVIATIONS * np.std(self._misses, ddof=1))
            least = LEVELS[0]
        while True:
            self._policy.keep_error(sizes, bound**2 / excess, least)
            planned = rehearsal.compare(self._policy.plan)
            if corrections == CORRECTIONS or not planned.error > bound:
                return planned
            corrections += 1
            excess *= 2 * (planned.error / bound) ** 2

    def state(self) -> dict[str, Any]:
        """Returns the step, what is late, and the correction, as JSON-able values."""
        late = {"late": self._late, "late_calibration": self._late_calibration, "learns": self._learns}
        return {"step": self._step, "misses": list(self._misses), **late}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned; raises one of `DAMAGED` if it is something else."""
        misses = [number(miss) for miss in state["misses"]]
        if len(misses) < len(PRIOR):
            raise ValueError(f"misses {misses}")
        self._step, self._misses = count(state["step"], 1), deque(misses, maxlen=MEMORY)
        # With other options than before nothing was learned, and the next calibration may be a thousand steps away.
        unlearned = self._learns and not flag(state.get("learns", True))
        self._late = flag(state.get("late", False)) or unlearned
        self._late_calibration = flag(state.get("late_calibration", False)) or unlearned


PARTS = ("policy", "auditor", "last_pass", "rows")  # what an engine has learned, by the names under which it is saved


def restored(
    config: DAFConfig, policy: PrecisionPolicy, rows: CommonRows, state: object, treatments: Treatments | None = None
) -> tuple[Auditor, KindsOfPasses, int]:
    """Has a policy, and what is known of rows, go on from the state of an engine; with an error they stay as they were.

    Returns its other parts: the auditor, what is remembered of passes, and how many passes' rounding drew random
    numbers.

    Raises:
        StateError: It is the state of something else, or damaged.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"this is no saved state of an engine: {shown(state)}; it is what state_dict() returns")
    parts = cast("Mapping[str, Any]", state)
    missing = [name for name in PARTS[:-1] if not isinstance(parts.get(name), Mapping)]
    if missing:
        raise StateError(f"this is no saved state of an engine: it has no {' and no '.join(missing)}")
    auditor, passes = Auditor(config, policy), KindsOfPasses(treatments)
    with as_a_whole(auditor, (), "an engine"):
        auditor.load(parts["auditor"])
        passes.load(parts["last_pass"])
        drawn = count(parts.get("passes", 0))
    with as_a_whole(rows, vars(rows), "an engine"):
        rows.load(parts.get("rows", CommonRows().state()))  # states had none before
        policy.load(parts["policy"])
    return auditor, passes, drawn
