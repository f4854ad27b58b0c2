"""What compiled graphs hold: an operator in each forward graph says so when it runs.

The numbers are part of the graph, so a graph that comes from torch's cache on disk counts as well. What it has saved is
held as long as the result of the operator, which the backward graph gets like everything else that is saved.
"""

from __future__ import annotations

import ast
import math
import operator
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from daf_core.autograd.torch_compile import NOT_IN_CUDA_GRAPHS
from daf_core.errors import ActivationBudgetError
from daf_core.memory.books import PagerAccount

Polynomial = list[tuple[float, list[int]]]
"""Terms of a polynomial in the sizes of a graph: a coefficient, and the exponent of each size."""


@dataclass
class Saved:
    """What a graph saves, while it is traced."""

    raw: Any = 0  # bytes of the tensors as they are, an expression in the sizes of the graph
    held: Any = 0  # bytes of what is saved in their place
    stored_as: Counter[str] = field(default_factory=Counter)  # how many tensors each code stores

    def text(self, sizes: Sequence[Any]) -> str:
        """Returns the account as the operator gets it, with the sizes that it gets as its variables."""
        names = [size.node.expr for size in sizes]
        figures = {
            name: _polynomial(expression, names) for name, expression in (("raw", self.raw), ("held", self.held))
        }
        return repr({**figures, "stored_as": dict(self.stored_as)})


def bytes_of(values: Tensor) -> Any:
    """Returns the bytes of a tensor, as an expression where its sizes are symbols."""
    sizes = (_expression(size) for size in values.shape)
    return math.prod(sizes) * values.element_size()


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def symbols_in(values: Tensor) -> list[Any]:
    """Returns the sizes of a tensor that are symbols of their own, each once."""
    symbols = [size for size in values.shape if getattr(_expression(size), "is_Symbol", False)]
    return list({_expression(size): size for size in symbols}.values())


def _polynomial(expression: Any, names: Sequence[Any]) -> Polynomial:
    """Returns the terms of an expression; symbols that have no name count as they were when it was traced.

    Groups that are filled up count with what they were given: at most 255 codes of a tensor are not counted.
    """
    if not isinstance(expression, int):
        from torch.utils._sympy.functions import FloorDiv, PythonMod  # takes half a second to import

        other = expression.free_symbols - set(names)
        expression = expression.subs({symbol: _HINTS.get(str(symbol), 1) for symbol in other})
        expression = expression.replace(PythonMod, _nothing).replace(FloorDiv, operator.truediv)
    if isinstance(expression, int) or not names:
        return [(float(expression), [0] * len(names))]
    terms = expression.as_poly(*names).terms()
    return [(float(coefficient), [int(power) for power in powers]) for powers, coefficient in terms]


def _nothing(*_: Any) -> int:
    """Stands for the remainder that fills up a group."""
    return 0


_HINTS: dict[str, int] = {}


def remember_hints(values: Tensor) -> None:
    """Notes what the symbols in a tensor's sizes stand for while a graph is traced."""
    for size in symbols_in(values):
        _HINTS[str(size.node.expr)] = int(size.node.hint)


class GraphAccount(threading.local):
    """What the graphs of one engine have saved in this thread.

    Args:
        room: Returns the bytes that the budget leaves to graphs, with what they hold; None where nothing limits them.
        ways: What else may be changed where the budget is too small, see `ActivationBudgetError`.
    """

    def __init__(self, room: Callable[[], int | None] = lambda: None, ways: Sequence[str] = ()) -> None:
        self._room, self.ways = room, ways
        self._held: list[tuple[Any, int]] = []
        self._stored_as: Counter[str] = Counter()
        self._peak_bytes = 0
        self.pass_raw_bytes = 0  # bytes that the graphs of the last forward pass would have saved

    @property
    def held_bytes(self) -> int:
        """Bytes that graphs hold now."""
        self._held = [(storage, size) for storage, size in self._held if not storage.expired()]
        return sum(size for _, size in self._held)

    @property
    def room(self) -> int | None:
        """Bytes that the budget leaves to another graph; None where nothing limits it."""
        room = self._room()
        return None if room is None else room - self.held_bytes

    def add(self, kept: Tensor, raw: int, held: int, stored_as: Mapping[str, int]) -> None:
        """Counts what a graph has saved; `kept` is a tensor that is gone when all of it is.

        Raises:
            ActivationBudgetError: It does not fit in the budget.
        """
        from torch.multiprocessing.reductions import StorageWeakRef

        room = self.room
        if room is not None and held > room:
            raise ActivationBudgetError(held, max(room, 0), self.ways)
        self._held.append((StorageWeakRef(kept.untyped_storage()), held))
        self.pass_raw_bytes += raw
        self._stored_as.update(stored_as)
        self._peak_bytes = max(self._peak_bytes, self.held_bytes)

    def take_stored(self) -> dict[str, int]:
        """Returns how many tensors each code has stored since the last call."""
        stored, self._stored_as = dict(self._stored_as), Counter()
        return stored

    def finish_step(self) -> PagerAccount:
        """Returns what graphs have held since the last call, and begins to count another step."""
        peak, self._peak_bytes = self._peak_bytes, self.held_bytes
        return PagerAccount(peak_bytes=peak)


class _Active(threading.local):
    account: GraphAccount | None = None


_active = _Active()


@contextmanager
def counting(account: GraphAccount) -> Generator[None]:
    """Has graphs that run inside count in an account."""
    before, _active.account = _active.account, account
    account.pass_raw_bytes = 0
    try:
        yield
    finally:
        _active.account = before


@lru_cache(maxsize=256)
def _figures(text: str, sizes: tuple[int, ...]) -> tuple[int, int, dict[str, int]]:
    found = ast.literal_eval(text)
    raw, held = (
        round(sum(coefficient * math.prod(map(pow, sizes, powers)) for coefficient, powers in found[name]))
        for name in ("raw", "held")
    )
    return raw, held, found["stored_as"]


def _count(kept: Tensor, text: str, sizes: Sequence[int]) -> Tensor:
    copy = kept.clone()
    if _active.account is not None:
        _active.account.add(copy, *_figures(text, tuple(sizes)))
    return copy


def _count_nothing(kept: Tensor, text: str, sizes: Sequence[int]) -> Tensor:
    return torch.empty_like(kept)


_library = torch.library.Library("daf", "DEF")
_library.define("count(Tensor kept, str text, SymInt[] sizes) -> Tensor", tags=NOT_IN_CUDA_GRAPHS)
_library.impl("count", _count, "CompositeExplicitAutograd")
torch.library.register_fake("daf::count", _count_nothing, lib=_library)
