"""What is asked of a compiled kernel."""

from __future__ import annotations

from typing import Any

from tests.kernels_compile.cases import Case

MOST_REGISTERS = 168
"""Three programs of 4 warps then share an SM: it has 65536 registers, given out by 8 a thread. Ends are few
(`FEW_PROGRAMS`), and two share one; AMD's compiler keeps their 64 masks in 128 scalar registers, and spills some of
those to vector registers."""

READ_ROWS = {"encode_fused", "encode_blocks", "encode_mask", "encode_nonzero", "encode_slopes", "rectify"}
WRITE_ROWS = {"decode_fused", "decode_mask", "decode_slopes", "rectify"}
ROWS = 8


def complaints(case: Case, found: dict[str, Any]) -> list[str]:
    """Returns what is wrong with what `compiled.compile_case` gave for a case."""
    if "error" in found:
        return [found["error"]]
    # Sums of squares of codes are exact, fused or not; nothing else may be.
    fused = found["elements"] if case.kernel == "decode_fused" else 0
    wrong = {
        f"{found['stack']} bytes of stack": found["stack"] > 0,
        f"{found['spilled']} registers spilled": found["spilled"] > 0 and not case.end,
        f"{found['registers']} registers": found["registers"] > MOST_REGISTERS and not case.end,
        f"{found['fused']} fused products and sums": found["fused"] > fused,
        f"{found['row_loads']} rows loaded by vectors": _needs(case, READ_ROWS) and found["row_loads"] < ROWS,
        f"{found['row_stores']} rows stored by vectors": _needs(case, WRITE_ROWS) and found["row_stores"] < ROWS,
        f"inexact: {', '.join(found['inexact'])}": bool(found["inexact"]),
    }
    return [name for name, is_wrong in wrong.items() if is_wrong]


def _needs(case: Case, kernels: set[str]) -> bool:
    """Whether each of a case's rows is moved by vectors: the end, which may have any length, is not."""
    return case.kernel in kernels and not case.end
