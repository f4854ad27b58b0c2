"""One error class for each situation a caller can handle; messages say what was given, what is allowed, what to do."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 2, 200, 200, 40


def shown(value: object) -> str:
    """Returns what was given as a message shows it: its `repr`, in one line of bounded length."""
    try:
        text = _REPR.repr(value)
    except Exception:  # an integer of more digits than Python prints, or whatever a class of the user's does
        text = f"<{type(value).__name__}>"
    return " ".join(text.split()) if "\n" in text else text


class DAFError(Exception):
    """Base class of all errors that DAF raises on purpose."""


class ConfigError(DAFError, ValueError):
    """An option is unknown or its value is not allowed."""


class NothingToTrainError(DAFError, ValueError):
    """The model has no parameter that requires a gradient."""


class UnsupportedDeviceError(DAFError, RuntimeError):
    """The model is where DAF cannot work: on device "meta", or on several GPUs in one process."""


class UnsupportedTorchError(DAFError, RuntimeError):
    """The installed torch is older than the oldest that DAF works with."""


class GraphCaptureError(DAFError, RuntimeError):
    """A CUDA graph is being captured, and what DAF stores would depend on the pass, or is not known yet."""


class HooksActiveError(DAFError, RuntimeError):
    """Somebody else's saved-tensor hooks are active, or were entered inside DAF's scope and not left."""


class ModifiedInPlaceError(DAFError, RuntimeError):
    """A tensor that was saved for backward was changed in place before backward used it."""


class StateError(DAFError, ValueError):
    """A saved state is not one that DAF wrote."""


class ReaderError(DAFError, RuntimeError):
    """What is asked for was not kept: an activation by another operator, or the gradient of logits."""


class TraceError(DAFError, RuntimeError):
    """What is measured beside training would change the model."""


class AuditError(DAFError, RuntimeError):
    """The gradient error that `max_gradient_error` bounds cannot be measured."""


class MicroBatchError(DAFError, RuntimeError):
    """The loss of a batch cannot be computed from the losses of its parts."""


class SpillError(DAFError, OSError):
    """The spill file cannot be made, written or read, or main memory takes nothing more from a GPU."""


class ProfileError(DAFError, RuntimeError):
    """What a step of a model takes cannot be measured."""


class ModelError(DAFError, ValueError):
    """A model is a ScriptModule; or a command cannot build the model, or run it on its batch."""


class ElasticError(DAFError, RuntimeError):
    """No part of the model can be trained within the share of memory that `elastic` gives, or nothing is saved."""


class PlanError(DAFError, RuntimeError):
    """No plan keeps a step within the memory budget.

    Attributes:
        allowed: The budget in bytes.
        least: The smallest budget that a plan exists for.
        copies: Bytes that later batches of a step take beside `least`, if gradients of several add up: those of copies
            of the gradients that are there by then.
    """

    def __init__(self, allowed: int, least: int, tried: str, copies: int = 0) -> None:
        self.allowed, self.least, self.tried, self.copies = allowed, least, tried, copies
        from humanfriendly import format_size

        accumulated = f" ({enough(least + copies)} if gradients of several batches add up)" if copies else ""
        super().__init__(
            f"a training step takes {enough(least)} at least{accumulated} beside the model, its gradients and the "
            f"optimizer, and memory_budget allows {format_size(allowed)}; tried: {tried}. Raise memory_budget, or "
            'train on smaller batches or shorter texts. budget_covers="activations" limits saved activations alone'
        )

    def __reduce__(self) -> tuple[type[PlanError], tuple[int, int, str, int]]:
        """Pickles with its own arguments, as `ActivationBudgetError` does."""
        return type(self), (self.allowed, self.least, self.tried, self.copies)


class ActivationBudgetError(DAFError, MemoryError):
    """Saved activations do not fit in the memory budget.

    Attributes:
        needed: Bytes that would have been held.
        allowed: The budget in bytes.
        ways: What options may be changed, besides the budget, as commands; see `DAFConfig.ways_to_fit`.
    """

    def __init__(self, needed: int, allowed: int, ways: Sequence[str] = ()) -> None:
        self.needed = needed
        self.allowed = allowed
        self.ways = tuple(ways)
        from humanfriendly import format_size  # 10 ms that a program without the error does not pay

        super().__init__(
            f"saved activations need {enough(needed)} with everything dropped and spilled that may be, and "
            f"memory_budget allows {format_size(allowed)}. Raise memory_budget, {''.join(f'{way}, ' for way in ways)}"
            "or train on smaller batches or shorter texts"
        )

    def __reduce__(self) -> tuple[type[ActivationBudgetError], tuple[int, int, tuple[str, ...]]]:
        """Pickles with its own arguments: launchers send errors of their workers on to the main process."""
        return type(self), (self.needed, self.allowed, self.ways)


class PeerMemoryError(DAFError, MemoryError):
    """Other processes ran out of memory in a step, at every plan that there is; this one did not.

    Attributes:
        attempts: How often the step was run.
    """

    def __init__(self, attempts: int) -> None:
        self.attempts = attempts
        super().__init__(
            f"another process of this training ran out of memory, in each of {attempts} attempt(s) at this step; its "
            "own error says more. Train on smaller batches or shorter texts, or give that process a device with more "
            "memory"
        )

    def __reduce__(self) -> tuple[type[PeerMemoryError], tuple[int]]:
        """Pickles with its own arguments: launchers send errors of their workers on to the main process."""
        return type(self), (self.attempts,)


def enough(size: int) -> str:
    """Returns words for a size in bytes, rounded up, so that it is enough where a user asks for it in these words."""
    from humanfriendly import format_size, parse_size

    digit = max(10 ** (3 * ((len(str(size)) - 1) // 3) - 2), 1)  # that of the second decimal place
    digits = -(-size // digit)
    if parse_size(format_size(digits * digit)) < size:  # it reads "2.01 KB" as 2,009 bytes
        digits += 1
    return format_size(digits * digit)
