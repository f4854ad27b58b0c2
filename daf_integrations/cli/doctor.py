"""`daf doctor`: what DAF finds on this machine, what is missing, and what to type.

No trainer is imported to find its version, so that one that is missing or broken is a finding and never an exception.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shutil
import sys
from ctypes.util import find_library
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Any, Literal

import click
import humanfriendly
from packaging.version import Version
from rich.console import Console
from rich.table import Table

Status = Literal["ok", "missing", "too old"]

_COLORS: dict[Status, str] = {"ok": "green", "missing": "yellow", "too old": "red"}
_MEMORY_MAPS = Path("/proc/self/maps")
_ALLOCATORS = {
    "tcmalloc": "/libtcmalloc",
    "jemalloc": "/libjemalloc",
    "mimalloc": "/libmimalloc",
    "musl": "/(ld-|libc[.])musl-",
    "glibc": "/libc([.]so[.]6|-2[.][0-9]+[.]so)",  # the latter before glibc 2.34
}
MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
SMALL_BLOCK, _LARGE_BLOCK = 1 << 16, 1 << 20  # within these, peaks are those of tcmalloc (benchmarks.allocators)
_TCMALLOC = "libtcmalloc_minimal.so.4"
_MIMALLOC = "cmeel-mimalloc"  # distribution of the extra [allocator], whose wheel has the library
_LIBRARIES = tuple(map(Path, ("/usr/lib", "/usr/lib64", "/usr/local/lib")))
_SHOWN = ("python", "packages", "devices", "cores", "torch_threads", "allocator", "problems", "advice")
_INSTALLERS = {"apt-get": "libtcmalloc-minimal4", "dnf": "gperftools-libs"}


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that DAF needs or plugs into, by the name to install it by; `floor` is the oldest version that works.

    Attributes:
        required: Whether DAF does nothing without it.
        gpu_only: Whether only a machine with a GPU has a use for it.
    """

    name: str
    floor: str
    purpose: str
    required: bool = False
    gpu_only: bool = False

    def status(self, installed: str | None) -> Status:
        """Whether an installed version will do; None where there is none."""
        if installed is None:
            return "missing"
        return "ok" if Version(installed) >= Version(self.floor) else "too old"


PACKAGES = (
    Package(name="torch", floor="2.10", purpose="everything", required=True),
    Package(name="numba", floor="0.61", purpose="CPU kernels", required=True),
    Package(name="triton", floor="3.6", purpose="GPU kernels", gpu_only=True),
    Package(name="transformers", floor="5.12", purpose="the HF Trainer plugin"),
    Package(name="peft", floor="0.19", purpose="LoRA with the HF Trainer"),
    Package(name="accelerate", floor="1.12", purpose="the Trainer and Accelerate plugins"),
    Package(name="lightning", floor="2.6", purpose="the Lightning plugin"),
)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All that `daf doctor` reports.

    Attributes:
        packages: Installed version of each of `PACKAGES`, None where there is none.
        devices: One line a device, the CPU first; none where torch does not load.
        torch_threads: Threads that torch computes with; 0 where it does not load.
        torch_error: Why torch does not load, None if it does.
        allocator: See `loaded_allocator`; with how it was set.
        kernel_error: Why the CPU kernels do not load, None if they do.
        kernels_not_kept: Why the next run does not find them compiled, None if it does.
    """

    python: str
    packages: dict[str, str | None]
    devices: tuple[str, ...]
    cores: int
    torch_threads: int
    torch_error: str | None = None
    allocator: str
    kernel_error: str | None = None
    kernels_not_kept: str | None = None

    @property
    def problems(self) -> list[str]:
        """What keeps DAF from working, and what to type."""
        broken = [f"torch does not load: {self.torch_error}"] if self.torch_error else []
        broken += self._remedies(required=True)
        # Without torch or numba there are no kernels, and that is said already.
        return broken or ([f"the CPU kernels do not load: {self.kernel_error}"] if self.kernel_error else [])

    @property
    def advice(self) -> list[str]:
        """What DAF works without, but works better or with more trainers if it is done."""
        hints = self._remedies(required=False)
        if self.torch_threads > self.cores:
            hints.append(
                f"torch computes with {self.torch_threads} threads on {self.cores} cores: "
                f"export OMP_NUM_THREADS={self.cores}"
            )
        if self.kernels_not_kept:
            hints.append(f"each run compiles the CPU kernels, in a minute or two: {self.kernels_not_kept}")
        if self.allocator == "glibc":
            hints.append(allocator_advice())
        return hints

    def _remedies(self, required: bool) -> list[str]:
        """Returns what is wrong with packages on a machine with these devices, and the commands that put it right."""
        has_gpu = any(device.startswith("cuda") for device in self.devices)
        wanted = [each for each in PACKAGES if each.required == required and (has_gpu or not each.gpu_only)]
        found = [(each, each.status(self.packages[each.name])) for each in wanted]
        return [
            f"{each.name} is {status} (for {each.purpose}): pip install '{each.name}>={each.floor}'"
            for each, status in found
            if status != "ok"
        ]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
def doctor(as_json: bool) -> None:
    """Say whether this machine is ready for DAF, and what to type if it is not.

    Exits with 1 if something keeps DAF from working.
    """
    found = examine()
    if as_json:
        click.echo(json.dumps({name: getattr(found, name) for name in _SHOWN}, indent=2))
    else:
        _print(found, Console())
    sys.exit(1 if found.problems else 0)


def examine() -> Diagnosis:
    """Looks at this process and the machine it runs on."""
    return Diagnosis(
        python=platform.python_version(),
        packages={package.name: installed_version(package.name) for package in PACKAGES},
        **_examine_torch(),
        cores=core_count(),
        allocator=_described_allocator(),
        **_examine_kernels(),
    )


def loaded_allocator(maps: Path = _MEMORY_MAPS) -> str:
    """Names the memory allocator in a process' memory map; "unknown" for others, and where there is no such file."""
    try:
        mapped = maps.read_text()
    except OSError:
        return "unknown"
    return next((name for name, file in _ALLOCATORS.items() if re.search(file, mapped)), "unknown")


