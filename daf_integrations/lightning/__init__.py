"""Lightning: ``Trainer(strategy=DAFStrategy())``.

For the package of the name ``pytorch_lightning`` there is `daf_integrations.pytorch_lightning`: a Trainer takes
strategies of its own package alone. Names load on first use, as both share what is in this folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daf_integrations.lightning.strategy import DAFStrategy, register

__all__ = ["DAFStrategy", "register"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    from daf_integrations.lightning import strategy

    return getattr(strategy, name)
