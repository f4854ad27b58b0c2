"""Losses at sizes that are coded, of predictions that are unsure, sure and masked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.core.harness import integers, normal
from tests.fidelity.measure import Case, Problem

ROWS, CLASSES = 64, 256

Loss = Callable[..., Tensor]


def leaf(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Returns normal numbers that a gradient is taken of."""
    return (normal(*shape, seed=seed) * scale).requires_grad_()


def of(loss: Loss, *leaves: Tensor) -> Problem:
    """Returns the problem of a function of activations: the leaves themselves are none, as parameters."""
    return Problem(lambda: loss(*(each.clone() for each in leaves)), leaves)


def case(name: str, loss: Loss, *leaves: Callable[[], Tensor]) -> Case:
    """Returns the case of a loss of leaves that are made when they are needed."""
    return Case(name, lambda: of(loss, *(each() for each in leaves)))


PLAIN = partial(leaf, ROWS, CLASSES)
OTHER = partial(leaf, ROWS, CLASSES, seed=1)
THIRD = partial(leaf, ROWS, CLASSES, seed=2)
SPREAD = partial(leaf, ROWS, CLASSES, scale=4.0)
TARGET = torch.arange(ROWS) * 3 % CLASSES
NOISE = normal(ROWS, CLASSES, seed=3)
SHARES = normal(ROWS, CLASSES, seed=4).softmax(-1)
CLASS_OR_NOT = (normal(ROWS, CLASSES, seed=5) > 0).float()
SIDES = CLASS_OR_NOT * 2 - 1
ONE_SIDE = SIDES[:, 0]


def cases() -> Iterator[Case]:
    """Yields all losses."""
    yield from (case(name, loss, PLAIN) for name, loss in SMOOTH.items())
    yield from (case(name, loss, PLAIN) for name, loss in STEEP.items())
    yield from (case(name, loss, SPREAD) for name, loss in POSITIVE.items())
    yield from (case(name, loss, PLAIN, OTHER) for name, loss in OF_TWO.items())
    yield from (case(name, loss, PLAIN, OTHER, THIRD) for name, loss in OF_THREE.items())
    yield from sure()
    yield from masked()
    yield from ctc()


def sure() -> Iterator[Case]:
    """Yields losses of predictions that lie so far above others."""
    for margin in (0, 4, 8, 12, 16):
        for name, loss in LOGARITHMIC.items():
            yield Case(f"{name}, sure by {margin}", partial(_of_sure, loss, margin), name)


def masked() -> Iterator[Case]:
    """Yields losses of predictions some of which are masked with such a number."""
    for fill in (-1e4, -65504.0, -1e6, -1e9, torch.finfo(torch.float32).min, -math.inf):
        for name, loss in LOGARITHMIC.items():
            yield Case(f"{name}, masked with {fill:.3g}", partial(_of_masked, loss, fill), name)


def ctc() -> Iterator[Case]:
    """Yields CTC losses of sequences of such lengths."""
    for length in (50, 300, 800):
        name = "ctc_loss"
        yield case(f"{name} of {length}", partial(_ctc, length), partial(leaf, length, 4, 32, scale=3.0))
    lengths = torch.tensor([200, 180, 120, 90])
    yield case("ctc_loss of several lengths", partial(_ctc, 200, lengths=lengths), partial(leaf, 200, 4, 32))


def _ctc(length: int, x: Tensor, lengths: Tensor | None = None) -> Tensor:
    targets = integers(31, 4, length // 5) + 1
    lengths = torch.full((4,), length) if lengths is None else lengths
    return F.ctc_loss(x.log_softmax(-1), targets, lengths, lengths // 5)


def _of_sure(loss: Loss, margin: float) -> Problem:
    raised = (normal(ROWS, CLASSES) + margin * F.one_hot(TARGET, CLASSES)).requires_grad_()
    return of(loss, raised)


def _of_masked(loss: Loss, fill: float) -> Problem:
    kept = F.one_hot(TARGET, CLASSES).bool()
    mask = (normal(ROWS, CLASSES, seed=6) < -0.8) & ~kept
    return of(lambda x: loss(x.masked_fill(mask, fill)), PLAIN())


def _at_targets(values: Tensor) -> Tensor:
    return values[torch.arange(ROWS), TARGET].mean()


LOGARITHMIC: dict[str, Loss] = {
    "cross_entropy": lambda x: F.cross_entropy(x, TARGET),
    "cross_entropy with smoothing": lambda x: F.cross_entropy(x, TARGET, label_smoothing=0.1),
    "log_softmax": lambda x: _at_targets(x.log_softmax(-1)),
    "logsumexp": lambda x: x.logsumexp(-1).mean(),
    "softmax": lambda x: _at_targets(x.softmax(-1)),
    "logarithm of softmax": lambda x: _at_targets((x.softmax(-1) + 1e-9).log()),
}

SMOOTH: dict[str, Loss] = {
    "mse_loss": lambda x: F.mse_loss(x, NOISE),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, NOISE),
    "smooth_l1_loss(beta=.1)": lambda x: F.smooth_l1_loss(x, NOISE, beta=0.1),
    "huber_loss": lambda x: F.huber_loss(x, NOISE),
    "huber_loss(delta=.1)": lambda x: F.huber_loss(x, NOISE, delta=0.1),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, SIDES),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(4 * x, CLASS_OR_NOT),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x, CLASS_OR_NOT),
    "cross_entropy of shares": lambda x: F.cross_entropy(x, SHARES),
    "cross_entropy by weight": lambda x: F.cross_entropy(x, TARGET, weight=SHARES[0]),
    "cross_entropy of some": lambda x: F.cross_entropy(x, TARGET.masked_fill(TARGET > 128, -100)),
    "cross_entropy of pixels": lambda x: F.cross_entropy(x.view(4, 16, 16, 16), integers(16, 4, 16, 16)),
    "nll_loss": lambda x: F.nll_loss(x.log_softmax(-1), TARGET),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, NOISE.abs()),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), SHARES, reduction="batchmean"),
    "kl_div(log_target=True)": lambda x: F.kl_div(
        x.log_softmax(-1), SHARES.log(), reduction="batchmean", log_target=True
    ),
}

