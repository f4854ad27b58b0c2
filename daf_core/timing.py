"""A clock that waits for the GPU."""

from __future__ import annotations

import time

import torch


def synchronized_time() -> float:
    """Returns the time at which a GPU, where there is one, has done what it was given, in seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
