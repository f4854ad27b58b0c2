"""Clocks, and rounds in which everything that is compared runs once."""

import time
from collections.abc import Callable, Mapping

import torch

Timer = Callable[[Callable[[], object]], float]
"""Returns the seconds that a call takes."""

FLUSHED_BYTES = 512 << 20
"""Written before each call: ten times the cache of an H100, and 0.2 ms of work in which the host gets ahead."""


def wall_timer(call: Callable[[], object]) -> float:
    """Returns the seconds that a call takes on a CPU."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class CudaTimer:
    """Times calls with events of the current CUDA device.

    Args:
        ahead: Whether the host launches a call while the device is still busy with something else, so that the time is
            that of the kernels alone, with nothing in the device's cache. Otherwise the device is idle when the call
            begins, and the time is what the caller sees, launches and answers included.
    """

    def __init__(self, *, ahead: bool) -> None:
        self._scratch = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda") if ahead else None

    def __call__(self, call: Callable[[], object]) -> float:
        """Returns the seconds that a call takes."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self._scratch is None:
            torch.cuda.synchronize()
        else:
            self._scratch.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def time_in_turn(actions: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Runs all actions in every round.

    Args:
        actions: Each returns the seconds that it took.
        rounds: Rounds that count.
        warm_up: Rounds before those.

    Returns:
        The seconds of each action, round by round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(warm_up + rounds):
        for name, action in actions.items():
            taken = action()
            if turn >= warm_up:
                seconds[name].append(taken)
    return seconds
