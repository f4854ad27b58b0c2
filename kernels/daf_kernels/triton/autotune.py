"""Chooses between ways of doing the same work: by a rule first, then by measuring them on the live device.

What was measured is remembered for a device and a class of problems in a small file, so that it is measured once.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import triton

from daf_kernels.backend import is_capturing

ROUNDS = 5
"""How often each way is timed, in turn, after a first time that may compile it."""

Timer = Callable[[Callable[[], object]], float]
"""Returns the milliseconds that a call takes on the device."""


def default_file() -> Path:
    """Returns where choices are remembered: ``daf/kernel_choices.json`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "daf" / "kernel_choices.json"


def problem_class(name: str, dtype: torch.dtype, groups: int, group: int) -> str:
    """Returns the name of a class of problems whose best way is the same: sizes to a factor of two."""
    return f"{name}/{str(dtype).removeprefix('torch.')}/{groups.bit_length()}/{group.bit_length()}"


def device_name(device: torch.device) -> str:
    """Returns what a measurement depends on: the device, and the version of its compiler."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} sm_{major}{minor} triton {triton.__version__}"


class Selector:
    """Remembers which way is the fastest. Thread-safe.

    Args:
        device: Where the work is done.
        timer: Times a call; None where nothing is to be measured, and the rule decides.
        file: Where choices are remembered; None for this process alone. One that cannot be read counts as empty, and
            one that cannot be written is left alone.
    """

    def __init__(self, device: torch.device, timer: Timer | None = None, file: Path | None = None) -> None:
        self._device = device_name(device)
        self._timer = timer
        self._file = file
        self._chosen = _read(file).get(self._device, {})
        self._lock = threading.Lock()

    def known(self, problem: str, rule: str) -> str | None:
        """Returns what `choose` returns, if it measures nothing; `rule` is the way that the rule takes."""
        return self._chosen.get(problem, rule if self._timer is None else None)

    def choose(self, problem: str, ways: Mapping[str, Callable[[], object]]) -> str:
        """Returns the name of the way to go.

        Args:
            problem: A `problem_class`.
            ways: What there is to choose from, first the one that the rule takes. Each may be called many times.
        """
        first = next(iter(ways))
        if len(ways) == 1:
            return first
        known = self._chosen.get(problem)
        if known is not None and known in ways:
            return known
        if self._timer is None or is_capturing():  # a measurement would become a part of the graph
            return first
        with self._lock:
            self._chosen[problem] = best = self._fastest(self._timer, ways)
            if self._file is not None:
                _write(self._file, self._device, self._chosen)
        return best

    @staticmethod
    def _fastest(timer: Timer, ways: Mapping[str, Callable[[], object]]) -> str:
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(ROUNDS + 1):
            for name, way in ways.items():
                taken = timer(way)
                if turn:
                    times[name].append(taken)
        return min(times, key=lambda name: statistics.median(times[name]))


def cuda_timer(device: torch.device) -> Timer:
    """Returns what times calls on a CUDA device."""

    def milliseconds(call: Callable[[], object]) -> float:
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
        return start.elapsed_time(end)

    return milliseconds


def _read(file: Path | None) -> dict[str, dict[str, str]]:
    try:
        content = {} if file is None else json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and all(isinstance(part, dict) for part in content.values()) else {}


def _write(file: Path, device: str, chosen: Mapping[str, str]) -> None:
    """Adds choices to the file; readers find the old content or the new, never a part."""
    content = _read(file) | {device: dict(chosen)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as part:
            json.dump(content, part, indent=1, sort_keys=True)
        os.replace(part.name, file)
    except OSError:
        return  # measured again by the next process
