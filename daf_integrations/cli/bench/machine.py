"""Describes the machine of a benchmark."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from daf_integrations.cli.doctor import loaded_allocator

_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine and the software of a measurement; ``threads`` counts the threads of torch."""

    cpu: str
    cores: int
    threads: int
    torch: str
    python: str
    allocator: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class GpuMachine(Machine):
    """A machine with the GPU that was measured; ``cuda`` is the version that torch was built with."""

    gpu: str
    gpu_bytes: int
    capability: str
    cuda: str
    triton: str


def describe_machine(
    *, dtype: str, threads: int | None = None, allocator: str | None = None, device: str = "cpu"
) -> Machine:
    """Describes this machine and a benchmark; without `threads` and `allocator` those of this process."""
    machine = Machine(
        cpu=_cpu_name(),
        cores=core_count(),
        threads=threads or torch.get_num_threads(),
        torch=torch.__version__,
        python=platform.python_version(),
        allocator=allocator or loaded_allocator(),
        dtype=dtype,
    )
    return machine if device == "cpu" else _with_gpu(machine)


def core_count() -> int:
    """Returns how many cores this process may use."""
    return len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count() or 1


def _with_gpu(machine: Machine) -> GpuMachine:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return GpuMachine(
        **asdict(machine),
        gpu=properties.name,
        gpu_bytes=properties.total_memory,
        capability=f"{properties.major}.{properties.minor}",
        cuda=torch.version.cuda or "",
        triton=_version("triton"),
    )


def _cpu_name() -> str:
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # builds for other GPUs bring it under other names
        return ""
