"""Memory of this process, resident and on a GPU, and the bytes that autograd saves."""

import os
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

from daf_core.autograd.torch_private import all_nodes

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): sets VmHWM back to the current resident size


def resident_bytes() -> int:
    """Returns the bytes of this process that are in memory now."""
    return psutil.Process().memory_info().rss


def can_reset_peak() -> bool:
    """Whether the system can start a new peak, as Linux does."""
    return os.access(_CLEAR_REFS, os.W_OK)


def reset_peak() -> None:
    """Starts a new peak where the system can; elsewhere the peak stays that of the whole process."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return


def peak_bytes() -> int:
    """Returns the largest resident size since ``reset_peak``."""
    if _STATUS.exists():
        lines = _STATUS.read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    import resource  # not on Windows

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest << 10


class GpuMemory:
    """Allocated bytes of the current CUDA device, above those allocated now."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._loaded = torch.cuda.memory_allocated()

    def reset_peak(self) -> None:
        """Starts a new peak."""
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Returns the most that was allocated since then above what was at first."""
        return torch.cuda.max_memory_allocated() - self._loaded


class SavedTensorCounter(TorchDispatchMode):
    """Counts the unique storages that autograd saves inside a ``with`` block, without changing them.

    Storages of parameters and buffers do not count, nor do the low-precision casts of parameters that autocast makes.
    Every storage counts once, in full, however many saved tensors view it. Tensors saved inside a non-reentrant
    checkpoint do not reach the counter, but the inputs of the checkpoint do.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        weights = map(Tensor.untyped_storage, (*model.parameters(), *model.buffers()))
        self._weights = {storage.data_ptr(): storage for storage in weights}
        self._saved: dict[int, torch.UntypedStorage] = {}
        self._hooks = saved_tensors_hooks(self._count, lambda saved: saved)

    @property
    def bytes(self) -> int:
        """Bytes of all counted storages."""
        return sum(storage.nbytes() for key, storage in self._saved.items() if key not in self._weights)

    def __enter__(self) -> Self:
        super().__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage().data_ptr() in self._weights:
            storage = result.untyped_storage()
            self._weights[storage.data_ptr()] = storage
        return result

    def _count(self, saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        self._saved[storage.data_ptr()] = storage  # held, so that its address is not used again
        return saved.detach()


def saved_by_graphs(loss: Tensor, model: nn.Module) -> int:
    """Returns the bytes that compiled graphs have saved for the backward pass of a loss.

    Hooks would have the model compiled anew, and a `SavedTensorCounter` would have it run without being compiled.
    """
    weights = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}
    for node in all_nodes(loss.grad_fn):
        saved = getattr(node, "saved_tensors", ())  # of functions written in Python, as graphs are
        storages = [each.untyped_storage() for each in saved if each is not None]
        found |= {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for key, size in found.items() if key not in weights)
