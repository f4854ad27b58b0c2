"""The cases that every run of the tests measures: operators that are known to be hard, and ordinary ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.harness import integers, normal
from tests.fidelity.losses import CLASS_OR_NOT, NOISE, SHARES, case, ctc, leaf, masked, of, sure
from tests.fidelity.measure import Case, Problem

ROWS, WIDTH = 64, 256

Make = Callable[[], Tensor]
Function = Callable[..., Any]


def _uniform(low: float, high: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(ROWS, WIDTH, generator=generator) * (high - low) + low).requires_grad_()


NORMAL = partial(leaf, ROWS, WIDTH)
OTHER = partial(leaf, ROWS, WIDTH, seed=1)
SPREAD = partial(leaf, ROWS, WIDTH, scale=6.0)
ABOVE_ZERO = partial(_uniform, 0.02, 3.0)
ABOVE_ONE = partial(_uniform, 1.005, 3.0)
UNIT = partial(_uniform, -0.995, 0.995)
SHARE = partial(_uniform, 0.005, 0.995)
FACTORS = partial(_uniform, 0.5, 1.5)
IMAGES = partial(leaf, 2, 4, 32, 32)

BUCKETS = torch.arange(ROWS) % 16
EACH = BUCKETS[:, None].expand(ROWS, WIDTH)
LENGTHS = torch.full((16,), 4)


def _reduce(how: str, x: Tensor) -> Tensor:
    return torch.zeros(16, WIDTH).scatter_reduce(0, EACH, x, how, include_self=False)


def _index_reduce(how: str, x: Tensor) -> Tensor:
    return torch.zeros(16, WIDTH).index_reduce(0, BUCKETS, x, how, include_self=False)


MAXIMA: dict[str, Function] = {
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(1),
    "aminmax": lambda x: x.aminmax(dim=1),
    "max": lambda x: x.max(),
    "median": lambda x: x.median(),
    "max along a dimension": lambda x: x.max(1).values,
    "scatter_reduce amax": partial(_reduce, "amax"),
    "scatter_reduce amin": partial(_reduce, "amin"),
    "index_reduce amax": partial(_index_reduce, "amax"),
    "index_reduce amin": partial(_index_reduce, "amin"),
    "segment_reduce max": lambda x: torch.segment_reduce(x, "max", lengths=LENGTHS),
    "segment_reduce min": lambda x: torch.segment_reduce(x, "min", lengths=LENGTHS),
    "norm(p=inf)": lambda x: torch.linalg.vector_norm(x, math.inf, dim=-1),
    "renorm": lambda x: x.renorm(2, 0, 5.0),
    "max_pool2d": lambda x: F.max_pool2d(x.view(4, 4, 32, 32), 2),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x.view(4, 4, 32, 32), 5),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
}

SIDES: dict[str, Function] = {
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_min": lambda x: x.clamp_min(0.3),
    "hardtanh": F.hardtanh,
    "relu": F.relu,
    "relu in place": lambda x: F.relu(x, inplace=True),
    "relu6": lambda x: F.relu6(3 * x),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "leaky_relu in place": lambda x: F.leaky_relu(x, 0.1, inplace=True),
    "leaky_relu(.01) in place": lambda x: F.leaky_relu(x, 0.01, inplace=True),
    "threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "elu": F.elu,
    "selu": F.selu,
    "prelu": lambda x: F.prelu(x, x.detach().new_tensor([0.1])),
    "where": lambda x: torch.where(x > 0, x, x.square()),
    "maximum": lambda x: torch.maximum(x, NOISE),
    "minimum": lambda x: torch.minimum(x, NOISE),
    "l1_loss": lambda x: F.l1_loss(x, NOISE),
}

ON: list[tuple[Make, dict[str, Function]]] = [
    (NORMAL, MAXIMA),
    (NORMAL, SIDES),
    (
        ABOVE_ZERO,
        {
            "log": torch.log,
            "log2": torch.log2,
            "log10": torch.log10,
            "sqrt": torch.sqrt,
            "rsqrt": torch.rsqrt,
            "reciprocal": torch.reciprocal,
            "pow(.5)": lambda x: x**0.5,
            "pow(1.7)": lambda x: x**1.7,
            "pow(-1)": lambda x: x**-1,
            "lgamma": torch.lgamma,
            "digamma": torch.digamma,
            "special.digamma": torch.special.digamma,
            "special.gammaln": torch.special.gammaln,
            "special.entr": torch.special.entr,
            "special.xlogy": lambda x: torch.special.xlogy(x, x),
            "poisson_nll_loss(log_input=False)": lambda x: F.poisson_nll_loss(x, NOISE.abs(), log_input=False),
        },
    ),
    (
        UNIT,
        {
            "log1p": torch.log1p,
            "special.log1p": torch.special.log1p,
            "special.xlog1py": lambda x: torch.special.xlog1py(x, x * -0.999),
            "acos": torch.acos,
            "asin": torch.asin,
            "atanh": torch.atanh,
            "erfinv": torch.erfinv,
            "special.erfinv": torch.special.erfinv,
        },
    ),
    (ABOVE_ONE, {"acosh": torch.acosh}),
    (
        SHARE,
        {
            "logit": torch.logit,
            "special.logit": torch.special.logit,
            "special.ndtri": torch.special.ndtri,
            "binary_cross_entropy": lambda x: F.binary_cross_entropy(x, CLASS_OR_NOT),
        },
    ),
    (FACTORS, {"prod": lambda x: x[:, :64].prod(1), "cumprod": lambda x: x.cumprod(1)}),
    (
        SPREAD,
        {
            "special.log_ndtr": torch.special.log_ndtr,
            "special.entr of softmax": lambda x: torch.special.entr(x.softmax(-1)),
            "logarithm of softmax": lambda x: (x.softmax(-1) + 1e-9).log()[:, 0],
            "binary_cross_entropy of sigmoid": lambda x: F.binary_cross_entropy(x.sigmoid(), CLASS_OR_NOT),
            "softmax": lambda x: x.softmax(-1),
            "log_softmax": lambda x: x.log_softmax(-1),
            "logsumexp": lambda x: x.logsumexp(-1),
            "logsigmoid": F.logsigmoid,
            "charbonnier": lambda x: ((x - NOISE).square() + 1e-3).sqrt(),
            "root of a sum of squares": lambda x: (x.square() + NOISE.square()).sqrt(),
            "inverse root of a square": lambda x: (x.square() + 1e-2).rsqrt(),
        },
    ),
    (
        NORMAL,
        {
            "var": lambda x: x.var(1),
            "std": lambda x: x.std(1),
            "norm": lambda x: x.norm(dim=1),
            "norm(p=3)": lambda x: x.norm(3, 1),
            "normalize": F.normalize,
            "sin": torch.sin,
            "exp": torch.exp,
            "sigmoid": torch.sigmoid,
            "tanh": torch.tanh,
            "square": torch.square,
            "gelu": F.gelu,
            "gelu(tanh)": lambda x: F.gelu(x, approximate="tanh"),
            "silu": F.silu,
            "mish": F.mish,
            "softplus": F.softplus,
            "glu": F.glu,
            "cumsum of squares": lambda x: x.square().cumsum(1),
            "dropout": lambda x: F.dropout(x, 0.3) * 2,
            "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
            "rms_norm": lambda x: F.rms_norm(x, (WIDTH,)),
            "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
            "group_norm": lambda x: F.group_norm(x, 8),
            "avg_pool2d": lambda x: F.avg_pool2d(x.view(4, 4, 32, 32).square(), 2),
            "interpolate": lambda x: F.interpolate(x.view(4, 4, 32, 32).square(), scale_factor=2.0, mode="bilinear"),
            "kl_div": lambda x: F.kl_div(x.log_softmax(-1), SHARES, reduction="batchmean"),
        },
    ),
]
"""Functions of one tensor, and what it is made of."""

OF_TWO: list[tuple[Make, Make, dict[str, Function]]] = [
    (
        NORMAL,
        OTHER,
        {
            "mul": torch.mul,
            "addcmul": lambda x, y: torch.addcmul(x, x, y),
            "div": lambda x, y: x / (y.square() + 1e-2),
            "div by a norm": lambda x, y: x / y.norm(dim=1, keepdim=True),
            "atan2": torch.atan2,
            "hypot": torch.hypot,
            "lerp": lambda x, y: torch.lerp(x, y, NOISE),
            "matmul": lambda x, y: x @ y.T,
            "bmm": lambda x, y: x.view(4, 16, 256) @ y.view(4, 256, 16),
            "einsum": lambda x, y: torch.einsum("bhi,bki->bhk", x.view(4, 16, 256), y.view(4, 16, 256)),
            "linear": lambda x, y: F.linear(x, y),
            "prelu": lambda x, y: F.prelu(x, y[0]),
            "cdist": torch.cdist,
            "cosine_similarity": F.cosine_similarity,
            "pairwise_distance": F.pairwise_distance,
            "pairwise_distance(p=inf)": lambda x, y: F.pairwise_distance(x, y, math.inf),
            "dist(p=inf)": lambda x, y: torch.dist(x, y, math.inf),
            "triplet_margin_loss(p=inf)": lambda x, y: F.triplet_margin_loss(x, y, NOISE, p=math.inf),
            "maximum of two": torch.maximum,
            "gaussian_nll_loss": lambda x, y: F.gaussian_nll_loss(x, NOISE, F.softplus(y) + 0.02),
        },
    ),
    (
        IMAGES,
        partial(leaf, 8, 4, 3, 3, seed=1),
        {"conv2d": lambda x, w: F.conv2d(x, w, padding=1), "conv_transpose2d": lambda x, w: _transposed(x, w)},
    ),
    (
        partial(leaf, 1, 8, 64, 64),
        partial(leaf, 64, 64, 2, scale=0.3, seed=1),
        {"grid_sample": lambda x, grid: F.grid_sample(x, grid[None], align_corners=False)},
    ),
    (
        partial(leaf, 512, 64),
        partial(leaf, ROWS, WIDTH, seed=1),
        {"embedding": lambda x, y: F.embedding(integers(512, ROWS, 4), x).view(ROWS, WIDTH) * y},
    ),
]
"""Functions of two tensors."""

HEADS = partial(leaf, 2, 4, 64, 32, scale=2.0)
NARROW_HEADS = partial(leaf, 8, 32, 32, 2)


def _capped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention whose scores a tanh keeps below 20."""
    return (torch.tanh(query @ key.mT / 20) * 20).softmax(-1) @ value


