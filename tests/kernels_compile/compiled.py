"""Compiles kernels through the backend that launches them, and measures what comes out.

Runs where Triton compiles (``TRITON_INTERPRET=0``); one process knows one GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton import knobs

from daf_core.memory.pages.pool import PAGE_BYTES
from daf_kernels import FixedPages, PlaneLayout
from daf_kernels.layout import BLOCK
from daf_kernels.triton import backend, launch, reduction
from daf_kernels.triton.backend import TritonBackend
from tests.kernels_compile.cases import STRATEGIES, Case

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ELEMENTS = 30_100
"""Of the tensor that the backend is called with: some full programs, and an end."""

SEED = (1, 2, 3, 4)
_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)", re.MULTILINE)


@dataclass
class Compiled:
    """What a compiler made of a kernel.

    Attributes:
        registers: Of a thread; of an AMD GPU, its vector registers.
        stack: Bytes of memory that a thread needs for what does not fit in registers.
        spilled: Registers that an AMD GPU keeps elsewhere: there, or scalar ones in vector registers.
        row_loads: Vector loads of 16 bytes, in a thread.
        row_stores: Vector stores of 16 bytes, in a thread.
        fused: Fused products and sums, in a thread.
        elements: Elements that a thread works on.
        inexact: Instructions that round otherwise than IEEE 754 says.
        instructions: Of the machine's own, an element; without what divisions and roots of rare numbers call.
    """

    registers: int
    stack: int
    spilled: int
    row_loads: int
    row_stores: int
    fused: int
    elements: float
    inexact: list[str]
    instructions: float


def compile_case(case: Case) -> dict[str, Any]:
    """Returns a `Compiled` as a dict, or ``{"error": text}``."""
    try:
        kernel, elements = _launched(case)
        measure = _measure_cuda if "ptx" in kernel.asm else _measure_hip
        return asdict(measure(kernel, elements))
    except Exception as error:  # what one kernel fails with must not keep the others from being tried
        return {"error": f"{type(error).__name__}: {error}"}


def _launched(case: Case) -> tuple[Any, float]:
    """The kernel that the backend has compiled for a case, and the elements of each of its threads."""
    found: list[tuple[Any, float]] = []
    original = launch.launch

    def only_the_case(
        kernel: Any, programs: int, pointers: Sequence[Tensor], numbers: Sequence[int], **constants: Any
    ) -> None:
        if kernel.__name__ == case.kernel and constants.get("MASKED", case.end) == case.end:
            original(kernel, programs, pointers, numbers, **constants)
            (compiled,) = launch._compiled.values()
            of_program = constants["BLOCKS"] * BLOCK if "BLOCKS" in constants else ELEMENTS // programs
            threads = compiled.metadata.num_warps * compiled.metadata.warp_size
            found.append((compiled, of_program / threads))

    launch._compiled.clear()
    with (
        mock.patch.object(launch, "FEW_PROGRAMS", 0),
        mock.patch.object(launch, "launch", only_the_case),
        mock.patch.object(backend, "launch", only_the_case),
        mock.patch.object(reduction, "launch", only_the_case),
    ):
        _call(case)()
    (only,) = found
    return only


def _call(case: Case) -> Callable[[], object]:
    """A call of the backend that launches the kernel of a case."""
    triton = TritonBackend()
    dtype = DTYPES.get(case.dtype) or getattr(torch, case.dtype)
    values = torch.zeros(ELEMENTS, dtype=dtype)
    layout = PlaneLayout(ELEMENTS, case.group, PAGE_BYTES)
    memory, pages = FixedPages(layout.pages(4), PAGE_BYTES), np.arange(layout.pages(4))
    place = (memory, pages)
    if case.kernel in STRATEGIES:
        whole = values[: ELEMENTS // case.group * case.group]
        return partial(reduction.group_ranges, whole, case.group, STRATEGIES[case.kernel])
    operation = case.kernel.removesuffix("_fused").removesuffix("_groups").removesuffix("_blocks")
    arguments: dict[str, tuple[object, ...]] = {
        "encode": (layout, case.planes, *place, SEED if case.stochastic else None),
        "decode": (layout, case.planes, *place),
        "encode_slopes": (layout, case.planes, *place),
        "decode_slopes": (layout, case.planes, *place),
        "encode_mask": ((0, 1), *place),
        "decode_mask": ((0, 1), *place),
    }
    return partial(getattr(triton, operation), values, *arguments.get(operation, place))


def _measure_cuda(kernel: Any, elements: float) -> Compiled:
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _run(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
        machine = _run(knobs.nvidia.nvdisasm.path, "-c", file.name)
    main = re.split(r"^\s*\$__internal\S*:", machine, flags=re.MULTILINE)[0]
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    return Compiled(
        registers=registers,
        stack=stack + local,
        spilled=0,
        row_loads=len(re.findall(r"ld\.global\S*\.(?:v4\.b32|v2\.b64)", ptx)),
        row_stores=len(re.findall(r"st\.global\S*\.(?:v4\.b32|v2\.b64)", ptx)),
        fused=ptx.count("fma.rn.f32"),
        elements=elements,
        inexact=sorted(set(re.findall(r"\S+\.ftz\S*|(?:div|sqrt)\.(?:full|approx)\S*|(?:add|sub|mul)\.f32", ptx))),
        instructions=_per_element(_LINE.findall(main), elements),
    )


def _measure_hip(kernel: Any, elements: float) -> Compiled:
    code = kernel.asm["amdgcn"]
    facts = {name: int(value) for name, value in re.findall(r"\.((?:vgpr|sgpr)\w+):\s+(\d+)", code)}
    names = Counter(re.findall(r"^\s+((?:[vs]|global|buffer|ds)_\w+)", code, re.MULTILINE))
    return Compiled(
        registers=facts["vgpr_count"],
        stack=int(re.findall(r"\.private_segment_fixed_size:\s+(\d+)", code)[0]),
        spilled=facts["vgpr_spill_count"] + facts["sgpr_spill_count"],
        row_loads=names["global_load_dwordx4"] + names["buffer_load_dwordx4"],
        row_stores=names["global_store_dwordx4"] + names["buffer_store_dwordx4"],
        fused=_fused_hip(names),
        elements=elements,
        inexact=[] if ".amdhsa_float_denorm_mode_32 3" in code else ["subnormals are flushed"],
        instructions=_per_element(names.elements(), elements),
    )


def _fused_hip(names: Counter[str]) -> int:
    """Fused products and sums but for those that make a division (8 at most) or a root (4) what IEEE 754 says."""
    total = sum(times for name, times in names.items() if re.match(r"v_(fma|fmac|fmamk|fmaak|mad|mac)_f32", name))
    steps = 8 * names["v_div_fixup_f32"] + 4 * names["v_sqrt_f32_e32"] + 4 * names["v_rcp_iflag_f32_e32"]
    return max(total - steps, 0) + 2 * names["v_pk_fma_f32"]


def _per_element(instructions: Iterable[str], elements: float) -> float:
    return sum(name not in {"NOP", "s_nop"} for name in instructions) / elements


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
