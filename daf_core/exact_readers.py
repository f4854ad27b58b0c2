"""Operators whose backward needs what they save as it is, and where a model calls them.

Most operators multiply by what they save, and an error of it is as large in the gradient. These compare it with their
result, so that nothing is equal any more and the gradient is 0 / 0, or have a pole or an edge of their domain where an
approximate value may lie.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from daf_core.eligibility import LEAST_ELEMENTS
from daf_core.sites import Site
from daf_core.torch_internals import Node, has_compiled_parts, node_number

LEADING = 3
"""Operators before one of these that need exact values, too: as softmax and addition in log(softmax(x) + eps)."""

Arguments = Sequence[Any]
Keywords = Mapping[str, Any]


def _always(_arguments: Arguments, _keywords: Keywords) -> bool:
    return True


def _of_all(arguments: Arguments, keywords: Keywords) -> bool:
    """Says whether the largest of all values, or the like, is asked for: along a dimension the index is kept."""
    return len(arguments) + ("input" in keywords) == 1 and not {"dim", "other"} & keywords.keys()


def _by_tensor(arguments: Arguments, keywords: Keywords) -> bool:
    """Says whether something is divided by a tensor that is large enough to be stored in few bits."""
    divisor = arguments[-1] if len(arguments) > 1 else keywords.get("other", keywords.get("tensor2"))
    return isinstance(divisor, Tensor) and divisor.numel() >= LEAST_ELEMENTS


def _to_fraction(arguments: Arguments, keywords: Keywords) -> bool:
    """Says whether the exponent is no natural number: the derivative then has a pole, or an edge, at zero."""
    exponent = arguments[1] if len(arguments) > 1 else keywords.get("exponent")
    return not (isinstance(exponent, int | float) and exponent >= 1 and float(exponent).is_integer())


def _of_order(arguments: Arguments, keywords: Keywords) -> bool:
    """Says whether a norm is another one than the sum of absolute values and the root of squares."""
    orders = [*arguments[1:2], *(keywords[name] for name in ("p", "ord") if name in keywords)]
    return any(order not in (None, 1, 2, "fro") for order in orders)


READERS: dict[str, Callable[[Arguments, Keywords], bool]] = {
    **dict.fromkeys(("amax", "amin", "aminmax"), _always),
    **dict.fromkeys(("max", "min", "median", "nanmedian"), _of_all),
    **dict.fromkeys(("norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "normalize"), _of_order),
    **dict.fromkeys(("acos", "arccos", "asin", "arcsin", "acosh", "arccosh", "atanh", "arctanh"), _always),
    **dict.fromkeys(("log", "log2", "log10", "log1p", "logit", "special_logit", "xlogy", "sqrt"), _always),
    **dict.fromkeys(("erfinv", "lgamma", "digamma", "polygamma", "atan2", "arctan2", "hypot"), _always),
    **dict.fromkeys(("binary_cross_entropy", "gaussian_nll_loss", "cdist", "prod", "cumprod"), _always),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__", "__rtruediv__", "__div__", "addcdiv"), _by_tensor),
    **dict.fromkeys(("pow", "float_power", "__pow__"), _to_fraction),
}
"""Names of torch's functions and methods, and whether a call is of the kind."""

_READERS = {
    **{f"{name}_": kind for name, kind in READERS.items()},  # in place: log_
    **{f"__i{name[2:]}": kind for name, kind in READERS.items() if name.startswith("__")},  # __ipow__
    **READERS,
}


def reads_exactly(function: Any, arguments: Arguments, keywords: Keywords) -> bool:
    """Says whether the backward of a call of one of torch's functions needs exact values."""
    # One look and no string to work on: torch.compile follows this, where it meets a function to compile meanwhile.
    kind = _READERS.get(getattr(function, "__name__", ""))
    return kind is not None and kind(arguments, keywords)


class _Inside(threading.local):
    """What runs in this thread.

    Attributes:
        watched: Whether calls are watched.
        calls: Calls of such operators that are running.
        unknown: Whether something was saved at a place that was never watched.
        made: Where what a node has made was saved first in the pass that is watched, by the node's number.
    """

    def __init__(self) -> None:
        self.watched, self.unknown, self.calls = False, True, 0
        self.made: dict[int, Site] = {}


class _Watch(TorchFunctionMode):
    """Counts the calls of such operators that are running."""

    def __init__(self, inside: _Inside) -> None:
        super().__init__()
        self._inside = inside

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not reads_exactly(func, args, kwargs):
            return func(*args, **kwargs)
        self._inside.calls += 1
        try:
            return func(*args, **kwargs)
        finally:
            self._inside.calls -= 1


class ExactReaders:
    """Knows at which sites of a model such operators save, and those whose result they use that is saved, too.

    A pack hook is not told who saves. So calls of torch's functions are watched in the first forward pass, and in the
    pass after one that saved at a site which was not watched: watching takes microseconds for each call.

    Args:
        model: Where a part of it is compiled nothing is watched: a graph would be compiled again without the watch.
        wanted: Whether anything is stored that is not exact.
    """

    def __init__(self, model: nn.Module, wanted: bool) -> None:
        self._model = model
        self._wanted = wanted
        self._sites: set[Site] = set()
        self._known: set[Site] = set()
        self._inside = _Inside()

    @contextmanager
    def watching(self) -> Generator[None]:
        """Watches what runs inside where there is something to learn: wrap it around a forward pass."""
        inside = self._inside
        self._wanted = self._wanted and not (inside.unknown and has_compiled_parts(self._model))
        if not (self._wanted and inside.unknown):
            yield
            return
        inside.unknown, inside.watched = False, True
        try:
            with _Watch(inside):
                yield
        finally:
            inside.watched = False
            inside.made.clear()

    def stays_exact(self, tensor: Tensor, site: Site) -> bool:
        """Says whether a tensor that is being saved at a site is to stay as it is."""
        if self._inside.watched:
            self._known.add(site)
            if tensor.grad_fn is not None:
                self._inside.made.setdefault(node_number(tensor.grad_fn), site)
            if self._inside.calls:
                self._sites |= {site, *self._leading_to(tensor.grad_fn)}
        elif site not in self._known:
            self._inside.unknown = True
        return site in self._sites

    def _leading_to(self, node: Node) -> Generator[Site]:
        """Yields where the last operators before a node have saved.

        A softmax, say, saves the probabilities whose logarithm is taken. The gradient that it gets is large where they
        are small, and what it multiplies that by has to fit.
        """
        for _ in range(LEADING):
            if node is None:
                return
            site = self._inside.made.get(node_number(node))
            if site is not None:
                yield site
            node = node.next_functions[0][0] if node.next_functions else None
