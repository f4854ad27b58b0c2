"""Chooses the kernels for a device, and says why there are none."""

from __future__ import annotations

import subprocess
from functools import lru_cache
from logging import getLogger

import torch
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from daf_kernels.backend import Backend, WrongBytesError
from daf_kernels.reference.backend import ReferenceBackend

LEAST_CAPABILITY = (8, 0)
"""NVIDIA GPUs before this have no minimum that shows a NaN, and no bfloat16."""

log = getLogger("daf")


class NoKernelError(Exception):
    """Nothing can be computed on a device."""


class UnusableError(Exception):
    """Why a device's kernels cannot be used."""


def load_backend(device: torch.device, name: str = "auto") -> Backend:
    """Returns the kernels for a device, compiled and checked.

    Where a device has none, or they cannot be used, it is the reference, in plain torch operations; a warning says so
    once, and why.

    Args:
        device: Where the tensors lie.
        name: "auto" for the device's own kernels, "reference" for torch operations.

    Raises:
        NoKernelError: The device holds no values.
        WrongBytesError: Kernels were loaded, and do not give back what they were given.
    """
    if name == "reference":
        return ReferenceBackend()
    if device.type == "meta":
        raise NoKernelError("tensors on device 'meta' have no values that could be kept")
    try:
        return _load_cpu() if device.type == "cpu" else _load_triton(device)
    except UnusableError as error:
        _warn_once(device.type, str(error))
        return ReferenceBackend()


@lru_cache(maxsize=16)
def _warn_once(kind: str, why: str) -> None:
    log.warning("DAF works on device '%s' with plain torch operations, which are slow: %s", kind, why)


def _load_cpu() -> Backend:
    """Returns the numba kernels of the CPU.

    Raises:
        UnusableError: They cannot be used there.
    """
    # numba takes 0.5 s to import, which a program that only imports DAF does not pay.
    from daf_kernels.cpu import backend as cpu
    from daf_kernels.cpu import compile_ahead, compile_cache

    if (why := compile_cache.why_not_compiled()) is not None:
        raise UnusableError(why)
    compile_ahead.compile_ahead()
    before = compile_cache.compilations()
    with _disable_current_modes():  # fake tensors, say, have no memory to write to
        seconds = cpu.warm_up()
    if compile_cache.compilations() > before:
        lost = compile_cache.why_not_kept()
        log.warning(
            "DAF compiled its CPU kernels in %.1f s; %s",
            seconds,
            "the next run finds them on disk." if lost is None else f"the next run does so again: {lost}",
        )
    _give_back_compiler(compile_cache.known())
    return cpu.CpuBackend()


@lru_cache(maxsize=1)
def _give_back_compiler(kernels: int) -> None:
    """Gives back the memory of the compiler, once for so many kernels: to find it takes 60 ms beside torch's libraries.

    An engine is made in 4 ms otherwise.
    """
    from daf_kernels.cpu import loader_pages

    loader_pages.give_back_compiler()


@lru_cache(maxsize=16)
def _load_triton(device: torch.device) -> Backend:
    """Returns the Triton kernels of a GPU.

    Raises:
        UnusableError: They cannot be used there.
    """
    if device.type != "cuda":
        raise UnusableError("there are kernels for CPUs and for the GPUs that torch calls 'cuda'")
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, version)) for version in (capability, LEAST_CAPABILITY))
        raise UnusableError(f"its compute capability is {found}, and kernels need {least}")
    try:
        import triton

        from daf_kernels.triton.backend import load
    except ImportError as error:
        raise UnusableError(f"Triton cannot be imported ({error}); run: pip install triton") from error
    try:
        _build_driver()
    except (OSError, RuntimeError, ImportError, AssertionError, subprocess.CalledProcessError) as error:
        raise UnusableError(
            f"Triton cannot work here ({error}); it needs a C compiler, the header files of Python, and a folder that "
            "may be written to (TRITON_CACHE_DIR)"
        ) from error
    try:
        return load(device)
    except (WrongBytesError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each compiler, the assembler and the driver have classes of their own
        raise UnusableError(
            f"its kernels cannot be compiled or run ({type(error).__name__}: {error}); the GPU's driver may be older "
            f"than what Triton {triton.__version__} compiles for"
        ) from error


def _build_driver() -> None:
    """Has Triton compile what it calls the GPU's driver with, which it does once."""
    import triton

    triton.runtime.driver.active.get_current_target()
