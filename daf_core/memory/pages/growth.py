"""How the page pool grows, and when it gives memory back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW = 10
"""Steps without a peak after which the memory for it is given back."""

SLACK = 1.15
"""Reserved bytes over the largest recent peak that are not worth giving back."""


@dataclass(frozen=True)
class Growth:
    """Grows by a share of what is reserved, so that the last step wastes no more than that share, or by equal steps."""

    share: float = 1 / 8  # step over reserved bytes
    least: int = 1 << 20  # smallest step in bytes

    def step(self, reserved: int) -> int:
        """Returns the bytes to add to `reserved` bytes; the pool takes more where more is missing."""
        return max(int(reserved * self.share), self.least)


class PeakWatch:
    """Remembers the peaks of the last `WINDOW` steps."""

    def __init__(self) -> None:
        self._peaks: deque[int] = deque(maxlen=WINDOW)

    def add(self, peak: int) -> None:
        """Adds the most bytes that were in use in a step."""
        self._peaks.append(peak)

    def worth_keeping(self, reserved: int) -> int:
        """Returns how many of the reserved bytes are likely to be needed again."""
        if len(self._peaks) < WINDOW or reserved <= SLACK * max(self._peaks):
            return reserved
        return max(self._peaks)
