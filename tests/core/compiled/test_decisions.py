"""How tensors of a compiled graph are stored: decided by what the backward graph does with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from tests.core.compiled.graphs import BACKEND, error_of_weight
from tests.core.readers.test_patterns import NORMALIZATIONS, ByHand, Likelihood, precise

pytestmark = [pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")]


class Layer(nn.Module):
    """A linear layer, a function and another linear layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], trained: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64).requires_grad_(trained)
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.function(self.first(inputs))).square().mean()


def stored(model: nn.Module, bits: int = 4, draws: bool = False) -> tuple[Counter[str], float]:
    """Returns what a step stores, and the error of its gradient; for `draws` see `error_of_weight`."""
    inputs = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model, backend=BACKEND)

    def gradient(scope: object, run: nn.Module) -> Tensor:
        torch.manual_seed(2)
        with scope:
            loss = run(inputs)
        loss.backward()
        found = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        model.zero_grad()
        return found

    exact = gradient(torch.enable_grad(), compiled if draws else model)
    engine = ActivationEngine(model, DAFConfig(precision=bits))
    found = gradient(engine.compress(), compiled)
    return Counter(engine.finish_step().stored_as), float((found - exact).norm() / exact.norm())


class FirstToken(nn.Module):
    """A layer and a normalization, of whose result a trained last layer reads the first token of each row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(64, 64), nn.LayerNorm(64).requires_grad_(False)
        self.head = nn.Linear(64, 2, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.norm(self.first(inputs.view(4, 32, 64)))
        return self.head(nn.functional.dropout(found[:, 0, :], 0.1)).square().mean()


class Head(nn.Module):
    """A layer, a function and a dropout, whose result a trained last layer reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(64, 64), nn.Linear(64, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(torch.tanh(self.first(inputs)), 0.1)).square().mean()


def error_of_head(model: FirstToken | Head, bits: int) -> float:
    """Returns the error of the gradient of a last layer's weight."""
    inputs = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
    error, step = error_of_weight(model, model.head.weight, inputs, bits, draws=True)
    assert step.stored_as["planes"] > 0
    return error


def test_a_piece_of_what_is_worked_out_again_is_kept_as_it_is() -> None:
    assert error_of_head(FirstToken(), 2) < 1e-5


def test_what_a_last_layer_reads_has_more_bits_where_a_dropout_is_worked_out_again() -> None:
    assert 0 < error_of_head(Head(), 4) < 0.005


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_of_gelu_the_derivative_is_stored_in_its_own_codes(approximate: str) -> None:
    codes, error = stored(Layer(nn.GELU(approximate), trained=False))
    assert codes["slopes"] == 1
    assert 0 < error < 0.11


def test_of_another_function_the_derivative_is_stored_as_any_values() -> None:
    codes, error = stored(Layer(torch.tanh, trained=False))
    assert codes["slopes"] == 0
    assert codes["planes"] >= 1
    assert 0 < error < 0.15


def test_of_relu_before_frozen_weights_one_bit_is_stored() -> None:
    codes, error = stored(Layer(torch.relu, trained=False))
    assert codes["bitmask"] == 1
    assert error < 0.1


def test_what_is_divided_by_is_exact() -> None:
    class Quotient(Layer):
        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.first(inputs)
            return (hidden.mean(0) * hidden / (hidden.square() + hidden.mean(0).square() + 0.1)).square().mean()

    assert stored(Quotient(torch.tanh))[0]["raw"] >= 1


def test_a_dropout_saves_its_mask_alone() -> None:
    codes, error = stored(Layer(nn.Dropout(0.5)), draws=True)
    assert codes["bitmask"] == 1
    assert 0 < error < 0.15


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.02), (2, 0.6)])
def test_bits_are_those_of_the_configuration(bits: int, bound: float) -> None:
    assert 0 < stored(Layer(nn.GELU()), bits)[1] < bound


