"""What an operator compares with its result, or divides by, stays exact: NaN or noise would come out of backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from daf_core.precision.calibration import Calibration, calibrate
from tests.core.harness import normal

ROWS, TOKENS, WIDTH = 8, 64, 64

Head = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A layer, and on it what is tested."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x))


def targets(like: Tensor) -> Tensor:
    return (torch.arange(like.numel()) % 2).float().view(like.shape)


COMPARED: dict[str, Head] = {
    "amax": lambda x: x.amax(1).square().mean(),
    "torch.amin": lambda x: torch.amin(x, dim=1).square().mean(),
    "aminmax": lambda x: (x.aminmax(dim=1).max - x.aminmax(dim=1).min).mean(),
    "max of all": lambda x: x.max(),
    "median of all": lambda x: x.median(),
    "largest norm": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=-1).mean(),
    "absmax quantization": lambda x: (x / x.abs().amax(-1, keepdim=True)).square().mean(),
    "acos": lambda x: torch.acos(torch.tanh(4 * x) * 0.9999).mean(),
}
"""Wrong from the first pass on, where their own input is stored in few bits."""

LED_TO: dict[str, Head] = {
    "cross entropy of a sigmoid": lambda x: F.binary_cross_entropy(torch.sigmoid(6 * x), targets(x)),
    "cross entropy of a softmax": lambda x: F.binary_cross_entropy(torch.softmax(6 * x, -1), targets(x)),
    "logarithm of a softmax": lambda x: -((6 * x).softmax(-1) + 1e-9).log()[..., 0].mean(),
    "logit": lambda x: torch.logit(torch.sigmoid(4 * x)).square().mean(),
    "root of a square": lambda x: ((x * 3).square() + 1e-6).pow(0.5).mean(),
    "quotient": lambda x: (x / (x.square() + 1e-3)).mean(),
}
"""Wrong, too, where what leads to them is."""


def gradient(net: Net) -> Tensor:
    found = torch.cat([parameter.grad.flatten() for parameter in net.parameters() if parameter.grad is not None])
    net.zero_grad()
    return found


def cosines(head: Head, precision: int, passes: int) -> list[float]:
    net, x = Net(head), normal(ROWS, TOKENS, WIDTH)
    net(x).backward()
    exact = gradient(net)
    engine = ActivationEngine(net, DAFConfig(precision=8 if precision == 8 else 4))
    found: list[float] = []
    for _ in range(passes):
        with engine.compress():
            loss = net(x)
        loss.backward()
        found.append(float(torch.cosine_similarity(gradient(net), exact, dim=0)))
        assert engine.finish_step().held_bytes > 0
    return found


@pytest.mark.parametrize("precision", [8, 4])
@pytest.mark.parametrize("head", COMPARED.values(), ids=COMPARED)
def test_what_is_compared_stays_exact_from_the_beginning(head: Head, precision: int) -> None:
    assert min(cosines(head, precision, 2)) > 0.98


@pytest.mark.parametrize("precision", [8, 4])
@pytest.mark.parametrize("head", LED_TO.values(), ids=LED_TO)
def test_what_leads_to_a_pole_stays_exact_from_the_beginning(head: Head, precision: int) -> None:
    assert min(cosines(head, precision, 3)) > 0.98


@pytest.mark.parametrize("head", LED_TO.values(), ids=LED_TO)
def test_a_rehearsal_knows_it_before_the_first_pass(head: Head) -> None:
    net, x = Net(head), normal(ROWS, TOKENS, WIDTH)
    engine = ActivationEngine(net, DAFConfig(precision=4))
    with engine.probe_pass(lambda: net(x[:2])) as rehearsal:
        del rehearsal
    net(x).backward()
    exact = gradient(net)
    with engine.compress():
        loss = net(x)
    loss.backward()
    assert torch.cosine_similarity(gradient(net), exact, dim=0) > 0.98


def test_a_rehearsal_measures_what_is_too_small_to_be_compressed() -> None:
    """Training did not show who reads it, and nothing that is saved after it leads there."""

    def head(x: Tensor) -> Tensor:
        few = x.sin()[0, :4]
        return (few * few.square().mean(-1, keepdim=True).rsqrt()).mean()

    net, x = Net(head), normal(ROWS, TOKENS, WIDTH)
    engine, found = ActivationEngine(net, DAFConfig()), list[Calibration | None]()
    for _ in range(2):
        with engine.probe_pass(lambda: net(x)) as rehearsal:
            found.append(calibrate(rehearsal))
        engine = ActivationEngine(net, DAFConfig())
        for _ in range(2):
            with engine.compress():
                net(x)
    assert found[0] == found[1]
    assert found[0] is not None
    assert len(found[0].errors) == 3


def test_what_it_knows_is_of_the_place_and_not_of_the_operator() -> None:
    """The same tensor may be stored in few bits for others."""
    net, x = Net(lambda x: x.amax(1).mean() + x.sin().mean() + x.exp().mean()), normal(ROWS, TOKENS, WIDTH)
    engine = ActivationEngine(net, DAFConfig(precision=4))
    for _ in range(2):
        with engine.compress():
            net(x).backward()
        statistics = engine.finish_step()
    assert statistics.stored_as["planes"] > 0


@pytest.mark.parametrize("width", [32, 64, 514])
@pytest.mark.parametrize("precision", [8, 4])
def test_a_row_of_zeros_beside_others_is_normalized_as_it_is(width: int, precision: int) -> None:
    """As a new class token is: of noise in its place a normalization makes values of the size of all others."""
    tokens = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12), nn.Tanh(), nn.Linear(width, 2))
    x = normal(8, 64, width)
    start = torch.zeros(8, 1, width)

    def loss() -> Tensor:
        rows = torch.cat([start, tokens[0](x)], 1)
        return tokens[3](tokens[2](tokens[1](rows))).square().mean()

    loss().backward()
    exact = [parameter.grad.clone() for parameter in tokens.parameters() if parameter.grad is not None]
    tokens.zero_grad()
    engine = ActivationEngine(tokens, DAFConfig(precision=8 if precision == 8 else 4))
    with engine.compress():
        value = loss()
    value.backward()
    for parameter, expected in zip(tokens.parameters(), exact, strict=True):
        assert parameter.grad is not None
        assert torch.cosine_similarity(parameter.grad.flatten(), expected.flatten(), dim=0) > 0.98
    engine.close()


def _normalized_by_hand(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


_NORMALIZES: dict[str, Callable[[int], Head]] = {
    "layer norm": nn.LayerNorm,
    "root mean square norm": nn.RMSNorm,
    "function": lambda width: lambda x: F.layer_norm(x, (width,)),
    "by hand": lambda width: _normalized_by_hand,
}


@pytest.mark.parametrize("width", [32, 48, 64])
@pytest.mark.parametrize("beside", [None, "before", "after"])
@pytest.mark.parametrize("name", _NORMALIZES)
@pytest.mark.parametrize("fraction", [1, 1 / 4, 1 / 12])
def test_a_row_that_spreads_less_is_normalized_as_well(name: str, fraction: float, beside: str, width: int) -> None:
    """As the class token of a small ViT does, whose row alone is classified: rows share no scaling groups there.

    Neither do they where another operator saves the same tensor, before or after.
    """
    torch.manual_seed(0)
    layer, last, normalize = nn.Linear(width, width), nn.Linear(width, width), _NORMALIZES[name](width)
    net = nn.ModuleList([layer, last, *([normalize] if isinstance(normalize, nn.Module) else [])])
    scale = torch.ones(33, 1).index_fill(0, torch.tensor([0]), fraction)
    x = normal(8, 33, width)

    def loss() -> Tensor:
        h = layer(x) * scale
        other = F.silu(h) if beside == "before" else 0.0
        normalized = normalize(h)
        other = F.silu(h) if beside == "after" else other
        return last((normalized + 0.0 * other)[:, 0]).tanh().square().mean()

    loss().backward()
    exact = gradient(net)
    engine = ActivationEngine(net, DAFConfig(precision=4))
    for _ in range(3):
        net.zero_grad()
        with engine.compress():
            value = loss()
        value.backward()
        assert torch.cosine_similarity(gradient(net), exact, dim=0) > 0.98
        assert engine.finish_step().stored_as["planes"] > 1
    engine.close()


@pytest.mark.parametrize("loss_of", [Tensor.mean, Tensor.sum], ids=["mean", "sum"])
@pytest.mark.parametrize("squared", [False, True])
def test_a_loss_may_be_of_all_dimensions_without_naming_them(loss_of: Callable[..., Tensor], squared: bool) -> None:
    """Such a node says None where others have their dimensions."""
    net = nn.Linear(64, 64)
    x = normal(128, 64)

    def loss() -> Tensor:
        h = net(x).tanh()
        return loss_of(h.square() if squared else h, dim=None)

    loss().backward()
    exact = gradient(net)
    engine = ActivationEngine(net, DAFConfig(precision=8))
    for _ in range(2):
        net.zero_grad()
        with engine.compress():
            value = loss()
        value.backward()
        assert torch.cosine_similarity(gradient(net), exact, dim=0) > 0.999
        assert engine.finish_step().stored_as["planes"] > 0
    engine.close()


@pytest.mark.parametrize("keys", [32, 50, 64])
def test_probabilities_sum_to_one_in_short_rows(keys: int) -> None:
    """What the gradients of all have in common cancels in that of the scores then."""

    def head(x: Tensor) -> Tensor:
        probabilities = (x[:, :keys] @ normal(WIDTH, keys, seed=3) / 4).softmax(-1)
        return (probabilities * (normal(ROWS, keys, keys, seed=4) + 20)).mean()

    net, x = Net(head), normal(ROWS, TOKENS, WIDTH)
    net(x).backward()
    exact = gradient(net)
    engine = ActivationEngine(net, DAFConfig(precision=4))
    for _ in range(2):
        net.zero_grad()
        with engine.compress():
            loss = net(x)
        loss.backward()
        assert (gradient(net) - exact).norm() < 0.25 * exact.norm()
    engine.close()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_tensors_without_memory_pass_as_they_are() -> None:
    """Tangents of what has none: torch makes them of nothing."""
    import torch.autograd.forward_ad as forward_ad

    net, x = Net(lambda x: x.sin().mean()), normal(ROWS, TOKENS, WIDTH)
    with forward_ad.dual_level(), ActivationEngine(net, DAFConfig(precision=4)).compress():
        loss = forward_ad.unpack_dual(net(forward_ad.make_dual(x, torch.ones_like(x))))
    assert loss.tangent is not None
    loss.primal.backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_pass_as_they_are() -> None:
    nested = torch.nested.nested_tensor([normal(128, 64), normal(64, 64)], requires_grad=True)
    net = nn.Linear(64, 64)
    with ActivationEngine(net, DAFConfig(precision=4)).compress():
        result = net(nested)
    torch.nested.to_padded_tensor(result, 0.0).sum().backward()
    assert nested.grad is not None
