"""What DAF finds on this machine, what is missing, and what to type.

The facts (`examine`) are kept apart from how they are shown (`daf_integrations.cli.main`). No trainer is imported to
find its version, so that one that is missing or broken is a finding and never an exception.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import sys
from ctypes.util import find_library
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Literal

import humanfriendly
from packaging.version import Version

Status = Literal["ok", "missing", "too old"]

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
_INSTALLERS = {"apt-get": "libtcmalloc-minimal4", "dnf": "gperftools-libs"}


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that DAF needs or plugs into.

    Attributes:
        name: name to install it by.
        floor: oldest version that DAF works with.
        purpose: what DAF has it for.
        required: whether DAF does nothing without it.
        gpu_only: whether only a machine with a GPU has a use for it.
    """

    name: str
    floor: str
    purpose: str
    required: bool = False
    gpu_only: bool = False


PACKAGES = (
    Package(name="torch", floor="2.7", purpose="everything", required=True),
    Package(name="numba", floor="0.61", purpose="CPU kernels", required=True),
    Package(name="triton", floor="3.3", purpose="GPU kernels", gpu_only=True),
    Package(name="transformers", floor="5.12", purpose="the HF Trainer plugin"),
    Package(name="peft", floor="0.19", purpose="LoRA with the HF Trainer"),
    Package(name="accelerate", floor="1.12", purpose="the Trainer and Accelerate plugins"),
    Package(name="lightning", floor="2.6", purpose="the Lightning plugin"),
)


@dataclass(frozen=True, kw_only=True)
class PackageState:
    """A package as it is installed here.

    Attributes:
        package: what DAF wants.
        version: installed version, None where there is none.
    """

    package: Package
    version: str | None

    @property
    def status(self) -> Status:
        """Whether the installed version will do."""
        if self.version is None:
            return "missing"
        return "ok" if Version(self.version) >= Version(self.package.floor) else "too old"

    @property
    def remedy(self) -> str:
        """What is wrong, and the command that puts it right."""
        package = self.package
        return f"{package.name} is {self.status} (for {package.purpose}): pip install '{package.name}>={package.floor}'"


@dataclass(frozen=True, kw_only=True)
class TorchState:
    """What torch says of this machine.

    Attributes:
        devices: one line a device, the CPU first.
        threads: threads that torch computes with; 0 where torch does not load.
        error: why torch does not load, None if it does.
    """

    devices: tuple[str, ...] = ()
    threads: int = 0
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class KernelState:
    """What becomes of the CPU kernels here.

    Attributes:
        error: why they do not load, None if they do.
        not_kept: why the next run does not find them compiled, None if it does.
    """

    error: str | None = None
    not_kept: str | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All that `daf doctor` reports.

    Attributes:
        python: version of the interpreter.
        packages: the state of each of `PACKAGES`, in that order.
        torch: what torch says of this machine.
        cores: cores that this process may use.
        allocator: memory allocator of this process, see `loaded_allocator`, and how it was set.
        kernels: what becomes of the CPU kernels.
    """

    python: str
    packages: tuple[PackageState, ...]
    torch: TorchState
    cores: int
    allocator: str
    kernels: KernelState = KernelState()

    @property
    def problems(self) -> list[str]:
        """What keeps DAF from working, and what to type."""
        broken = [f"torch does not load: {self.torch.error}"] if self.torch.error else []
        broken += [state.remedy for state in self._unmet() if state.package.required]
        # Without torch or numba there are no kernels, and that is said already.
        return broken or ([f"the CPU kernels do not load: {self.kernels.error}"] if self.kernels.error else [])

    @property
    def advice(self) -> list[str]:
        """What DAF works without, but works better or with more trainers if it is done."""
        hints = [state.remedy for state in self._unmet() if not state.package.required]
        if self.torch.threads > self.cores:
            hints.append(
                f"torch computes with {self.torch.threads} threads on {self.cores} cores: "
                f"export OMP_NUM_THREADS={self.cores}"
            )
        if self.kernels.not_kept:
            hints.append(f"each run compiles the CPU kernels, in a minute or two: {self.kernels.not_kept}")
        if self.allocator == "glibc":
            hints.append(allocator_advice())
        return hints

    def _unmet(self) -> list[PackageState]:
        """The packages to install or to upgrade on a machine with these devices."""
        has_gpu = any(device.startswith("cuda") for device in self.torch.devices)
        return [state for state in self.packages if state.status != "ok" and (has_gpu or not state.package.gpu_only)]


def examine() -> Diagnosis:
    """Looks at this process and the machine it runs on."""
    return Diagnosis(
        python=platform.python_version(),
        packages=tuple(PackageState(package=package, version=_installed_version(package.name)) for package in PACKAGES),
        torch=_examine_torch(),
        cores=_usable_cores(),
        allocator=_described_allocator(),
        kernels=_examine_kernels(),
    )


def loaded_allocator(maps: Path = _MEMORY_MAPS) -> str:
    """Names the memory allocator that a process has loaded.

    Args:
        maps: memory map of the process, in the format of Linux.

    Returns:
        "tcmalloc", "jemalloc", "mimalloc", "musl" or "glibc"; "unknown" for others and on a system without such a file.
    """
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


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _examine_torch() -> TorchState:
    try:
        import torch
    except (ImportError, OSError) as error:  # a build for another CUDA or libc raises OSError
        return TorchState(error=str(error))
    cpu = f"cpu: {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return TorchState(devices=(cpu, *_accelerators()), threads=torch.get_num_threads())


def _examine_kernels() -> KernelState:
    try:
        importlib.import_module("daf_kernels.cpu.backend")
        from daf_kernels.cpu.compile_cache import why_not_kept
    except Exception as error:  # numba and llvmlite have classes of their own for what they cannot work with
        return KernelState(error=f"{type(error).__name__}: {error}")
    return KernelState(not_kept=why_not_kept())


def _accelerators() -> list[str]:
    import torch

    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [
            f"cuda:{index}: {device.name}, {humanfriendly.format_size(device.total_memory, binary=True)}"
            for index, device in enumerate(found)
        ]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [] if accelerator is None else [str(accelerator)]
