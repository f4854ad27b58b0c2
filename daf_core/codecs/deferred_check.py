"""What was encoded before it is known whether codes stand for it: its values are kept until the device has said so.

To wait for each answer would leave a GPU without work once for each activation that is saved.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from daf_core.codecs.raw import KeptStorage, KeptStorages, RawActivation
from daf_core.memory import forks
from daf_core.memory.pager import Pager
from daf_kernels import DeviceFlag

IN_DOUBT_BYTES = 64 << 20
"""Bytes of tensors that may wait for an answer, as many as may be in flight where others pack. A GPU is seldom further
behind: it reads them in a fraction of a millisecond."""


class PendingCheck:
    """Values beside their codes.

    Args:
        values: The values.
        answer: Whether the codes stand for them.
        keep: Counts their storage if they have to stay.
    """

    def __init__(self, values: Tensor, answer: DeviceFlag, keep: Callable[[], KeptStorage]) -> None:
        self.size = values.untyped_storage().nbytes()
        self._exact: RawActivation | None = RawActivation(values, None)
        self._open: tuple[DeviceFlag, Callable[[], KeptStorage]] | None = (answer, keep)
        self._kept: KeptStorage | None = None
        self._lock = threading.Lock()  # the next activation may be saved while backward reads this one

    @property
    def is_known(self) -> bool:
        """Whether `settle` has nothing to wait for."""
        question = self._open
        return question is None or question[0].is_known

    def settle(self) -> RawActivation | None:
        """Waits for the answer. Returns the values where codes do not stand for them, and lets go of them otherwise.

        Raises:
            ActivationBudgetError: They have to stay, and a budget has no room for them.
        """
        with self._lock:
            if self._open is not None:
                answer, keep = self._open
                if answer:
                    self._exact = None
                else:
                    self._kept = keep()
                self._open = None
            return self._exact


class PendingChecks:
    """Those of an engine, in the order of saving; whoever has them stored keeps them alive."""

    def __init__(self) -> None:
        self._window: deque[tuple[weakref.ref[PendingCheck], int]] = deque()
        self._size = 0
        self._lock = forks.lock(forks.Level.DOUBTS)
        self._kept = KeptStorages()
        self._closed = 0

    def add(self, values: Tensor, answer: DeviceFlag, pager: Pager) -> PendingCheck | None:
        """Returns the doubt about values, and settles those that too much memory waits for; None where none may wait.

        None may while `none` is open, and where a budget counts activations: what it gives up would depend on when a
        device answers.
        """
        if pager.budget is not None:
            return None
        doubt = PendingCheck(values, answer, partial(self._kept.keep, values.detach(), pager))
        with self._lock:
            if self._closed:
                return None
            self._window.append((weakref.ref(doubt), doubt.size))
            self._size += doubt.size
            while self._size > IN_DOUBT_BYTES:
                self._settle_oldest()
            self._settle_known()
        return doubt

    def settle_known(self) -> None:
        """Settles those that need no waiting."""
        with self._lock:
            self._settle_known()

    def settle(self) -> None:
        """Settles all.

        Raises:
            ActivationBudgetError: See `PendingCheck.settle`.
        """
        with self._lock:
            while self._window:
                self._settle_oldest()

    @contextmanager
    def none(self) -> Generator[None]:
        """Has nothing in doubt inside."""
        with self._lock:
            self._closed += 1
        try:
            self.settle()
            yield
        finally:
            with self._lock:
                self._closed -= 1

    def _settle_known(self) -> None:
        while self._window and _is_known(self._window[0][0]()):
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        reference, size = self._window[0]
        if (doubt := reference()) is not None:
            doubt.settle()
        self._window.popleft()
        self._size -= size


def _is_known(doubt: PendingCheck | None) -> bool:
    return doubt is None or doubt.is_known