def _alike(attention: Function) -> Function:
    """Returns an attention that reads almost equal values."""
    return lambda query, key, value: attention(query, key, 1 + 0.02 * value)


OF_THREE: list[tuple[Make, Make, Make, dict[str, Function]]] = [
    (HEADS, partial(HEADS, seed=1), partial(HEADS, seed=2), {"capped scores": _capped}),
    (
        NARROW_HEADS,
        partial(NARROW_HEADS, seed=1),
        partial(NARROW_HEADS, seed=2),
        {
            "narrow heads, written out": _alike(lambda query, key, value: (query @ key.mT).softmax(-1) @ value),
        },
    ),
]
"""Functions of three tensors."""

SURE: dict[str, Function] = {
    f"softmax, sure by {by}": lambda x, by=by: (x + by * F.one_hot(BUCKETS, WIDTH)).softmax(-1) for by in (12, 16)
}
"""Probabilities whose rows are all sure."""

TWICE: dict[str, Function] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "product": lambda x: x * x.roll(1, 0) * x.roll(2, 0),
    "matmul": lambda x: (x @ x.T) @ x,
    "gelu": F.gelu,
    "silu": F.silu,
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "amax": lambda x: x.amax(1).square(),
}
"""Functions whose gradient is differentiated."""


class Max(torch.autograd.Function):
    """The largest of each row, as one writes it: backward looks for values that are equal to the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        largest = x.max(1, keepdim=True)[0]
        ctx.save_for_backward(x, largest)
        return largest

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, largest = ctx.saved_tensors
        mask = x == largest
        return gradients[0] * mask / mask.sum(1, keepdim=True)


class Clip(torch.autograd.Function):
    """A clamp, as one writes it: backward asks which values are its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.clamp(-1, 1)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, result = ctx.saved_tensors
        return gradients[0] * (x == result)