STEEP: dict[str, Loss] = {
    "l1_loss": lambda x: F.l1_loss(x, NOISE),
    "charbonnier": lambda x: ((x - NOISE).square() + 1e-6).sqrt().mean(),
    "charbonnier by rsqrt": lambda x: ((x - NOISE).square() + 1e-3).rsqrt().mean(),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, SIDES),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, TARGET),
    "multi_margin_loss(p=2)": lambda x: F.multi_margin_loss(x, TARGET, p=2),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, integers(CLASSES, ROWS, CLASSES)),
    "margin": lambda x: F.relu(1 - SIDES * x).mean(),
    "log_cosh": lambda x: (x - NOISE).cosh().log().mean(),
    "dice": lambda x: 1 - 2 * (x.sigmoid() * CLASS_OR_NOT).sum() / (x.sigmoid() + CLASS_OR_NOT).sum(),
    "focal": lambda x: ((1 - x.softmax(-1)).square() * -x.log_softmax(-1) * SHARES).mean(),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
    "perplexity": lambda x: F.cross_entropy(x, TARGET).exp(),
}

POSITIVE: dict[str, Loss] = {
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), CLASS_OR_NOT),
    "poisson_nll_loss(log_input=False)": lambda x: F.poisson_nll_loss(
        F.softplus(x) + 0.02, NOISE.abs(), log_input=False
    ),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, NOISE, F.softplus(x) + 0.02),
    "entropy by special.entr": lambda x: torch.special.entr(x.softmax(-1)).sum(-1).mean(),
    "relative entropy by rel_entr": lambda x: (SHARES * (SHARES.log() - (x.softmax(-1) + 1e-9).log())).sum(),
}

OF_TWO: dict[str, Loss] = {
    "mse_loss of two": lambda x, y: F.mse_loss(x, y),
    "l1_loss of two": lambda x, y: F.l1_loss(x, y),
    "smooth_l1_loss of two": lambda x, y: F.smooth_l1_loss(x, y),
    "huber_loss of two": lambda x, y: F.huber_loss(x, y),
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y).mean(),
    "cosine_embedding_loss": lambda x, y: F.cosine_embedding_loss(x, y, ONE_SIDE),
    "pairwise_distance": lambda x, y: F.pairwise_distance(x, y).mean(),
    "pairwise_distance(p=1)": lambda x, y: F.pairwise_distance(x, y, 1.0).mean(),
    "pairwise_distance(p=inf)": lambda x, y: F.pairwise_distance(x, y, math.inf).mean(),
    "dist(p=inf)": lambda x, y: torch.dist(x, y, math.inf),
    "margin_ranking_loss": lambda x, y: F.margin_ranking_loss(x, y, SIDES, margin=0.5),
    "info_nce": lambda x, y: F.cross_entropy(F.normalize(x) @ F.normalize(y).T / 0.07, torch.arange(ROWS)),
    "kl_div of two": lambda x, y: F.kl_div(
        x.log_softmax(-1), y.log_softmax(-1), reduction="batchmean", log_target=True
    ),
    "gaussian_nll_loss of two": lambda x, y: F.gaussian_nll_loss(x, NOISE, F.softplus(y) + 0.02),
    "cdist": lambda x, y: torch.cdist(x, y).mean(),
}

OF_THREE: dict[str, Loss] = {
    "triplet_margin_loss": lambda x, y, z: F.triplet_margin_loss(x, y, z),
    "triplet_margin_loss(p=inf)": lambda x, y, z: F.triplet_margin_loss(x, y, z, p=math.inf),
    "triplet_margin_with_distance_loss": lambda x, y, z: F.triplet_margin_with_distance_loss(
        x, y, z, distance_function=lambda a, b: 1 - F.cosine_similarity(a, b)
    ),
}