def allocator_advice() -> str:
    """Says what glibc's allocator costs, and how this machine gets another one."""
    why = "glibc's allocator keeps large blocks that were freed, so that little of what DAF saves shows in RSS"
    library = installed_tcmalloc()
    if library:
        return f"{why}: LD_PRELOAD={library} python train.py"
    if installed_mimalloc():
        return f"{why}: daf run train.py"
    if "CONDA_PREFIX" in os.environ:
        install, library = "conda install -c conda-forge gperftools", f"$CONDA_PREFIX/lib/{_TCMALLOC}"
    else:
        install, library = _install_command(), _TCMALLOC
    setting = f"{MMAP_THRESHOLD}={SMALL_BLOCK} python train.py"
    return (
        f"{why}: {install}, then LD_PRELOAD={library} python train.py; or pip install {_MIMALLOC}, then daf run "
        f"train.py; where nothing can be installed, {setting}, with which steps are slower"
    )


def installed_tcmalloc() -> str | None:
    """Returns what to preload for tcmalloc: a path, or a name that the loader finds; None where it is not installed."""
    own = Path(os.environ.get("CONDA_PREFIX", sys.prefix)) / "lib" / _TCMALLOC
    if own.exists():
        return str(own)
    # That asks ldconfig, gcc or ld, and small containers have none of them.
    found = (str(path) for folder in _LIBRARIES for path in (*folder.glob(_TCMALLOC), *folder.glob(f"*/{_TCMALLOC}")))
    return find_library("tcmalloc_minimal") or next(found, None)


def installed_mimalloc() -> str | None:
    """Returns what to preload for mimalloc: a path, or a name that the loader finds; None where it is not installed."""
    try:
        found = [file for file in files(_MIMALLOC) or [] if file.name.startswith("libmimalloc.so.")]
    except PackageNotFoundError:
        found = []
    paths = (Path(str(file.locate())).resolve() for file in sorted(found, key=lambda file: len(file.name)))
    return next((str(path) for path in paths if path.is_file()), None) or find_library("mimalloc")


def installed_version(package: str) -> str | None:
    """Returns the version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def core_count() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _described_allocator() -> str:
    name, threshold = loaded_allocator(), os.environ.get(MMAP_THRESHOLD, "")
    gives_back = name == "glibc" and bool(re.fullmatch("[0-9]{1,18}", threshold)) and int(threshold) <= _LARGE_BLOCK
    return f"{name}, {MMAP_THRESHOLD}={threshold}" if gives_back else name


def _install_command() -> str:
    installer = next(filter(shutil.which, _INSTALLERS), None)
    if installer is None:
        return "install gperftools"
    sudo = "sudo " if shutil.which("sudo") else ""  # containers mostly have none, and need none
    return f"{sudo}{installer} install {_INSTALLERS[installer]}"


def _examine_torch() -> dict[str, Any]:
    try:
        import torch
    except (ImportError, OSError) as error:  # a build for another CUDA or libc raises OSError
        return {"devices": (), "torch_threads": 0, "torch_error": str(error)}
    devices = [f"cpu: {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            size = humanfriendly.format_size(found.total_memory, binary=True)
            devices.append(f"cuda:{index}: {found.name}, {size}")
    elif (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        devices.append(str(accelerator))
    return {"devices": tuple(devices), "torch_threads": torch.get_num_threads()}


def _examine_kernels() -> dict[str, Any]:
    try:
        importlib.import_module("daf_kernels.cpu.backend")
        from daf_kernels.cpu.compile_cache import why_not_compiled, why_not_kept
    except Exception as error:  # numba and llvmlite have classes of their own for what they cannot work with
        return {"kernel_error": f"{type(error).__name__}: {error}"}
    return {"kernel_error": why_not_compiled(), "kernels_not_kept": why_not_kept()}


def _print(found: Diagnosis, console: Console) -> None:
    packages = Table("package", "version", "needed", "status", "for")
    for package in PACKAGES:
        installed = found.packages[package.name]
        status = package.status(installed)
        shown = f"[{_COLORS[status]}]{status}[/]"
        packages.add_row(package.name, installed or "-", f">={package.floor}", shown, package.purpose)
    console.print(packages)
    machine = Table("machine", "")
    machine.add_row("python", found.python)
    machine.add_row("devices", "\n".join(found.devices) or "unknown")
    machine.add_row("cores", str(found.cores))
    machine.add_row("torch threads", str(found.torch_threads or "unknown"))
    machine.add_row("allocator", found.allocator)
    console.print(machine)
    for title, lines in (("Problems", found.problems), ("Advice", found.advice)):
        if lines:
            console.print(f"\n{title}", style="bold")
        for line in lines:
            console.print(f"- {line}", markup=False, highlight=False, soft_wrap=True)
    if not found.problems:
        console.print("\nDAF is ready.", style="green")
