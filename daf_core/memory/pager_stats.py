"""What keeping a memory budget did during a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PagerAccount:
    """What the pager did during a step.

    Attributes:
        peak_bytes: The most bytes that were held at once.
        dropped_planes: Planes given up under pressure, before or after they were written.
        dropped_bytes: Bytes of their pages.
        spilled_bytes: Bytes copied to the next tier.
        seconds: Time spent on leases and drops, and on writing to the next tier and waiting for
            it; what a GPU waits for copies is not in it.
    """

    peak_bytes: int = 0
    dropped_planes: int = 0
    dropped_bytes: int = 0
    spilled_bytes: int = 0
    seconds: float = 0.0