class Attention(nn.Module):
    """An attention to a few values that have much in common, written out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.Linear(64, 48)
        self.values = nn.Parameter(torch.randn(48, 64) + 5 * torch.randn(64), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return (torch.softmax(self.scores(inputs), -1) @ self.values).square().mean()


def test_probabilities_of_few_keys_sum_to_one() -> None:
    """Where their rows share scaling groups, the error of the gradient is .29."""
    codes, error = stored(Attention(), 4)
    assert codes["planes"] >= 2
    assert 0 < error < 0.2


class Fused(nn.Module):
    """Fused attention, perhaps with a mask, and perhaps of its own result."""

    def __init__(self, mask: Tensor | None, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.mask, self.again = nn.Linear(64, 192), mask, again

    def forward(self, inputs: Tensor) -> Tensor:
        heads = self.first(inputs.view(2, 64, 64)).chunk(3, -1)
        query, key, value = (each.unflatten(-1, (2, 32)).transpose(1, 2) for each in heads)
        found = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)
        if self.again:
            found = nn.functional.scaled_dot_product_attention(found, key, value)
        return found.square().mean()


def test_masks_of_attentions_are_exact() -> None:
    """Infinities in codes make the gradient NaN; models with causal masks give them as tensors."""
    causal = torch.ones(64, 64).tril().bool()
    for mask in (causal, torch.zeros(64, 64).masked_fill(~causal, -torch.inf), causal.expand(2, 1, 64, 64)):
        codes, error = stored(Fused(mask), 8)
        assert codes["attended"] >= 1
        assert 0 < error < 0.01


def test_attentions_of_attentions_run_again() -> None:
    codes, error = stored(Fused(None, again=True), 8)
    assert codes["attended"] >= 3
    assert 0 < error < 0.01


class Keys(nn.Module):
    """An attention whose keys have a bias, written out as torch does one that drops: keys are copied by channel."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(128, 128), nn.Linear(128, 128)
        with torch.no_grad():
            self.key.bias.normal_(std=bias)

    def forward(self, inputs: Tensor) -> Tensor:
        query, key = (each(inputs).unflatten(-1, (2, 64)).transpose(1, 2) for each in (self.query, self.key))
        scores = query @ (key.transpose(-1, -2) * 0.125)
        return (torch.softmax(scores, -1) @ inputs.unsqueeze(1)).square().mean()


@pytest.mark.parametrize(("tokens", "dynamic", "bound"), [(64, False, 0.2), (64, True, 0.28), (100, False, 0.2)])
def test_keys_that_are_copied_channel_by_channel_may_have_a_bias(tokens: int, dynamic: bool, bound: float) -> None:
    """Where channels were taken for tokens, the errors of the query's weight were .27, .33 and .24, and BERT's .94."""
    model = Keys(5.0)
    inputs = torch.randn(4, tokens, 128, generator=torch.Generator().manual_seed(1))
    error, step = error_of_weight(model, model.query.weight, inputs, 4, dynamic)
    assert step.stored_as["planes"] >= 3
    assert 0 < error < bound


class Patches(nn.Module):
    """An attention between pieces of images, which a convolution has made tokens of, to their first colors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pieces, self.query, self.key = nn.Conv2d(3, 64, 4, 4), nn.Linear(64, 64), nn.Linear(64, 64)
        with torch.no_grad():
            self.pieces.bias.normal_(std=5.0)  # pyright: ignore[reportOptionalMemberAccess]

    def forward(self, images: Tensor) -> Tensor:
        tokens = (self.pieces(images) * 0.5).flatten(2).transpose(1, 2)
        scores = self.query(tokens) @ self.key(tokens).transpose(1, 2) * 0.05
        return (torch.softmax(scores, -1) @ images.flatten(2).transpose(1, 2)[:, : scores.shape[1]]).square().mean()


def test_the_last_dimension_of_a_convolution_is_no_channel() -> None:
    """Where it was taken for one, the error of the key's weight was .66."""
    model, images = Patches(), torch.randn(4, 3, 48, 48, generator=torch.Generator().manual_seed(7))
    assert 0 < error_of_weight(model, model.key.weight, images, 4)[0] < 0.25


class Heads(nn.Module):
    """An attention written out, to keys and values that have much in common, perhaps with a sink."""

    def __init__(self, sink: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(128, 128) for _ in range(3))
        self.sink = sink
        with torch.no_grad():
            for each in (self.key, self.value):
                each.bias.normal_(std=5.0)

    def forward(self, inputs: Tensor) -> Tensor:
        layers = self.query, self.key, self.value
        query, key, value = (each(inputs).unflatten(-1, (2, 64)).transpose(1, 2) for each in layers)
        scores = query @ key.transpose(-1, -2) * 0.125
        if self.sink:
            scores = torch.cat([scores, scores.amax(-1, keepdim=True) + 3], -1)
        probabilities = torch.softmax(scores, -1)[..., : inputs.shape[1]]
        return ((probabilities @ value).transpose(1, 2).flatten(2) * inputs).square().mean()


