"""What this process holds in memory: now, at its peak, and over a stretch of time."""

import resource
import sys
import threading
import time
from pathlib import Path

import psutil
import torch

from daf_core.memory.system.release import release_free_memory

_SAMPLING_SECONDS = 0.002
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_PROCESS = psutil.Process()


def live_bytes() -> int:
    """Returns the bytes in use: allocated on the GPU if there is one, else resident in main memory."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else _PROCESS.memory_info().rss


def reset_peak() -> None:
    """Makes `peak_bytes` start anew, where the system can do that (a GPU, and Linux)."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5")  # sets the high-water mark VmHWM back to the present size


def peak_bytes() -> int:
    """Returns the most bytes that were in use since `reset_peak`."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if _STATUS.exists():
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class MemorySampler(threading.Thread):
    """Records live bytes every two milliseconds from `start` to `stop`.

    Freed memory is released before every sample, which slows what runs meanwhile: do not time it.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, int]] = []
        self._stopped = threading.Event()

    def run(self) -> None:
        """Samples (seconds since the start, live bytes) until stopped."""
        begin = time.perf_counter()
        while True:
            release_free_memory()
            self.samples.append((time.perf_counter() - begin, live_bytes()))
            if self._stopped.wait(_SAMPLING_SECONDS):
                return

    def stop(self) -> None:
        """Ends the recording and waits until the last sample is in."""
        self._stopped.set()
        self.join()
