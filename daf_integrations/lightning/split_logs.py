"""What a LightningModule logs in the parts of a step, logged once for the step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from daf_core.batch.rows import rows_of
from daf_integrations.lightning.dry_run import log_replaced

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

Options = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of `LightningModule.log` after name and value."""


_REDUCTIONS: dict[Any, Callable[[Iterable[Any]], Any]] = {
    "sum": sum,
    **dict.fromkeys(("max", "amax"), max),
    **dict.fromkeys(("min", "amin"), min),
}
"""Of values over batches, as `LightningModule.log` takes them, but for means."""


@dataclass
class _Part:
    """The names, numbers and options that were logged in a part, which has rows, a weight and later a loss."""

    rows: int
    weight: float
    loss: Tensor | None = None
    calls: list[tuple[str, Any, Options]] = field(default_factory=list[tuple[str, Any, Options]])

    @property
    def values(self) -> dict[str, Any]:
        """Numbers by name, the last of each."""
        return {name: value for name, value, _ in self.calls}

    def is_loss(self, name: str) -> bool:
        """Says whether a value is the loss itself: `detach` shares its memory, and numbers are equal."""
        value = self.values[name]
        if self.loss is None:
            return False
        return (
            value.data_ptr() == self.loss.data_ptr()
            if isinstance(value, Tensor)
            else value == float(self.loss.detach())
        )


class PartLogs:
    """Collects what a module logs in the parts of a step, and logs it once; metrics that are objects are not collected.

    Args:
        module: The module.
    """

    def __init__(self, module: LightningModule) -> None:
        self._log: Callable[..., None] = module.log
        self._module = module
        self._parts: list[_Part] = []

    @contextmanager
    def collecting(self) -> Generator[None]:
        """Collects what is logged inside, and logs it at the end."""
        with log_replaced(self._module, self._collect):
            yield
        for name, value, (args, options) in self._calls():
            self._log(name, value, *args, **options)

    @contextmanager
    def part(self, batch: Any, weight: float) -> Generator[_Part]:
        """Collects what is logged inside for a part."""
        self._parts.append(_Part(rows_of(batch) or 0, weight))
        yield self._parts[-1]

    def clear(self) -> None:
        """Drops what was collected: the step is run again."""
        self._parts.clear()

    def _collect(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if not (isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)):
            self._log(name, value, *args, **options)
            return
        value = value.detach() if isinstance(value, Tensor) else value
        self._parts[-1].calls.append((name, value, (args, options)))

    def _calls(self) -> list[tuple[str, Any, Options]]:
        """Returns what is to be logged: as it was for a batch in one piece, otherwise each name once."""
        if len(self._parts) == 1:
            return self._parts[0].calls
        last = {name: options for part in self._parts for name, _, options in part.calls}
        return [(name, self._combined(name, options), _for_the_step(options)) for name, options in last.items()]

    def _combined(self, name: str, options: Options) -> Any:
        parts = [part for part in self._parts if name in part.values]
        reduction = options[1].get("reduce_fx", "mean")
        reduce = _REDUCTIONS.get(getattr(reduction, "__name__", reduction))
        if reduce is not None:
            return reduce(part.values[name] for part in parts)
        if all(part.is_loss(name) for part in parts):
            return sum(part.weight * part.values[name] for part in parts)
        return sum(part.rows * part.values[name] for part in parts) / sum(part.rows for part in parts)


def _for_the_step(options: Options) -> Options:
    """Leaves out the batch size, which is that of the part."""
    args, named = options
    return args, {name: value for name, value in named.items() if name != "batch_size"}
