"""DAF in the trainers people use. Names load on first use: no framework is imported for another's sake."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daf_integrations.hf import DAFCallback

__all__ = ["DAFCallback"]

_HOMES = {"DAFCallback": ("daf_integrations.hf", "transformers", "hf")}


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
