"""Stores what compiled graphs save, beside the engine that stores what is saved outside of them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from daf_core.autograd import hook_stack
from daf_core.autograd.torch_compile import has_compiled_anything
from daf_core.compiled.account import GraphAccount, counting
from daf_core.config import DAFConfig
from daf_core.precision.policy import UNIFORM

if TYPE_CHECKING:
    from daf_core.compiled.hooks import GraphHooks


class CompiledGraphs:
    """Installs the hooks of an engine so that graphs which are compiled meanwhile store what they save in codes.

    The bits are those of the configuration, or `UNIFORM` where it leaves the choice: they are part of the graphs, and
    others would have everything compiled again. Where a budget leaves no room for them a graph gets fewer. In exact
    mode graphs call the hooks that everything else calls, at run time: a graph that packs its masks is fused
    otherwise, and rounds otherwise.

    Args:
        config: The options.
        pack: Packs what is saved outside of graphs, where a function is running.
        unpack: Unpacks it.
        room: Returns the bytes that the budget leaves to graphs, with what they hold; None where nothing limits them.
    """

    def __init__(
        self,
        config: DAFConfig,
        pack: Callable[[Tensor, FrameType], Any],
        unpack: Callable[[Any], Tensor],
        room: Callable[[], int | None],
    ) -> None:
        self._pair = pack, unpack
        self._wanted = config.precision != "exact"
        self._bits = max(UNIFORM, config.min_precision or 0) if isinstance(config.precision, str) else config.precision
        self._least = config.min_precision or 1
        self._hooks: GraphHooks | None = None
        self.account = GraphAccount(room, config.ways_to_fit(spills=False))  # what graphs hold

    def hook_over(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Returns the pack hook that is installed, or would be, where `pack` serves what is not compiled."""
        return pack if self._hooks is None else self._hooks.pack

    @contextmanager
    def installed(self, pack: Callable[[Tensor], Any]) -> Generator[None]:
        """Installs the hooks for a forward pass; `pack` is the pack hook where there are no graphs.

        Raises:
            HooksActiveError: Hooks that were entered inside were not left.
        """
        hooks = self._made()
        if hooks is None:
            with hook_stack.installed(pack, self._pair[1]):
                yield
            return
        from daf_core.compiled.support import compiling

        try:
            with compiling(), counting(self.account), hook_stack.installed(hooks.pack, hooks.unpack):
                yield
        finally:
            hooks.forget_graphs()

    def _made(self) -> GraphHooks | None:
        """Returns the hooks for graphs; None where there are no graphs, or hooks cannot be inlined into them."""
        if self._hooks is None and self._wanted and has_compiled_anything():
            from daf_core.compiled.hooks import GraphHooks  # what knows graphs takes time to import
            from daf_core.compiled.support import missing

            if missing() is None:
                self._hooks = GraphHooks(self._bits, self._least, *self._pair, self.account)
        return self._hooks
