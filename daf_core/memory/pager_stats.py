"""What keeping a memory budget did during a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PagerAccount:
    """What the pager did during a step."""

    peak_bytes: int = 0  # the most bytes that were held at once
    dropped_planes: int = 0  # planes given up under pressure, before or after they were written
    dropped_bytes: int = 0  # bytes of their pages
    spilled_bytes: int = 0  # bytes copied to the next tier
    # Time spent on leases and drops, and on writing to the next tier and waiting for it; what a GPU waits for copies is
    # not in it.
    seconds: float = 0.0
