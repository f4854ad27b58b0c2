"""Keeps the values of an encoded tensor until the device confirms that all of them are finite.

To wait for each answer would leave a GPU without work once for each activation that is saved.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

from torch import Tensor
from typing_extensions import override

from daf_core.codecs.raw import KeptStorage, KeptStorages, RawActivation
from daf_core.memory import forks
from daf_core.memory.pager import Pager
from daf_core.memory.pending import PENDING_BYTES, Pending, PendingWindow
from daf_kernels import DeviceFlag

MOST_PENDING = 3
"""Tensors that may wait at once, however large they are: a host that waits for each leaves a GPU without work."""

ASKED_BYTES = PENDING_BYTES // 4
"""Bytes of values after which a device is asked for its answers, as it sends many as fast as one. The answers for the
oldest values are on their way then when three times as many may still be saved without a wait."""


Compact = Callable[[Tensor], Tensor]


class PendingCheck(Pending):
    """Values that are kept alongside their codes.

    Args:
        values: The values.
        answer: Whether the codes stand for them.
        keep: Counts their storage if they have to stay.
        compact: Returns the form of the values that is decoded; None where they have it.
    """

    def __init__(
        self, values: Tensor, answer: DeviceFlag, keep: Callable[[], KeptStorage], compact: Compact | None
    ) -> None:
        self.size = values.untyped_storage().nbytes()
        self._exact: RawActivation | None = RawActivation(values, None)
        self._open: tuple[DeviceFlag, Callable[[], KeptStorage]] | None = (answer, keep)
        self._compact = compact
        self._kept: KeptStorage | None = None
        self._lock = threading.Lock()  # the next activation may be saved while backward reads this one

    @property
    def is_known(self) -> bool:
        """Whether `settle` has nothing to wait for."""
        question = self._open
        return question is None or question[0].is_known

    @override
    def settle(self) -> RawActivation | None:
        """Waits for the answer. Returns the values if codes do not stand for them, and lets go of them otherwise.

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
                    if self._exact is not None and self._compact is not None:
                        self._exact = self._exact.seen_as(self._compact)
                self._open = None
            return self._exact


class PendingChecks:
    """The unresolved checks of an engine, in the order of saving. Only the stored activations keep them alive."""

    def __init__(self) -> None:
        self._window: PendingWindow[PendingCheck] = PendingWindow()
        self._lock = forks.lock(forks.Level.DOUBTS)
        self._kept = KeptStorages()
        self._closed = 0
        self._unasked: list[DeviceFlag] = []
        self._unasked_bytes = 0

    def add(
        self, values: Tensor, answer: DeviceFlag, pager: Pager, compact: Compact | None = None
    ) -> PendingCheck | None:
        """Returns the check of values, and settles the oldest ones beyond `PENDING_BYTES`; None where none may wait.

        None may inside of `none`, and where a budget counts activations: what it gives up would depend on when a
        device answers.
        """
        if pager.budget is not None:
            return None
        storage = values.untyped_storage()
        check = PendingCheck(values, answer, partial(self._kept.keep, storage, storage.nbytes(), pager), compact)
        with self._lock:
            if self._closed:
                return None
            self._window.add(check, weakref.ref(check))
            self._ask_some(answer, check.size)
            while self._window.size > PENDING_BYTES and len(self._window) > MOST_PENDING:
                self._window.settle_oldest()
            self._settle_known()
        return check

    def settle_known(self) -> None:
        """Settles the checks that need no waiting."""
        with self._lock:
            self._settle_known()

    def settle(self) -> None:
        """Settles all checks.

        Raises:
            ActivationBudgetError: See `PendingCheck.settle`.
        """
        with self._lock:
            while self._window:
                self._window.settle_oldest()

    @contextmanager
    def none(self) -> Generator[None]:
        """Waits for every answer at once inside."""
        with self._lock:
            self._closed += 1
        try:
            self.settle()
            yield
        finally:
            with self._lock:
                self._closed -= 1

    def _ask_some(self, answer: DeviceFlag, size: int) -> None:
        """Asks for the answers since the last time, if values of enough bytes wait: of several devices and streams."""
        self._unasked.append(answer)
        self._unasked_bytes += size
        if self._unasked_bytes >= ASKED_BYTES:
            for unasked in self._unasked:
                unasked.ask()
            self._unasked.clear()
            self._unasked_bytes = 0

    def _settle_known(self) -> None:
        while self._window and ((check := self._window.oldest) is None or check.is_known):
            self._window.settle_oldest()