OWN: dict[str, Function] = {"Max": Max.apply, "Clip": Clip.apply}

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU6": nn.ReLU6,
    "LeakyReLU": partial(nn.LeakyReLU, 0.1),
    "LeakyReLU in place": partial(nn.LeakyReLU, 0.01, inplace=True),
    "PReLU": nn.PReLU,
}


def cases() -> Iterator[Case]:
    """Yields what is measured within the bounds."""
    for make, functions in ON:
        yield from (case(name, function, make) for name, function in functions.items())
    for first, second, functions in OF_TWO:
        yield from (case(name, function, first, second) for name, function in functions.items())
    for first, second, third, functions in OF_THREE:
        yield from (case(name, function, first, second, third) for name, function in functions.items())
    yield from (case(name, function, NORMAL) for name, function in SURE.items())
    yield from (Case(f"{name}, twice", partial(_twice, function)) for name, function in TWICE.items())
    yield from (Case(f"chain of {name}", partial(_chain, make)) for name, make in ACTIVATIONS.items())
    yield from (each for each in masked() if each.group in ("cross_entropy", "logsumexp"))
    yield from (each for each in sure() if each.group in ("cross_entropy", "logsumexp"))
    yield from (each for each in ctc() if "800" not in each.name)


def exact_cases() -> Iterator[Case]:
    """Yields what no precision may change."""
    yield from (case(name, function, NORMAL) for name, function in OWN.items())
    narrow = (partial(NARROW_HEADS, seed=seed) for seed in range(3))
    yield case("fused attention of narrow heads", F.scaled_dot_product_attention, *narrow)


def _transposed(x: Tensor, w: Tensor) -> Tensor:
    return F.conv_transpose2d(x, w.transpose(0, 1), stride=2)


def _twice(function: Function) -> Problem:
    problem = of(function, NORMAL())
    return Problem(problem.forward, problem.leaves, order=2)


def _chain(activation: Callable[[], nn.Module]) -> Problem:
    torch.manual_seed(0)
    widths = [8, *[16] * 8]
    layers = [
        layer
        for before, after in pairwise(widths)
        for layer in (nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), activation())
    ]
    model, x = nn.Sequential(*layers), normal(8, 8, 16, 16)
    return Problem(lambda: model(x), list(model.parameters()), model)
