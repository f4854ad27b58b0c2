"""Which kernels are compiled, with what: calls of the backend that lead to each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

FLOATS = ("fp32", "bf16", "fp16")
MASKS = ("int8", "int16", "int32", "int64")
STRATEGIES = {
    "range_fused": "fused",
    "range_of_chunks": "parallel",
    "range_from_chunks": "parallel",
    "range_atomic": "atomic",
    "range_of_keys": "atomic",
}


@dataclass(frozen=True)
class Case:
    """One compiled kernel.

    Attributes:
        kernel: Its name.
        dtype: Of the tensor that it reads or writes.
        group: Elements of a scaling group, where that matters.
        planes: Planes that it works on, where that matters.
        stochastic: Whether it rounds stochastically.
        end: Whether it is the launch that looks whether elements exist.
    """

    kernel: str
    dtype: str
    group: int = 0
    planes: int = 0
    stochastic: bool = False
    end: bool = False

    def __str__(self) -> str:
        parts = [self.kernel, self.dtype]
        parts += [f"group {self.group}"] if self.group else []
        parts += [f"planes {self.planes}"] if "code" in self.kernel and "mask" not in self.kernel else []
        parts += ["stochastic"] if self.stochastic else []
        parts += ["end"] if self.end else []
        return ", ".join(parts)


def all_cases() -> Iterator[Case]:
    """Gives every kernel that the backend launches for pages of 4096 bytes."""
    for dtype in FLOATS:
        yield from _planes(dtype)
        for planes in range(1, 5):
            yield from _both(Case("encode_slopes", dtype, planes=planes))
            yield from _both(Case("decode_slopes", dtype, planes=planes))
        yield from _both(Case("encode_nonzero", dtype))
        yield from _both(Case("rectify", dtype))
        yield Case("range_fused", dtype, group=64)
        yield Case("range_fused", dtype, group=1000)
        yield Case("range_fused", dtype, group=8192)
        yield Case("range_of_chunks", dtype, group=10000)
        yield Case("range_atomic", dtype, group=10000)
    yield from _both(Case("encode_nonzero", "int8"))
    for dtype in MASKS:
        yield from _both(Case("encode_mask", dtype))
        yield from _both(Case("decode_mask", dtype))
    yield Case("range_from_chunks", "fp32", group=10000)
    yield Case("range_of_keys", "fp32", group=10000)


CHOSEN = (
    Case("encode_fused", "bf16", 256, 3),
    Case("encode_fused", "bf16", 256, 3, end=True),
    Case("encode_fused", "fp16", 128, 2),
    Case("encode_fused", "fp32", 64, 4, stochastic=True),
    Case("encode_fused", "bf16", 64, 0),
    Case("encode_groups", "bf16", 100, 3),
    Case("encode_blocks", "fp32", 100, 1, stochastic=True),
    Case("decode_fused", "bf16", 256, 3),
    Case("decode_fused", "fp32", 64, 4, end=True),
    Case("decode_fused", "fp16", 128, 0),
    Case("decode_groups", "fp16", 100, 4),
    Case("encode_mask", "int8"),
    Case("decode_mask", "int64"),
    Case("encode_nonzero", "fp16"),
    Case("encode_nonzero", "int8"),
    Case("rectify", "bf16"),
    Case("encode_slopes", "bf16", planes=2),
    Case("decode_slopes", "fp32", planes=4),
    Case("range_fused", "bf16", group=1000),
    Case("range_of_chunks", "fp16", group=10000),
    Case("range_from_chunks", "fp32", group=10000),
    Case("range_atomic", "bf16", group=10000),
    Case("range_of_keys", "fp32", group=10000),
    Case("encode_slopes", "fp32", planes=4),
)
"""One of each kind, and each type, precision and group size with some kernel: all would take minutes."""

NEWEST = ("sm_90", "gfx942")


def chosen(target: str) -> tuple[Case, ...]:
    """Returns what of `CHOSEN` is compiled for a target: for one that has a newer one of its kind, every third."""
    return CHOSEN if target in NEWEST else CHOSEN[::3]


def _planes(dtype: str) -> Iterator[Case]:
    for planes in range(5):
        for stochastic in (False, True):
            for group in (32, 64, 128, 256):
                yield from _both(Case("encode_fused", dtype, group, planes, stochastic))
            yield Case("encode_groups", dtype, 100, planes, stochastic)
            if planes:
                yield from _both(Case("encode_blocks", dtype, 100, planes, stochastic))
        for group in (32, 64, 128, 256):
            yield from _both(Case("decode_fused", dtype, group, planes))
        yield Case("decode_groups", dtype, 100, planes)


def _both(case: Case) -> Iterator[Case]:
    yield case
    yield replace(case, end=True)
