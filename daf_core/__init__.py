"""DAF's engine: activations that autograd saves, stored in a few bits inside a memory budget."""

from daf_core.config import DAFConfig, ElasticConfig
from daf_core.engine import ActivationEngine
from daf_core.errors import (
    ActivationBudgetError,
    AuditError,
    ConfigError,
    DAFError,
    ElasticError,
    GraphCaptureError,
    HooksActiveError,
    MicroBatchError,
    ModelError,
    ModifiedInPlaceError,
    NothingToTrainError,
    PeerMemoryError,
    PlanError,
    ProfileError,
    ReaderError,
    SpillError,
    StateError,
    TraceError,
    UnsupportedDeviceError,
)
from daf_core.telemetry import GradientError, StepStatistics

__all__ = [
    "ActivationBudgetError",
    "ActivationEngine",
    "AuditError",
    "ConfigError",
    "DAFConfig",
    "DAFError",
    "ElasticConfig",
    "ElasticError",
    "GradientError",
    "GraphCaptureError",
    "HooksActiveError",
    "MicroBatchError",
    "ModelError",
    "ModifiedInPlaceError",
    "NothingToTrainError",
    "PeerMemoryError",
    "PlanError",
    "ProfileError",
    "ReaderError",
    "SpillError",
    "StateError",
    "StepStatistics",
    "TraceError",
    "UnsupportedDeviceError",
]
