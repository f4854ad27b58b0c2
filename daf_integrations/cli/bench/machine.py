"""Describes the machine of a benchmark."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from daf_integrations.cli.doctor import core_count, installed_version, loaded_allocator

_CPU_INFO = Path("/proc/cpuinfo")


def describe_machine(
    *, dtype: str, threads: int | None = None, allocator: str | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Describes this machine and a benchmark; without `threads` and `allocator` those of this process.

    ``threads`` counts the threads of torch; ``cuda`` is the version that torch was built with.
    """
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    machine = {
        "cpu": next(names, platform.processor() or platform.machine()),
        "cores": core_count(),
        "threads": threads or torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "allocator": allocator or loaded_allocator(),
        "dtype": dtype,
    }
    if device == "cpu":
        return machine
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        **machine,
        "gpu": gpu.name,
        "gpu_bytes": gpu.total_memory,
        "capability": f"{gpu.major}.{gpu.minor}",
        "cuda": torch.version.cuda or "",
        "triton": installed_version("triton") or "",  # builds for other GPUs bring it under other names
    }
