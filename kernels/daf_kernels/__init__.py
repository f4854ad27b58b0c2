"""Kernels that pack activations into a few bits: plain functions of tensors and bytes."""

from daf_kernels.backend import (
    Answer,
    Backend,
    DeviceFlag,
    DirectBackend,
    DirectCodec,
    FixedPages,
    PageAddresses,
    PageMemory,
    Pages,
    Seed,
    TwoValues,
    bits_of_number,
    is_capturing,
    system_memory,
)
from daf_kernels.dispatch import NoKernelError, load_backend
from daf_kernels.host.backend import HostPackedBackend
from daf_kernels.host.link import HostBridge, host_bridge, pinned_memory
from daf_kernels.layout import PRECISIONS, PlaneLayout, mask_pages, plane_layout, planes_for

__all__ = [
    "PRECISIONS",
    "Answer",
    "Backend",
    "DeviceFlag",
    "DirectBackend",
    "DirectCodec",
    "FixedPages",
    "HostBridge",
    "HostPackedBackend",
    "NoKernelError",
    "PageAddresses",
    "PageMemory",
    "Pages",
    "PlaneLayout",
    "Seed",
    "TwoValues",
    "bits_of_number",
    "host_bridge",
    "is_capturing",
    "load_backend",
    "mask_pages",
    "pinned_memory",
    "plane_layout",
    "planes_for",
    "system_memory",
]
