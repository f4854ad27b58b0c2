"""DAF in the trainers people use. Names load on first use: no framework is imported for another's sake."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daf_integrations.huggingface.arguments import DAFArguments
    from daf_integrations.huggingface.callback import DAFCallback, DAFTrainer, DAFTrainerMixin
    from daf_integrations.lightning import DAFStrategy
    from daf_integrations.loop.api import load_state_dict, metrics, prepare, scope, state_dict, step, summary

__all__ = [
    "DAFArguments",
    "DAFCallback",
    "DAFStrategy",
    "DAFTrainer",
    "DAFTrainerMixin",
    "load_state_dict",
    "metrics",
    "prepare",
    "scope",
    "state_dict",
    "step",
    "summary",
]

_HOMES = {
    **dict.fromkeys(__all__, ("daf_integrations.loop.api", "torch", "dev")),
    "DAFArguments": ("daf_integrations.huggingface.arguments", "torch", "dev"),
    "DAFStrategy": ("daf_integrations.lightning", "lightning", "lightning"),
    **dict.fromkeys(
        ("DAFCallback", "DAFTrainer", "DAFTrainerMixin"),
        ("daf_integrations.huggingface.callback", "transformers", "hf"),
    ),
}
"""The module that has a name, the framework that it needs, and the extra that brings it."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    module, framework, extra = _HOMES[name]
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != framework:
            raise
        raise ImportError(
            f"{name} needs {framework}, which is not installed; install DAF with its extra: pip install -e '.[{extra}]'"
        ) from error
