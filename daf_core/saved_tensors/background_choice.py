"""Whether to pack in the background: what was asked for, or what is faster here."""

from __future__ import annotations

import os
import re

import numpy as np
import torch

from daf_core.config import DAFConfig
from daf_core.errors import ConfigError, shown
from daf_core.saved_tensors.backends import Backends

MOST_THREADS = 4
"""Threads that one encoding is split over, however many cores are idle: it is a fraction of the forward pass."""

TRIALS = 4
"""Forward passes of each kind that are timed, in turn, before one is chosen; those before the first are a warm-up."""

WARM_UP = 2


class PackingChoice:
    """Decides for each forward pass how many threads pack in the background.

    With ``packing="auto"`` and idle cores, the first passes are packed in both ways by turns, and timed against the
    bytes that they save. It changes nothing but the time.

    Raises:
        ConfigError: LOCAL_WORLD_SIZE is no number of processes.
    """

    def __init__(self, config: DAFConfig, backends: Backends) -> None:
        local_processes()  # a mistake there is found before the first pass
        self._asked = config.packing
        self._backends = backends
        # Torch's operations, which the reference consists of, would bring a second team of torch's threads along.
        if config.packing == "auto" and config.backend == "reference":
            self._asked = "device"
        self._trials: dict[bool, list[float]] = {False: [], True: []}
        self._passes = 0
        self._chosen: bool | None = None if self._asked == "auto" else self._asked == "workers"

    def threads(self) -> int:
        """Returns the number of threads for the next pass; 0 for packing at once."""
        if not self._backends.packs_on_host:
            return 0
        idle = min(max(idle_cores(), 0), MOST_THREADS)
        if self._asked == "workers":
            return max(idle, 1)
        background = self._passes % 2 == 1 if self._chosen is None else self._chosen
        return idle if background else 0

    def add(self, threads: int, seconds: float, raw_bytes: int) -> None:
        """Takes the time of a pass with so many threads, of which plain training would have kept so many bytes."""
        if self._chosen is not None or not raw_bytes or not self._backends.packs_on_host or idle_cores() <= 0:
            return
        self._passes += 1
        if self._passes > WARM_UP:
            self._trials[threads > 0].append(seconds / raw_bytes)
        if min(len(trials) for trials in self._trials.values()) >= TRIALS:
            self._chosen = bool(np.median(self._trials[True]) < np.median(self._trials[False]))


def idle_cores() -> int:
    """Returns the cores that this process may use and that torch does not."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # torchrun and accelerate start several processes on a machine, each of which sees all of its cores.
    return usable // local_processes() - torch.get_num_threads()


def local_processes() -> int:
    """Returns how many processes of this training run on this machine.

    Raises:
        ConfigError: LOCAL_WORLD_SIZE is not a positive number.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={shown(text)} is no number of processes; set it to that of this machine, or unset it"
        )
    return int(text)
