"""DAF's engine: activations that autograd saves, stored in a few bits inside a memory budget."""

from daf_core.config import DAFConfig
from daf_core.engine import ActivationEngine
from daf_core.errors import (
    ActivationBudgetError,
    ConfigError,
    DAFError,
    HooksActiveError,
    ModifiedInPlaceError,
    NothingToTrainError,
    SpillError,
    UnsupportedDeviceError,
)
from daf_core.telemetry import StepStatistics

__all__ = [
    "ActivationBudgetError",
    "ActivationEngine",
    "ConfigError",
    "DAFConfig",
    "DAFError",
    "HooksActiveError",
    "ModifiedInPlaceError",
    "NothingToTrainError",
    "SpillError",
    "StepStatistics",
    "UnsupportedDeviceError",
]
