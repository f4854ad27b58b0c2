"""The kernels of the devices that a model lies on."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from daf_core.autograd.torch_private import tensors_of
from daf_core.config import DAFConfig
from daf_core.errors import GraphCaptureError, UnsupportedDeviceError
from daf_core.saved_tensors.background import CPU
from daf_kernels import (
    Backend,
    DirectBackend,
    HostBridge,
    HostPackedBackend,
    NoKernelError,
    host_bridge,
    is_capturing,
    load_backend,
)

on_meta: ContextVar[Backend | None] = ContextVar("on_meta", default=None)
"""The kernels of models without values, as long as `without_values` is there; None refuses such models."""


class Backends(dict[torch.device, Backend]):
    """Kernels by device, of all devices that the model has lain on.

    Raises:
        UnsupportedDeviceError: A part of the model is on device "meta".
    """

    def __init__(self, model: nn.Module, config: DAFConfig) -> None:
        super().__init__()
        self._model = model
        self._name = config.backend
        self._linked = config.packing == "workers"
        # Connect devices, whose activations are packed by their host, with it.
        self.links: dict[torch.device, HostBridge] = {}
        self.devices: set[torch.device] = set()  # those that the parameters lie on now
        self.follow()

    def follow(self, parameters: Sequence[Tensor] | None = None) -> None:
        """Looks where the model, with these parameters, lies now, and loads what it has not been on before.

        Raises:
            UnsupportedDeviceError: A part of it is on device "meta".
            GraphCaptureError: A CUDA graph is being captured, and kernels for it are not loaded yet, or look at values.
        """
        found = tensors_of(self._model)[0] if parameters is None else parameters
        self.devices = {parameter.device for parameter in found}
        missing = self.devices - self.keys()
        if is_capturing():
            self._check_capturable(missing)
        for device in missing:
            self[device] = self._load(device)

    def _check_capturable(self, missing: set[torch.device]) -> None:
        if missing:
            raise GraphCaptureError(
                "a CUDA graph is being captured, and kernels for the model are not loaded yet: prepare the model, and "
                "train some five steps, before the capture"
            )
        if not all(isinstance(self[device], DirectBackend) for device in self.devices):
            raise GraphCaptureError(
                "a CUDA graph is being captured, and torch operations, which store here in place of kernels, look at "
                "values. `daf doctor` says why there are no kernels"
            )

    @property
    def packs_on_host(self) -> bool:
        """Whether the host packs what the model saves now, or a part of it.

        It does so for a GPU where that is asked for: whether it pays depends on backward too.
        """
        return any(device == CPU or device in self.links for device in self.devices)

    def _load(self, device: torch.device) -> Backend:
        if device.type == "meta" and (sizes := on_meta.get()) is not None:
            return sizes
        link = host_bridge(device) if self._linked else None
        try:
            backend = load_backend(device, self._name)
            if link is None:
                return backend
            self.links[device] = link
            return HostPackedBackend(backend, load_backend(CPU, self._name), link)
        except NoKernelError as error:
            raise UnsupportedDeviceError(
                f"{error}; give the model values, with model.to_empty(device=...) and weights"
            ) from error
