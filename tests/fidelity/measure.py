"""Measures the error of gradients that come out of an engine, against those of plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from daf_core import ActivationEngine, DAFConfig
from daf_core.engine import REHEARSED_ELEMENTS, REHEARSED_PAGE_BYTES
from daf_core.memory.devices import DevicePagers
from daf_core.saved_tensors.classify import Eligibility

Bits = Literal["exact", 8, 4, 2]

BOUNDS: dict[Bits, float] = {8: 0.05, 4: 0.5}
"""The largest error that a case may have, where there is one."""

PASSES = 2
"""A first pass of a fresh engine, and one in which it knows the model."""

AS_IT_WAS = {"raw", "shared", "verbatim"}
"""Codecs whose tensors take as many bytes as before, or are counted already."""


class Skip(Exception):
    """A case that tells nothing, with the reason."""


@dataclass(frozen=True)
class Problem:
    """A gradient to compute.

    Attributes:
        forward: Returns tensors, in whatever containers; it draws the same random numbers after the same seed.
        leaves: What the gradient is taken of.
        model: The model that the engine follows; a function alone has none of its own.
        order: 2 for the gradient of the gradient.
        small: Whether tensors of 128 elements are stored in few bits, too, on pages of 128 bytes.
    """

    forward: Callable[[], Any]
    leaves: Sequence[Tensor]
    model: nn.Module = field(default_factory=lambda: nn.Linear(1, 1))
    order: int = 1
    small: bool = False


@dataclass(frozen=True)
class Case:
    """A problem by name, made when it is needed.

    Attributes:
        name: What is reported.
        make: Returns the problem; it may raise `Skip`.
        group: What it is reported with, as the operator of several samples.
    """

    name: str
    make: Callable[[], Problem]
    group: str = ""


def compiled(case: Case) -> Case:
    """Returns a case whose function is compiled, for plain torch too: to operators that run one by one."""

    def make() -> Problem:
        problem = case.make()
        torch.compiler.reset()
        return replace(problem, forward=torch.compile(problem.forward, backend="aot_eager_decomp_partition"))

    return replace(case, make=make)


@dataclass(frozen=True)
class Result:
    """What an engine of some precision has made of a case.

    Attributes:
        name: The case.
        group: See there.
        bits: The precision.
        errors: Relative errors of the whole gradient, one for each pass; NaN or infinite where it is not finite.
        identical: Whether the gradient was bit-identical in all passes.
        coded: How many tensors were stored in fewer bytes.
        raised: What was raised instead.
    """

    name: str
    group: str
    bits: Bits
    errors: tuple[float, ...] = ()
    identical: bool = False
    coded: int = 0
    raised: str = ""

    @property
    def error(self) -> float:
        """The worst of all passes."""
        return math.inf if any(not math.isfinite(error) for error in self.errors) else max(self.errors, default=0.0)

    @property
    def complaint(self) -> str:
        """What is wrong with it; empty where nothing is."""
        if self.raised:
            return self.raised
        if self.bits == "exact":
            return "" if self.identical else "differs in exact mode"
        if math.isinf(self.error):
            return "not finite"
        bound = BOUNDS.get(self.bits, math.inf)
        return "" if self.error <= bound else f"above {bound:g}"


def measure(case: Case, precisions: Sequence[Bits] = ("exact", 8, 4)) -> list[Result]:
    """Returns what engines of these precisions make of a case.

    Raises:
        Skip: Plain torch gives no gradient, one that is zero or not finite, or another one each time.
    """
    problem = case.make()
    expected = _plain(problem)
    return [_compare(case, problem, expected, bits) for bits in precisions]


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the length of the difference over the length of what was expected, of all tensors together."""
    difference = sum(_square(a - b) for a, b in zip(found, expected, strict=True))
    return math.sqrt(difference / sum(map(_square, expected)))


def engine_of(problem: Problem, bits: Bits) -> ActivationEngine:
    """Returns a fresh engine for a problem; of a small one tensors of a rehearsal's size are stored in few bits."""
    small = {
        "Eligibility": partial(Eligibility, least_elements=REHEARSED_ELEMENTS),
        "DevicePagers": partial(DevicePagers, page_bytes=REHEARSED_PAGE_BYTES),
    }
    with patch.multiple("daf_core.engine", **small) if problem.small else nullcontext():
        return ActivationEngine(problem.model, DAFConfig(precision=bits, audit_every=None, packing="device"))


def gradient(problem: Problem, engine: ActivationEngine | None = None, seed: int = 0) -> list[Tensor]:
    """Returns the gradient of a random projection of what `forward` returns, zero for leaves that it does not reach."""
    torch.manual_seed(seed)
    with engine.compress() if engine else nullcontext():
        outputs = _differentiable(problem.forward())
    for _ in range(problem.order - 1):
        outputs = _differentiable(_projected(outputs, problem.leaves, create_graph=True))
    found = _projected(outputs, problem.leaves)
    pairs = zip(found, problem.leaves, strict=True)
    return [torch.zeros_like(leaf) if each is None else _dense(each.detach()) for each, leaf in pairs]


def _projected(outputs: list[Tensor], leaves: Sequence[Tensor], create_graph: bool = False) -> Sequence[Tensor | None]:
    """Returns the gradient of a random projection, which is no part of the loss: that would save its weights."""
    if not outputs:
        raise Skip("nothing that it returns has a gradient")
    weights = [_normal(output, seed=place + 1) for place, output in enumerate(outputs)]
    return torch.autograd.grad(outputs, leaves, weights, create_graph=create_graph, allow_unused=True)


def _plain(problem: Problem) -> list[Tensor]:
    try:
        expected, again = gradient(problem), gradient(problem)
    except RuntimeError as error:
        raise Skip(f"plain torch raises {_brief(error)}") from error
    if not all(bool(torch.isfinite(each).all()) for each in expected):
        raise Skip("plain torch's gradient is not finite")
    if not _same(expected, again):
        raise Skip("plain torch's gradient differs each time")
    if sum(map(_square, expected)) == 0:
        raise Skip("the gradient is zero")
    return expected


def _compare(case: Case, problem: Problem, expected: list[Tensor], bits: Bits) -> Result:
    errors, identical, coded = list[float](), True, 0
    engine = engine_of(problem, bits)
    try:
        for _ in range(PASSES):
            found = gradient(problem, engine)
            errors.append(relative_error(found, expected))
            identical = identical and _same(found, expected)
            stored = engine.finish_step().stored_as
            coded = max(coded, sum(count for codec, count in stored.items() if codec not in AS_IT_WAS))
    except Exception as error:
        return Result(case.name, case.group, bits, raised=_brief(error))
    finally:
        engine.close()
    return Result(case.name, case.group, bits, tuple(errors), identical, coded)


def _differentiable(outputs: Any) -> list[Tensor]:
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return [_dense(tensor) for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _normal(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = like.dtype if like.is_complex() else torch.float32
    return torch.randn(like.shape, generator=generator, dtype=dtype).to(like.dtype)


def _square(tensor: Tensor) -> float:
    wide = tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()
    return float(wide.abs().square().sum())


def _same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
