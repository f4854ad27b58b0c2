"""Launches Triton kernels, and keeps what was compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from daf_kernels.layout import BLOCK, COLUMNS, PLANE_WIDTHS
from daf_kernels.triton.numerics import INTERPRETED

ROW_BYTES = 2048
"""Bytes of a program's row at most: each of its threads moves 16 of them at a time."""

THREADS = 128
"""Threads of a program: 4 warps of an NVIDIA GPU, 2 of an AMD GPU, whose warps have 64 threads."""

OPTIONS = {"enable_fp_fusion": False}
"""A product and a sum in one would be rounded once, and the bytes would not be those of other backends."""

ALIGNMENT = 16
"""Bytes at whose multiples tensors begin for which Triton compiles other code."""

NEAR_BYTES = 2**31 - 1
"""Triton addresses the elements of a tensor of so many bytes at most by 32 bits where it compiles for AMD's GPUs."""

FEW_PROGRAMS = 192
"""Programs at most of which all look whether elements exist, which saves a launch. An A100 (108 multiprocessors) and an
H100 (132) run so many at once, as two fit on each even with the most registers: so they take hardly longer than the one
that has to look."""

_compiled: dict[Hashable, Any] = {}
_runtime: Any = triton.runtime  # whose drivers tell more than their types do


def kernel(function: Callable[..., None]) -> Any:
    """Makes a function a kernel that `launch` may run, as ``triton.jit`` does.

    Triton would compile it anew for integers that are 1 and for those that 16 divides, and rely on that: called with
    other numbers, such code writes past the last element. So all its integers are told not to be looked at.
    """
    integers = [name for name, kind in function.__annotations__.items() if "int64" in str(kind)]
    return triton.jit(do_not_specialize=integers)(function)


def launch(kernel: Any, programs: int, pointers: Sequence[Tensor], numbers: Sequence[int], **constants: Any) -> None:
    """Runs `programs` programs of a kernel.

    Triton looks at every argument of every call, which takes 10 us; a compiled kernel that is called itself takes 1.5
    and looks at nothing. So it is kept by all that its code depends on.

    Args:
        kernel: A function with the decorator `kernel`, whose integers are all declared to have 64 bits.
        programs: How many; none are no call.
        pointers: Its tensors, which come first.
        numbers: Its integers, which come next.
        constants: Its constants, and ``num_warps`` where programs do not have `THREADS` threads.
    """
    if not programs:
        return
    grid, device = (programs, 1, 1), pointers[0].device
    if INTERPRETED.value:
        kernel[grid](*pointers, *numbers, **constants)
        return
    key = _code(kernel, device, pointers[0].dtype, map(_assumed, pointers), constants)
    with torch.cuda.device(device):
        compiled = _compiled.get(key)
        if compiled is None:
            target: Any = triton.runtime.driver.active.get_current_target()
            options = {**OPTIONS, "num_warps": THREADS // target.warp_size, **constants}
            _compiled[key] = kernel[grid](*pointers, *numbers, **options)
        else:
            names = kernel.arg_names[len(pointers) + len(numbers) :]
            compiled[grid](*pointers, *numbers, *(constants[name] for name in names))


Launch = Callable[..., None]
"""Runs what was compiled: on a stream, which comes first, with the addresses of its tensors."""


def prepared(
    kernel: Any, programs: int, device: torch.device, dtypes: Sequence[torch.dtype], nbytes: int,
    numbers: Sequence[int], **constants: Any,
) -> Launch | None:  # fmt: skip
    """Returns what runs programs that `launch` has compiled; None where it has not.

    To look for them takes as long as to launch them. The calling thread's device must be that of the tensors, which
    begin at multiples of `ALIGNMENT`.

    Args:
        kernel: See `launch`, as for the other arguments.
        programs: How many, at least one.
        device: Where its tensors lie.
        dtypes: Their types.
        nbytes: Bytes of the first; the others are small.
        numbers: Its integers.
        constants: Its constants.
    """
    assumed = (True, nbytes <= NEAR_BYTES), *[(True, True)] * (len(dtypes) - 1)
    compiled = _compiled.get(_code(kernel, device, dtypes[0], assumed, constants))
    if compiled is None:
        return None
    rest = *numbers, *(constants[name] for name in kernel.arg_names[len(dtypes) + len(numbers) :])
    run = compiled[programs, 1, 1]

    def launch_again(stream: int, *addresses: int) -> None:
        run(*addresses, *rest, stream=stream)

    return launch_again


def _code(
    kernel: Any, device: torch.device, dtype: torch.dtype, assumed: Iterable[tuple[bool, bool]],
    constants: Mapping[str, Any],
) -> Hashable:  # fmt: skip
    """Returns what compiled code is kept by: all that it depends on, with what is `_assumed` of its tensors."""
    return kernel, device, dtype, *assumed, *sorted(constants.items())


def _assumed(pointer: Tensor) -> tuple[bool, bool]:
    """What compiled code assumes of a tensor, beside its type."""
    return pointer.data_ptr() % ALIGNMENT == 0, pointer.nbytes <= NEAR_BYTES


def is_current(device: torch.device) -> bool:
    """Says whether the calling thread launches kernels on a GPU."""
    return _runtime.driver.active.get_current_device() == device.index


def stream_number(device: torch.device) -> int | None:
    """Returns the number of `stream_of`, 3 us sooner."""
    return _runtime.driver.active.get_current_stream(device.index) if device.type == "cuda" else None


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """Returns the stream on which the calling thread launches kernels on a device; None for a CPU, which has none."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def launch_over_blocks(
    kernel: Any, pointers: Sequence[Tensor], numbers: Sequence[int], page_bytes: int, planes: int, **constants: Any
) -> None:
    """Runs a kernel over all packing blocks of its first tensor: programs that are full, and one that may not be.

    Looking whether an element exists makes loads and stores slower. So where that one is needed, it is a launch of its
    own, unless there are no more than `FEW_PROGRAMS`.

    Args:
        kernel: See `launch`; its first integers are the elements and the number of the first program, its last
            constants ``BLOCKS``, ``SHIFT`` and ``MASKED``.
        pointers: Its tensors.
        numbers: Its other integers.
        page_bytes: Bytes of a page.
        planes: Planes that it works on: what a program does of each lies in one page.
        constants: Its other constants.
    """
    values = pointers[0]
    for programs, first, own in launches_over_blocks(values.numel(), values.element_size(), page_bytes, planes):
        launch(kernel, programs, pointers, (values.numel(), first, *numbers), **constants, **own)


def launches_over_blocks(
    elements: int, element_size: int, page_bytes: int, planes: int
) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """Gives the launches of `launch_over_blocks`: programs, the number of the first, and constants."""
    blocks = blocks_of_program(element_size, page_bytes, planes)
    full, rest = divmod(elements, blocks * BLOCK)
    constants = {"BLOCKS": blocks, "SHIFT": page_bytes.bit_length() - 1}
    if rest and full < FEW_PROGRAMS:
        yield full + 1, 0, {**constants, "MASKED": True}
        return
    if full:
        yield full, 0, {**constants, "MASKED": False}
    if rest:
        yield 1, full, {**constants, "MASKED": True}


def blocks_of_program(element_size: int, page_bytes: int, planes: int) -> int:
    """Returns the packing blocks of a program, a power of two."""
    return min(ROW_BYTES // (COLUMNS * element_size), page_bytes // (COLUMNS * PLANE_WIDTHS[max(planes, 1) - 1]))
