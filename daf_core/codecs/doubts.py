"""What was encoded before it is known whether codes stand for it: its values are kept until the device has said so.

To wait for each answer would leave a GPU without work once for each activation that is saved.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

from torch import Tensor

from daf_core.codecs.raw import KeptStorage, RawActivation
from daf_core.memory.pager import Pager
from daf_kernels import Answer

IN_DOUBT_BYTES = 64 << 20
"""Bytes of tensors that may wait for an answer, as many as may be in flight where others pack; the last one may be
larger. A GPU is seldom further behind: it reads them in a fraction of a millisecond."""


class Doubt:
    """Values beside their codes.

    Args:
        values: The values.
        answer: Whether the codes stand for them.
        pager: Counts the values if they have to stay.
    """

    def __init__(self, values: Tensor, answer: Answer, pager: Pager) -> None:
        self.size = values.untyped_storage().nbytes()
        self._values: RawActivation | None = RawActivation(values, None)
        self._answer: Answer | None = answer
        self._kept: KeptStorage | None = None
        self._pager = pager
        self._lock = threading.Lock()  # the next activation may be saved while backward reads this one

    @property
    def is_known(self) -> bool:
        """Whether `settle` has nothing to wait for."""
        answer = self._answer
        return answer is None or answer.is_known

    def settle(self) -> RawActivation | None:
        """Waits for the answer. Returns the values where codes do not stand for them, and lets go of them otherwise.

        Raises:
            ActivationBudgetError: They have to stay, and a budget that was set meanwhile has no room for them.
        """
        with self._lock:
            if self._answer is not None:
                if self._answer:
                    self._values = None
                else:
                    self._kept = KeptStorage(self._pager, self.size)
                self._answer = None
            return self._values


class Doubts:
    """Those of one thread, in the order of saving; whoever has them stored keeps them alive."""

    def __init__(self) -> None:
        self._window: deque[tuple[weakref.ref[Doubt], int]] = deque()
        self._size = 0

    def add(self, values: Tensor, answer: Answer, pager: Pager) -> Doubt:
        """Returns the doubt about values, and settles those that too much memory waits for."""
        doubt = Doubt(values, answer, pager)
        self._window.append((weakref.ref(doubt), doubt.size))
        self._size += doubt.size
        while len(self._window) > 1 and self._size > IN_DOUBT_BYTES:
            self._settle_oldest()
        self.settle_known()
        return doubt

    def settle_known(self) -> None:
        """Settles those that need no waiting."""
        while self._window and _is_known(self._window[0][0]()):
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        reference, size = self._window.popleft()
        self._size -= size
        if (doubt := reference()) is not None:
            doubt.settle()


def _is_known(doubt: Doubt | None) -> bool:
    return doubt is None or doubt.is_known