@pytest.mark.parametrize(("tokens", "dynamic"), [(64, True), (100, False)])
def test_probabilities_of_any_number_of_keys_sum_to_one(tokens: int, dynamic: bool) -> None:
    """Where rows shared groups, errors of the query's weight were 11 and 8."""
    model, inputs = Heads(), torch.randn(4, tokens, 128, generator=torch.Generator().manual_seed(1))
    error, step = error_of_weight(model, model.query.weight, inputs, 4, dynamic)
    assert step.stored_as["planes"] >= 5
    assert 0 < error < 0.3


def test_probabilities_without_that_of_a_sink_do_not_sum_to_one() -> None:
    """Nor are they made to: the error was .45."""
    model, inputs = Heads(sink=True), torch.randn(4, 100, 128, generator=torch.Generator().manual_seed(1))
    for each in (model.query, model.key):  # otherwise all of them are saved
        each.requires_grad_(False)
    assert 0 < error_of_weight(model, model.value.weight, inputs, 4)[0] < 0.2


class Mixture(nn.Module):
    """Values that a function of the scores of a layer weighs."""

    def __init__(self, width: int, weights: Callable[[Tensor], Tensor], trained: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.values = nn.Linear(64, width).requires_grad_(trained), nn.Linear(64, width)
        self.weights = weights

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.weights(self.scores(inputs))
        return (found * self.values(inputs).view(found.shape)).sum(-1).square().mean()


def over_sums(scores: Tensor, *dims: Any, **keeps: Any) -> Tensor:
    found = scores.exp()
    return found / found.sum(*dims, **keeps)


MIXTURES: dict[str, Mixture] = {
    "cut": Mixture(96, lambda x: x.unflatten(-1, (2, 48)).softmax(-1).unflatten(-1, (8, 6))),
    "cut otherwise": Mixture(96, lambda x: x.unflatten(-1, (2, 48)).softmax(-1).unflatten(-1, (3, 16))),
    "joined": Mixture(93, lambda x: x.unflatten(-1, (3, 31)).softmax(-1).flatten(-2)),
    "masked": Mixture(93, lambda x: x.softmax(-1).masked_fill(x < 0.5, 0.0)),
    "filled": Mixture(93, lambda x: x.softmax(-1).masked_fill(x[..., :1] < 0, -1.0)),
    "of other rows": Mixture(101, lambda x: over_sums(x, 1), trained=True),
    "of all": Mixture(93, lambda x: over_sums(x, None, keepdim=True), trained=True),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_what_does_not_sum_to_one_is_not_made_to(name: str) -> None:
    """Where it was, errors were 5, 2, .6, .7, 1.0 and .11, and the last one did not compile."""
    model, inputs = MIXTURES[name], torch.randn(101, 64, generator=torch.Generator().manual_seed(1))
    assert 0 < error_of_weight(model, model.values.weight, inputs, 4)[0] < 0.1


def test_probabilities_are_known_where_rows_may_be_masked_as_a_whole() -> None:
    """Torch's attentions that drop give 0 in their place."""

    class Masked(Attention):
        def forward(self, inputs: Tensor) -> Tensor:
            return (torch.ops.aten._safe_softmax(self.scores(inputs), -1) @ self.values).square().mean()

    assert 0 < stored(Masked(), 4)[1] < 0.2


class OfAnySize(nn.Module):
    """Layers that see all tokens as rows of one matrix, as GPT-2's do, and a GELU whose input deviates in channels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64).requires_grad_(False)
        with torch.no_grad():
            self.first.bias[:2] += 12

    def forward(self, inputs: Tensor) -> Tensor:
        shape = (*inputs.size()[:-1], 128)
        hidden = torch.addmm(self.first.bias, inputs.view(-1, 64), self.first.weight.t()).view(shape)
        return self.second(nn.functional.gelu(hidden)).square().mean()


@pytest.mark.parametrize("dynamic", [False, True], ids=["one length", "any length"])
def test_what_is_read_of_sizes_is_no_value(dynamic: bool) -> None:
    """Where lengths vary, GPT-2 held twice the bytes, and of GELU the derivative was not known: an error of .35."""
    model = OfAnySize()
    inputs = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(1))
    error, step = error_of_weight(model, model.first.weight, inputs, 4, dynamic)
    assert step.stored_as["slopes"] == 1
    assert 0 < error < 0.15


def test_a_view_as_another_type_is_no_view_of_the_same() -> None:
    """Operators on whole numbers were moved to what they were made of, and compiling raised."""

    class Bits(Layer):
        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.first(inputs)
            low = (hidden.detach().view(torch.int32) & 7).float()
            return self.second(hidden * low).square().mean()

    assert stored(Bits(torch.tanh), 8)[1] < 0.02


def test_what_a_view_joins_with_others_is_no_view_of_it() -> None:
    class Joined(Layer):
        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.first(inputs)
            return self.second(nn.functional.gelu(nn.functional.pad(hidden, (0, 0, 0, 64)))).square().mean()

    assert 0 < stored(Joined(torch.tanh, trained=False))[1] < 0.15


class Tokens(nn.Module):
    """A convolution or a linear layer of frames, some of which are empty, whose results are normalized as tokens."""

    def __init__(self, convolves: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv1d(64, 64, 3, padding=1) if convolves else nn.Linear(64, 64)
        self.norm, self.convolves = nn.LayerNorm(64), convolves
        with torch.no_grad():
            self.first.bias.normal_(std=0.01)  # pyright: ignore[reportOptionalMemberAccess]

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.transpose(1, 2)).transpose(1, 2) if self.convolves else self.first(inputs)
        return (self.norm(hidden) * inputs.roll(1, -1).roll(40, 1)).sum()


@pytest.mark.parametrize("convolves", [True, False], ids=["convolution", "linear layer"])
def test_rows_that_are_normalized_share_no_groups(convolves: bool) -> None:
    """Where tokens shared them, or those of a channel, errors of the normalization's weight were 1.5 and 2.5."""
    model, inputs = Tokens(convolves), torch.randn(4, 118, 64, generator=torch.Generator().manual_seed(1))
    if convolves:
        inputs[1, 60:] = inputs[2, 100:] = 0.0
    else:
        inputs[:, ::3] = 0.0
    assert 0 < error_of_weight(model, model.norm.weight, inputs, 4)[0] < 0.2


class Normalized(nn.Module):
    """Layers whose functions read normalized values, which backward would work out again of codes of others.

    Or not `normalizes`: then they read what the layers make.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], normalizes: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.function, self.normalizes = function, normalizes

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = layer(values)
            values = self.function(nn.functional.layer_norm(values, (128,)) if self.normalizes else values)
        return values.square().mean(0)[:64].sum()


def _pooled_relu(values: Tensor) -> Tensor:
    return values.relu().unflatten(-1, (64, 2)).mean(-1).repeat_interleave(2, -1)


def _squared_relu(values: Tensor) -> Tensor:
    return values.relu().square()


def _bent(values: Tensor) -> Tensor:
    return torch.where(values > 0, values, values / 10)


COMPARED: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(nn.functional, name)
        for name in ("hardswish", "hardtanh", "hardsigmoid", "relu6", "elu", "selu", "softplus", "logsigmoid")
    },
    "celu": partial(nn.functional.celu, alpha=0.1),
    "clamp": partial(torch.clamp, min=-1.0, max=0.5),
}
"""Functions whose derivative compares their argument with numbers, which forward does not."""


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("name", COMPARED)
def test_comparisons_of_backward_alone_are_made_in_forward(name: str, normalizes: bool) -> None:
    """What they compare stayed as it is: MobileNets held 7 tenths of what they save, at 4 bits as well.

    At 0.1, the exponential in the derivative of a CELU is up to 1e13 where nothing reads it.
    """
    model = Normalized(COMPARED[name], normalizes)
    inputs = torch.randn(512, 128, generator=torch.Generator().manual_seed(1))
    error, statistics = error_of_weight(model, model.layers[0].weight, inputs, 4)
    assert 0 < error < 0.25
    assert statistics.held_bytes < (0.41 if name == "celu" else 0.36) * statistics.raw_bytes


def _wide_elu(values: Tensor) -> Tensor:
    return nn.functional.elu(values * 25) / 25


def _looked_up(values: Tensor) -> Tensor:
    places = ((values.detach() + 4) * 4).to(torch.int64).clamp(0, 63)
    return torch.zeros_like(values[:, :64]).scatter(1, places[:, :64], values[:, :64].sin()).repeat(1, 2) * values


@pytest.mark.parametrize("function", [_wide_elu, _looked_up])
def test_what_is_not_read_and_what_counts_places_does_no_harm(function: Callable[[Tensor], Tensor]) -> None:
    """Errors were 600, as an exponential of codes is large where it is not read, and .07 to .7 of places in a table."""
    model = Normalized(function, normalizes=False)
    inputs = 8 * torch.randn(512, 128, generator=torch.Generator().manual_seed(1))
    for bits, bound in ((8, 0.02), (4, 0.25)):
        assert 0 < error_of_weight(model, model.layers[0].weight, inputs, bits)[0] < bound


def test_comparisons_of_weights_are_not_saved() -> None:
    """Weights are there in backward."""
    inputs, model = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)), nn.Linear(128, 128)

    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def forward(self, values: Tensor) -> Tensor:
            return nn.functional.linear(values, self.layer.weight.clamp(-0.05, 0.05)).square().mean()

    assert error_of_weight(Clamped(), model.weight, inputs, 4)[1].stored_as["bitmask"] == 0


class Moved(nn.Module):
    """Words, layers between which channels and words move, and a gated layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.first, self.second = nn.Embedding(100, 64), nn.Linear(64, 128), nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.norm(self.words(words))
        hidden = hidden + nn.functional.glu(self.first(hidden).roll((3, 5), (1, 2)))
        hidden = hidden.flip(1)[:, torch.arange(63, -1, -1)]
        return self.second(self.norm(hidden)).square().mean()


def test_gradients_may_be_moved_and_gathered() -> None:
    """What is behind a gradient of an embedding, or before a roll, stayed as it is, residual streams among it."""
    model, words = Moved(), torch.randint(0, 100, (16, 64), generator=torch.Generator().manual_seed(1))
    error, statistics = error_of_weight(model, model.words.weight, words, 4)
    assert 0 < error < 0.14
    assert statistics.held_bytes < 0.25 * statistics.raw_bytes


@pytest.mark.parametrize("function", [nn.functional.leaky_relu, _bent, _pooled_relu, _squared_relu])
def test_sides_of_what_is_worked_out_again_are_saved(function: Callable[[Tensor], Tensor]) -> None:
    """A bit an element: the error of four layers with leaky ReLUs was .05 at 8 bits, as codes lose sides near 0."""
    model = Normalized(function)
    inputs = torch.randn(512, 128, generator=torch.Generator().manual_seed(1))
    error, statistics = error_of_weight(model, model.layers[0].weight, inputs, 8)
    assert error < 0.011
    assert statistics.held_bytes < 0.5 * statistics.raw_bytes


@pytest.mark.parametrize("how", NORMALIZATIONS)
def test_normalizations_by_hand_are_known(how: str) -> None:
    """Rows of several sizes shared groups where squares are sums, products or in a norm: an error of .10 at 8 bits."""
    model = ByHand(NORMALIZATIONS[how])
    inputs = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(1))
    assert error_of_weight(model, model.layer.weight, inputs, 8)[0] < 0.02


class NormalizedOverRows(nn.Module):
    """Layers of channels that deviate from .1 to 10, normalized over the batch, and a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(128) for _ in range(2))
        self.function, self.head = function, nn.Linear(128, 8)
        with torch.no_grad():
            for layer in self.layers:
                layer.weight *= torch.logspace(-1, 1, 128).unsqueeze(1)

    def forward(self, values: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            values = self.function(norm(layer(values)))
        return self.head(values).square().mean()


def _sigmoid_by_hand(values: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-values))


def _swish_by_hand(values: Tensor) -> Tensor:
    return values / (1 + torch.exp(-values))


def _density(values: Tensor) -> Tensor:
    return values * torch.exp(-0.5 * values * values)


def _softplus_by_hand(values: Tensor) -> Tensor:
    return torch.log1p(values.exp())


@pytest.mark.parametrize(
    "function",
    [nn.functional.gelu, nn.functional.mish, _sigmoid_by_hand, _swish_by_hand, _softplus_by_hand, _density],
)
def test_what_an_exponential_reads_of_normalized_values_is_no_logarithm(function: Callable[[Tensor], Tensor]) -> None:
    """Values were stored as logarithms, exact where they are largest: errors at 4 bits of 1.0 to 49."""
    model = NormalizedOverRows(function)
    inputs = torch.randn(256, 128, generator=torch.Generator().manual_seed(1))
    error, step = error_of_weight(model, model.layers[0].weight, inputs, 4)
    assert 0 < error < 0.25
    assert step.held_bytes < 0.35 * step.raw_bytes


class Student(nn.Module):
    """A model that learns from a teacher who is close to it."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss, self.first = loss, nn.Linear(64, 256)
        self.head, self.teacher = nn.Linear(256, 500), nn.Linear(256, 500).requires_grad_(False)
        with torch.no_grad():
            self.head.weight *= 3
            self.teacher.weight.copy_(self.head.weight + 0.02 * torch.randn(500, 256))
            self.teacher.bias.copy_(self.head.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        return self.loss(self.head(hidden), self.teacher(hidden.detach()))


def _divergence(student: Tensor, teacher: Tensor) -> Tensor:
    return nn.functional.kl_div((student / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="batchmean")


def _of_logarithms(student: Tensor, teacher: Tensor) -> Tensor:
    found, targets = student.log_softmax(-1), teacher.log_softmax(-1)
    return nn.functional.kl_div(found, targets, reduction="batchmean", log_target=True)


def _soft_targets(student: Tensor, teacher: Tensor) -> Tensor:
    return nn.functional.cross_entropy(student, teacher.softmax(-1))


@pytest.mark.parametrize("loss", [_divergence, _of_logarithms, _soft_targets])
def test_probabilities_that_are_compared_with_targets_have_more_bits(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Their difference is the gradient: its errors were .03 at 8 bits and .6 at 4."""
    model, inputs = Student(loss), torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
    for bits, bound in ((8, 0.012), (4, 0.15)):
        assert 0 < error_of_weight(model, model.head.weight, inputs, bits)[0] < bound


class AlmostEqual(nn.Module):
    """Vectors that are compared with some that are almost the same."""

    def __init__(self, compare: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.compare = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), compare

    def forward(self, inputs: Tensor) -> Tensor:
        inputs, noise = inputs.chunk(2)
        vectors = self.layers(inputs)
        return self.compare(vectors, vectors.detach() + 0.05 * noise).diagonal().mean()


def _unit(vectors: Tensor) -> Tensor:
    return nn.functional.normalize(vectors, dim=-1)


def _by_root(vectors: Tensor) -> Tensor:
    return vectors * (vectors * vectors).sum(-1, keepdim=True).rsqrt()


def _distances(one: Tensor, other: Tensor) -> Tensor:
    return (one**2).sum(-1)[:, None] + (other * other).sum(-1) - 2 * one @ other.t()


def _to_centers(one: Tensor, other: Tensor) -> Tensor:
    return one.pow(2).sum(-1, keepdim=True).expand(-1, len(one)).addmm(one, other.t(), alpha=-2)


_COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosines": lambda one, other: -_unit(one) @ _unit(other).t(),
    "scaled cosines": lambda one, other: -torch.ones(()).exp() * _unit(one) @ _unit(other).t(),
    "an einsum": lambda one, other: -torch.einsum("nc,mc->nm", _unit(one), _unit(other)),
    "cosines by a root": lambda one, other: -_by_root(one) @ _by_root(other).t(),
    "distances": _distances,
    "centers": _to_centers,
    "torch": torch.cdist,
}


@pytest.mark.parametrize("compare", _COMPARISONS.values(), ids=_COMPARISONS)
def test_vectors_that_are_almost_equal_have_more_bits(compare: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Errors were .035 to .05 at 8 bits, and .54 to .69 at 4."""
    model = AlmostEqual(compare)
    inputs = torch.randn(1024, 64, generator=torch.Generator().manual_seed(1))
    for bits, bound in ((8, 0.012), (4, 0.15)):
        assert 0 < error_of_weight(model, model.layers[0].weight, inputs, bits)[0] < bound


class CosineClassifier(nn.Module):
    """A layer whose input and weight are normalized."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 512)

    def forward(self, inputs: Tensor) -> Tensor:
        scores = nn.functional.linear(_unit(self.first(inputs)), _unit(self.last.weight))
        return (16 * scores).logsumexp(-1).mean()


def test_a_layer_of_cosines_keeps_its_bits() -> None:
    """They take .138 of its bytes, and .169 where input and weight have more."""
    model, inputs = CosineClassifier(), torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    step = error_of_weight(model, model.first.weight, inputs, 4)[1]
    assert step.held_bytes < 0.15 * step.raw_bytes


class CosineAttention(nn.Module):
    """An attention of normalized queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projection, self.last = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, inputs: Tensor) -> Tensor:
        query, key, value = self.projection(inputs).chunk(3, -1)
        attended = (8 * _unit(query) @ _unit(key).transpose(1, 2)).softmax(-1) @ value
        return self.last(inputs + attended).square().mean()


def test_an_attention_of_cosines_keeps_its_bits() -> None:
    """It takes .427 of its bytes, and .441 where queries and keys have more."""
    inputs = torch.randn(16, 64, 64, generator=torch.Generator().manual_seed(1))
    model = CosineAttention()
    step = error_of_weight(model, model.projection.weight, inputs, 4)[1]
    assert step.held_bytes < 0.434 * step.raw_bytes


def test_a_steep_sigmoid_by_hand_has_more_bits() -> None:
    model = NormalizedOverRows(lambda values: 1 / (1 + torch.exp(-8 * values)))
    inputs = torch.randn(256, 128, generator=torch.Generator().manual_seed(1))
    assert 0 < error_of_weight(model, model.layers[0].weight, inputs, 4)[0] < 0.2


class Contrast(nn.Module):
    """A contrastive loss of exponentials, of which the diagonal is picked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, inputs: Tensor) -> Tensor:
        one = nn.functional.normalize(self.one(inputs), dim=-1)
        other = nn.functional.normalize(self.other(inputs.flip(-1)), dim=-1)
        exponentials = (one @ other.t() / 0.07).exp()
        return -(exponentials.diagonal() / exponentials.sum(1)).log().mean()


def test_exponentials_of_which_some_are_picked_stay_exact() -> None:
    """Their gradient is divided by what was picked: the error was .3 at 8 bits, and 12 in another model."""
    model, inputs = Contrast(), torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
    assert 0 < error_of_weight(model, model.one.weight, inputs, 8)[0] < 0.02


class Classifier(nn.Module):
    """A layer, and the logarithm of what is made of its probabilities."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.mix = nn.Linear(64, 96), mix

    def forward(self, inputs: Tensor) -> Tensor:
        return -(self.mix(6 * self.layer(inputs)) + 1e-12).log().mean()


def _picked(scores: Tensor) -> Tensor:
    return scores.softmax(-1).gather(1, torch.arange(len(scores))[:, None] % 96)


def _allowed(scores: Tensor) -> Tensor:
    probabilities = scores.softmax(-1) * (torch.arange(96) % 7 > 1)
    return (probabilities / probabilities.sum(-1, keepdim=True)).gather(1, torch.arange(len(scores))[:, None] % 5 + 2)


def _of_some(scores: Tensor) -> Tensor:
    return scores.softmax(-1).unflatten(-1, (12, 8)).sum(-1)


def _mixed(scores: Tensor) -> Tensor:
    each = torch.stack([(scores * factor).softmax(-1) for factor in (0.7, 0.8, 0.9, 1.0)], 1)
    return torch.einsum("rk,rkc->rc", scores[:, :4].softmax(-1), each)


@pytest.mark.parametrize("mix", [_picked, _allowed, _of_some, _mixed])
def test_probabilities_stay_exact_before_a_logarithm(mix: Callable[[Tensor], Tensor]) -> None:
    """Errors were .02 to 5 at 8 bits."""
    model, inputs = Classifier(mix), torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    for backend in (BACKEND, "aot_eager"):
        assert 0 < error_of_weight(model, model.layer.weight, inputs, 8, backend=backend)[0] < 0.01


class Few(nn.Module):
    """An attention to few keys that is written out, and the cross entropy of few classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projection, self.head = nn.Linear(64, 96), nn.Linear(32, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        query, key, value = self.projection(inputs.view(-1, 8, 64)).chunk(3, -1)
        attended = torch.softmax(query @ key.mT / 6, -1) @ value
        return nn.functional.cross_entropy(self.head(attended).flatten(0, 1), torch.arange(len(inputs)) % 8)


def test_softmaxes_of_few_divide_by_no_less_than_one() -> None:
    model, inputs = Few(), torch.randn(2048, 64, generator=torch.Generator().manual_seed(1))
    error, step = error_of_weight(model, model.projection.weight, inputs, 4)
    assert 0 < error < 0.2
    assert step.held_bytes < 0.3 * step.raw_bytes


def test_probabilities_of_a_teacher_have_codes() -> None:
    """No gradient goes there, whatever is divided by them, or their logarithm taken."""
    model, inputs = Student(_divergence), torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
    step = error_of_weight(model, model.head.weight, inputs, 4)[1]
    assert step.held_bytes < 0.3 * step.raw_bytes


class Windows(nn.Module):
    """A histogram by windows, and its distance from that of another image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.rate = nn.Conv2d(1, 1, 3, padding=1), nn.Parameter(torch.tensor(1000.0), requires_grad=False)

    def forward(self, image: Tensor) -> Tensor:
        values = (image + 0.1 * self.layer(image)).clamp(0, 1).flatten(1).unsqueeze(-1)
        windows = (-self.rate * (values - torch.linspace(0, 1, 24)) ** 2).exp()
        return (windows.mean(1).cumsum(-1) - torch.linspace(0, 1, 24)).square().sum()


def test_what_is_almost_zero_of_a_window_stays_so() -> None:
    model, coarse = Windows(), torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    image = nn.functional.interpolate(coarse, size=48, mode="bicubic")
    assert 0 < error_of_weight(model, model.layer.weight, image, 8, backend="aot_eager")[0] < 0.04


class CausalByHand(nn.Module):
    """An attention of which the softmax is written out."""

    def __init__(self, caps: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projection, self.caps = nn.Linear(64, 192), caps

    def forward(self, inputs: Tensor) -> Tensor:
        query, key, value = self.projection(inputs).chunk(3, -1)
        scores = query @ key.mT / 8
        if self.caps:
            scores = 30 * torch.tanh(scores / 30)
        masked = scores.masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1), -torch.inf)
        exponentials = (masked - masked.amax(-1, keepdim=True).detach()).exp()
        return (exponentials / exponentials.sum(-1, keepdim=True) @ value).square().mean()


@pytest.mark.parametrize("caps", [False, True])
def test_masked_scores_of_a_softmax_by_hand_have_codes(caps: bool) -> None:
    model, inputs = CausalByHand(caps), torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(1))
    error, step = error_of_weight(model, model.projection.weight, inputs, 8)
    assert 0 < error < 0.02
    assert step.held_bytes < 0.3 * step.raw_bytes


def _standardized(errors: Tensor, logarithms: Tensor) -> Tensor:
    scaled = errors * torch.exp(-0.5 * logarithms)
    return 0.5 * (scaled * scaled + logarithms).sum(-1).mean()


def _masked(errors: Tensor, logarithms: Tensor) -> Tensor:
    return (0.5 * (logarithms > 0) * errors**2 + 0.1 * logarithms).mean()


@pytest.mark.parametrize("name", ["features", "logarithms"])
@pytest.mark.parametrize("loss", [precise, _standardized])
def test_errors_that_a_loss_weighs_stay_exact(loss: Callable[[Tensor, Tensor], Tensor], name: str) -> None:
    """The errors were 15 and 308."""
    model, inputs = Likelihood(loss), torch.randn(512, 24, generator=torch.Generator().manual_seed(1))
    assert 0 < error_of_weight(model, getattr(model, name).weight, inputs, 4)[0] < 0.25


def test_errors_that_a_mask_or_a_number_weighs_have_codes() -> None:
    model, inputs = Likelihood(_masked), torch.randn(512, 24, generator=torch.Generator().manual_seed(1))
    assert error_of_weight(model, model.features.weight, inputs, 4)[1].stored_as["planes"] > 2
