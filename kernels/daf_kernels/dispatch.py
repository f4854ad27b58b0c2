"""Chooses the kernels for a device, and says why there are none."""

from __future__ import annotations

from logging import getLogger

import torch

from daf_kernels.backend import Backend
from daf_kernels.reference_backend import ReferenceBackend

SLOW_WARM_UP = 0.5
"""Seconds from which loading kernels is reported: from the disk cache it takes 0.1 s, compiling takes 10."""

DEVICES_WITH_KERNELS = ("cpu",)

log = getLogger("daf")


class NoKernelError(Exception):
    """There is no kernel for a device."""


def load_backend(device: torch.device, name: str = "auto") -> Backend:
    """Returns the kernels for a device, compiled and checked.

    Args:
        device: Where the tensors lie.
        name: "auto" for the device's own kernels, "reference" for torch operations.

    Raises:
        NoKernelError: `name` is "auto" and the device has no kernels.
    """
    if name == "reference":
        return ReferenceBackend()
    if device.type not in DEVICES_WITH_KERNELS:
        raise NoKernelError(
            f"there are no kernels for device '{device}'; devices with kernels: {', '.join(DEVICES_WITH_KERNELS)}"
        )
    return _load_cpu()


def _load_cpu() -> Backend:
    # numba takes 0.5 s to import, which a program that only imports DAF does not pay.
    from daf_kernels import cpu

    seconds = cpu.warm_up()
    if seconds > SLOW_WARM_UP:
        log.warning("DAF compiled its CPU kernels in %.1f s; the next run finds them on disk.", seconds)
    return cpu.CpuBackend()
