"""What follows from another stored activation is not stored: dropped probabilities, normalization results."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from daf_core import ActivationEngine, DAFConfig, ModifiedInPlaceError
from tests.core.harness import normal

SHAPE = (8, 32, 32)
WIDE = (64, 128)


class RootRMSNorm(nn.Module):
    """A normalization by the root mean square as language models write it, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(WIDE[-1], seed=5).exp())

    def forward(self, values: Tensor) -> Tensor:
        wide = values.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(values.dtype)


class Operands(nn.Module):
    """Scores and values of an attention, and the input of normalizations, all trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(3 * normal(*SHAPE))
        self.values = nn.Parameter(normal(*SHAPE, seed=1))
        self.inputs = nn.Parameter(normal(*WIDE, seed=2))
        self.norm = nn.LayerNorm(WIDE[-1])
        self.root = RootRMSNorm()
        self.linear = nn.Linear(WIDE[-1], 16)


Loss = Callable[[Operands], Tensor]


@pytest.fixture(autouse=True, params=["a CPU's dropout", "a GPU's dropout"])
def dropout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has an operator of its own for dropout, which CPUs have, too."""
    if request.param == "a GPU's dropout":
        monkeypatch.setattr(F, "dropout", lambda values, p: torch.native_dropout(values, p, True)[0])


def _train(loss: Loss, **options: object) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Returns the gradients, and how many tensors each codec stored; without options, those of plain training."""
    torch.manual_seed(0)
    model = Operands()
    if not options:
        loss(model).backward()
        return _gradients(model), {}
    engine = ActivationEngine(model, DAFConfig.from_dict(options))
    with engine.compress():
        result = loss(model)
    result.backward()
    del result
    assert (engine.held_bytes, engine.leased_pages) == (0, 0)
    return _gradients(model), engine.finish_step().stored_as


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _error(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    differences = torch.cat([(left[name] - right[name]).flatten() for name in right])
    return float(differences.norm() / torch.cat([gradient.flatten() for gradient in right.values()]).norm())


def _attend(model: Operands) -> Tensor:
    return (F.dropout(model.scores.softmax(-1), 0.25) @ model.values).square().sum()


def _attend_through_views(model: Operands) -> Tensor:
    weights = F.dropout(model.scores.view(2, 4, 32, 32).softmax(-1), 0.25).expand(2, 4, 32, 32).reshape(SHAPE)
    return (weights @ model.values).square().sum()


def _squash(model: Operands) -> Tensor:
    return (F.dropout(model.scores.tanh(), 0.25) @ model.values).square().sum()


def _normalize(model: Operands) -> Tensor:
    return model.linear(model.norm(2 * model.inputs)).square().sum()


def _normalize_and_drop(model: Operands) -> Tensor:
    normalized = model.norm(2 * model.inputs)  # alive while its dropped copy is saved, as with adapters
    return model.linear(F.dropout(normalized, 0.25)).square().sum()


def _narrow(weights: Tensor, model: Operands) -> Tensor:
    return (weights.to(torch.bfloat16) @ model.values.to(torch.bfloat16)).float().square().sum()


def _attend_in_half(model: Operands) -> Tensor:
    return _narrow(model.scores.softmax(-1), model)


def _attend_from_half(model: Operands) -> Tensor:
    return (model.scores.to(torch.bfloat16).softmax(-1).float() @ model.values).square().sum()


def _changed_before_a_dropout(model: Operands) -> Tensor:
    model.root.weight.requires_grad_(False)
    normalized = model.root(2 * model.inputs)
    with torch.no_grad():
        normalized.mul_((torch.arange(WIDE[-1]) % 2) * 3.0)
    return model.linear(F.dropout(normalized, 0.25)).square().sum()


def _changed_dropout(model: Operands) -> Tensor:
    dropped = F.dropout(model.scores.softmax(-1), 0.25)
    with torch.no_grad():
        dropped.masked_fill_(torch.arange(32) % 31 == 5, 0.0)
    return _narrow(dropped, model)


def _changed_before_a_linear_layer(model: Operands) -> Tensor:
    dropped = F.dropout(model.norm(2 * model.inputs.repeat(4, 1)), 0.25)
    with torch.no_grad():
        dropped[:, :9].fill_(3.0)
    with torch.autocast("cpu", torch.bfloat16):
        return model.linear(dropped).float().square().sum()


def _changed_view_before_a_linear_layer(model: Operands) -> Tensor:
    dropped = F.dropout(model.norm(2 * model.inputs.repeat(4, 1)), 0.25)
    dropped.detach()[:, :9].mul_(3.0)
    with torch.autocast("cpu", torch.bfloat16):
        return model.linear(dropped).float().square().sum()


def _changed_cast(model: Operands) -> Tensor:
    wide = model.scores.to(torch.bfloat16).softmax(-1).float()
    with torch.no_grad():
        wide[:, 1].fill_(0.5)
    return (F.dropout(wide, 0.25) @ model.values).square().sum()


def _widened_by_a_mask(model: Operands) -> Tensor:
    other = _other_half(model)
    mask = torch.where(normal(*other.shape, seed=4) > 0, 0.0, 1.5)
    return ((other * mask) @ model.values).square().sum()


def _changed_root(model: Operands) -> Tensor:
    values = 2 * model.inputs.repeat(4, 1)
    divided = values * torch.rsqrt(values.detach().pow(2).mean(-1, keepdim=True) + 1e-6)
    with torch.no_grad():
        divided.copy_(divided.round())
    with torch.autocast("cpu", torch.bfloat16):
        return model.linear(divided).float().square().sum()


def _scale_planes(model: Operands) -> Tensor:
    return (model.scores.tanh() * model.values[:1, :, :1] @ model.values).square().sum()


def _scale_columns(model: Operands) -> Tensor:
    return ((model.scores.tanh() * model.values[0, 0]).transpose(1, 2) @ model.values).square().sum()


def _other_half(model: Operands) -> Tensor:
    return model.scores.repeat(4, 1, 1, 1).to(torch.bfloat16).softmax(-1).to(torch.float16)


def _attend_from_half_by_another(model: Operands) -> Tensor:
    return _narrow(_other_half(model), model)


def _drop_from_half_by_another(model: Operands) -> Tensor:
    return _narrow(F.dropout(_other_half(model), 0.25), model)


def _attend_in_double(model: Operands) -> Tensor:
    return (model.scores.double().softmax(-1).float() @ model.values).square().sum()


def _normalize_for_half(model: Operands) -> Tensor:
    normalized = model.norm(2 * model.inputs.repeat(4, 1))  # alive while layers save what autocast makes of it
    with torch.autocast("cpu", torch.bfloat16):
        return model.linear(normalized).float().square().sum()


def _drop_for_half(model: Operands) -> Tensor:
    normalized = model.norm(2 * model.inputs.repeat(4, 1))
    with torch.autocast("cpu", torch.bfloat16):  # as an adapter does, whose layer has what was dropped as a variable
        return model.linear(F.dropout(normalized, 0.25)).float().square().sum()


def _attend_and_drop_in_half(model: Operands) -> Tensor:
    return _narrow(F.dropout(model.scores.softmax(-1), 0.25), model)


def _divide_by_root(model: Operands) -> Tensor:
    return model.linear(model.root(2 * model.inputs)).square().sum()


def _divide_by_root_in_half(model: Operands) -> Tensor:
    model.root.to(torch.bfloat16)
    normalized = model.root((2 * model.inputs.repeat(4, 1)).to(torch.bfloat16))
    return model.linear(normalized.float()).square().sum()


def _scale_channels(model: Operands) -> Tensor:
    return model.linear(model.inputs.tanh() * model.root.weight).square().sum()


def _normalize_from_half(model: Operands) -> Tensor:
    normalized = model.norm.to(torch.bfloat16)((2 * model.inputs.repeat(4, 1)).to(torch.bfloat16))
    return model.linear(normalized.float()).square().sum()


@pytest.mark.parametrize(
    ("loss", "form"),
    [
        (_attend, "product"),
        (_attend_through_views, "product"),
        (_squash, "product"),
        (_attend_in_half, "cast"),
        (_attend_from_half, "cast"),
    ],
)
def test_what_follows_from_a_result_is_exact_in_exact_mode(loss: Loss, form: str) -> None:
    """A softmax's result times the dropout's mask is the dropped tensor, bit for bit, and so is a cast of it."""
    exact, stored_as = _train(loss, precision="exact")
    assert stored_as[form] == 1
    assert _same(exact, _train(loss)[0])


@pytest.mark.parametrize(
    ("loss", "form"),
    [
        (_attend, "product"),
        (_normalize, "normalized"),
        (_normalize_and_drop, "product"),
        (_attend_in_half, "cast"),
        (_normalize_for_half, "cast"),
        (_normalize_from_half, "cast"),
        (_drop_for_half, "cast"),
        (_divide_by_root, "scaled"),
        (_divide_by_root_in_half, "cast"),
    ],
)
@pytest.mark.parametrize(("precision", "bound"), [(8, 0.02), (4, 0.15), (2, 0.8)])
def test_derived_gradient_is_as_good_as_a_stored_one(
    loss: Loss, form: str, precision: int, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deriving adds no error of its own worth mentioning, and holds less."""
    plain = _train(loss)[0]
    derived, stored_as = _train(loss, precision=precision)
    assert stored_as[form] == 1
    monkeypatch.setattr("daf_core.saved_tensors.hooks.Derivation.derive", lambda *_: None)
    monkeypatch.setattr("daf_core.saved_tensors.store.Arguments.recipe", lambda *_: None)
    stored, without = _train(loss, precision=precision)
    assert form not in without
    assert _error(derived, plain) < min(bound, 1.5 * _error(stored, plain))


@pytest.mark.parametrize("packing", ["device", "workers"])
def test_change_in_a_later_step_is_seen(packing: str) -> None:
    """What was derived in the steps before is looked at again in each."""
    model = Operands()
    engine = ActivationEngine(model, DAFConfig.from_dict({"precision": 8, "packing": packing}))

    def loss(factor: float) -> Tensor:
        torch.manual_seed(0)
        normalized = model.norm(2 * model.inputs.repeat(4, 1))
        dropped = F.dropout(normalized, 0.25)
        if factor != 1:
            with torch.no_grad():
                dropped[:, :9].mul_(factor)
        with torch.autocast("cpu", torch.bfloat16):
            return model.linear(dropped).float().square().sum()

    for factor in (1.0, 1.0, 1.0, 3.0, 1.0):
        model.zero_grad()
        loss(factor).backward()
        plain = _gradients(model)
        model.zero_grad()
        with engine.compress():
            result = loss(factor)
        result.backward()
        assert _error(_gradients(model), plain) < 0.02
        assert engine.finish_step().stored_as["cast"] == (factor == 1)


def test_look_behind_a_cast_keeps_nothing() -> None:
    """Before Python 3.13 a function whose variables somebody has asked for keeps them until it ends."""
    model = Operands()
    engine = ActivationEngine(model, DAFConfig(precision=8))

    def left() -> tuple[list[Tensor | None], int]:
        with engine.compress(), torch.autocast("cpu", torch.bfloat16):
            dropped = F.dropout(model.norm(2 * model.inputs.repeat(4, 1)), 0.25)
            weights = F.dropout(model.scores.softmax(-1), 0.25)
            loss = model.linear(dropped).float().square().sum() + (weights @ model.values).float().square().sum()
        watched = [weakref.ref(each) for each in (dropped, weights)]
        del dropped, weights, loss
        return [each() for each in watched], engine.held_bytes

    for _ in range(3):
        assert left() == ([None, None], 0)
        engine.finish_step()


def test_other_views_keep_their_nodes() -> None:
    """A look at one whose base was changed makes its node anew, and torch would add gradients in another order."""
    model = Operands()

    def loss() -> Tensor:
        torch.manual_seed(0)
        changed = model.scores * 1.7
        view = changed.view(-1, 32)
        with torch.no_grad():
            changed.mul_(0.5)
        weights = F.dropout(model.scores.softmax(-1), 0.25)
        with torch.autocast("cpu", torch.bfloat16):
            result = (weights @ model.values).float().square().sum()
        return result + changed.sin().sum() + changed.exp().sum() + (view * 0.3).tanh().sum()

    loss().backward()
    plain = _gradients(model)
    engine = ActivationEngine(model, DAFConfig(precision="exact"))
    for _ in range(3):
        model.zero_grad()
        with engine.compress():
            result = loss()
        result.backward()
        assert _same(_gradients(model), plain)
        engine.finish_step()


def test_result_that_was_changed_is_no_factor() -> None:
    """Plain training does not read it where only another gradient is asked for."""
    model = Operands()

    def loss() -> Tensor:
        torch.manual_seed(0)
        weights = model.scores.softmax(-1)
        with torch.no_grad():
            weights.mul_(3)
        return (F.dropout(weights, 0.25) @ model.values).square().sum()

    (plain,) = torch.autograd.grad(loss(), model.values)
    engine = ActivationEngine(model, DAFConfig(precision=8))
    for _ in range(3):
        with engine.compress():
            result = loss()
        (found,) = torch.autograd.grad(result, model.values)
        assert (found - plain).norm() < 0.02 * plain.norm()
        engine.finish_step()


@pytest.mark.parametrize("loss", [_normalize, _normalize_for_half, _divide_by_root, _divide_by_root_in_half])
def test_normalization_is_stored_in_exact_mode(loss: Loss) -> None:
    """Recomputing it rounds in another order."""
    exact, stored_as = _train(loss, precision="exact")
    assert not {"normalized", "cast", "scaled"} & stored_as.keys()
    assert _same(exact, _train(loss)[0])


def _changed_unseen(model: Operands) -> Tensor:
    dropped = F.dropout(model.scores.softmax(-1), 0.25)
    with torch.no_grad():
        dropped.mul_(3)
    return (dropped @ model.values).square().sum()


def _changed_between(model: Operands) -> Tensor:
    normalized = model.norm(2 * model.inputs)
    with torch.no_grad():
        normalized.mul_((torch.arange(WIDE[-1]) % 2) * 3.0)
    return model.linear(F.dropout(normalized, 0.25)).square().sum()


def _changed_before_a_cast(model: Operands) -> Tensor:
    normalized = model.norm(2 * model.inputs)
    with torch.no_grad():
        normalized.mul_((torch.arange(WIDE[-1]) % 2) * 3.0)
    with torch.autocast("cpu", torch.bfloat16):
        return model.linear(normalized).float().square().sum()


def _functional_norm(model: Operands) -> Tensor:
    normalized = F.layer_norm(2 * model.inputs, WIDE[-1:], model.norm.weight, model.norm.bias)
    return model.linear(normalized).square().sum()


def _transposed(model: Operands) -> Tensor:
    return (F.dropout(model.scores.softmax(-1), 0.25).transpose(1, 2) @ model.values).square().sum()


def _part(model: Operands) -> Tensor:
    return (F.dropout(model.scores.softmax(-1), 0.25)[:4].clone() @ model.values[:4]).square().sum()


def _other_factor(model: Operands) -> Tensor:
    return ((model.scores.softmax(-1) * normal(*SHAPE, seed=3)) @ model.values).square().sum()


def _broadcast_mask(model: Operands) -> Tensor:
    mask = (normal(32, 32, seed=4) > 0).float()
    return ((model.scores.softmax(-1) * mask) @ model.values).square().sum()


def _of_a_product(model: Operands) -> Tensor:
    return (F.dropout(model.scores * 2, 0.25) @ model.values).square().sum()


def _unscaled_norm(model: Operands) -> Tensor:
    return model.linear(F.layer_norm(2 * model.inputs, WIDE[-1:])).square().sum()


@pytest.mark.parametrize(
    "loss",
    [
        _changed_unseen,
        _changed_between,
        _changed_before_a_cast,
        _changed_before_a_dropout,
        _changed_dropout,
        _changed_before_a_linear_layer,
        _changed_view_before_a_linear_layer,
        _changed_cast,
        _attend_and_drop_in_half,
        _widened_by_a_mask,
        _changed_root,
        _scale_channels,
        _scale_planes,
        _scale_columns,
        _attend_in_double,
        _attend_from_half_by_another,
        _drop_from_half_by_another,
        _functional_norm,
        _transposed,
        _part,
        _broadcast_mask,
        _of_a_product,
        _unscaled_norm,
    ],
)
@pytest.mark.parametrize("precision", ["exact", 8])
def test_what_does_not_follow_is_stored(loss: Loss, precision: object) -> None:
    """A tensor that is not the very product, in the same order, keeps a copy of its own."""
    found, stored_as = _train(loss, precision=precision)
    plain = _train(loss)[0]
    assert not {"product", "normalized", "cast", "scaled"} & stored_as.keys()
    assert _same(found, plain) if precision == "exact" else _error(found, plain) < 0.02


def test_factor_that_is_lossy_itself_is_no_mask() -> None:
    """The error of a product of two coded tensors would be that of both; where the factor is exact it is none."""
    assert "product" not in _train(_other_factor, precision=8)[1]
    exact, stored_as = _train(_other_factor, precision="exact")
    assert stored_as["product"] == 1
    assert _same(exact, _train(_other_factor)[0])


def test_source_of_a_graph_that_has_run_backward_is_none() -> None:
    """What the softmax saved is gone: the dropped tensor is stored."""
    model = Operands()
    engine = ActivationEngine(model, DAFConfig(precision=4))
    with engine.compress():
        weights = model.scores.softmax(-1)
        first = weights.square().sum()
    first.backward()
    with engine.compress():
        _ = F.dropout(weights, 0.25) @ model.values
    assert "product" not in engine.finish_step().stored_as


def _written_product(model: Operands) -> Tensor:
    dropped = F.dropout(model.scores.softmax(-1), 0.25)
    dropped.data.mul_(3)
    return (dropped @ model.values).square().sum()


def _written_cast(model: Operands) -> Tensor:
    narrowed = model.scores.softmax(-1).to(torch.bfloat16)
    narrowed.data.mul_(3)
    return _narrow(narrowed, model)


@pytest.mark.parametrize(("loss", "form"), [(_written_product, "product"), (_written_cast, "cast")])
def test_change_behind_autograds_back_is_found_in_exact_mode(loss: Loss, form: str) -> None:
    """A write through .data counts nowhere: some elements are compared."""
    exact, stored_as = _train(loss, precision="exact")
    assert form not in stored_as
    assert _same(exact, _train(loss)[0])


def test_result_that_is_changed_after_it_was_saved_is_no_source() -> None:
    """Where nobody asks for it: its own operator would refuse it in backward, as in plain training."""
    model = Operands()
    engine = ActivationEngine(model, DAFConfig(precision="exact"))
    with engine.compress():
        weights = model.scores.detach().requires_grad_().softmax(-1)
        dropped = F.dropout(weights, 0.25)
        with torch.no_grad():
            weights.zero_()
        loss = (dropped @ model.values).square().sum()
    torch.autograd.backward(loss, inputs=[model.values])
    expected = dropped.transpose(1, 2) @ (2 * (dropped @ model.values))
    assert torch.equal(_gradients(model)["values"], expected)


def test_node_whose_tensors_were_saved_without_hooks() -> None:
    """What was made before the scope began has nothing to look at."""
    model = Operands()
    engine = ActivationEngine(model, DAFConfig(precision=4))
    weights, normalized = F.dropout(model.scores.softmax(-1), 0.25), model.norm(2 * model.inputs)
    with engine.compress():
        loss = (weights @ model.values).square().sum() + model.linear(normalized).square().sum()
    loss.backward()
    assert not {"product", "normalized"} & engine.finish_step().stored_as.keys()


def test_spill_folder_changes_no_bit_of_many_rows(tmp_path: Path) -> None:
    """The statistics of 4,096 rows and more lie on pages then, and still give the result."""
    gradients = []
    for options in ({}, {"memory_budget": "100MB", "spill_dir": str(tmp_path)}):
        torch.manual_seed(0)
        norm, linear = nn.LayerNorm(32), nn.Linear(32, 8)
        model = nn.Sequential(norm, linear)
        inputs = normal(4096, 32).requires_grad_()
        engine = ActivationEngine(model, DAFConfig(precision=4, **options))
        with engine.compress():
            loss = model(2 * inputs).square().sum()
        loss.backward()
        assert engine.finish_step().stored_as["normalized"] == 1
        gradients.append(_gradients(model))
    assert _same(*gradients)


def test_large_half_precision_inputs_do_not_overflow() -> None:
    """A difference from the mean may leave the range of 16 bits; the operator computes in 32."""
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 8)).half()
    inputs = normal(128, 64).half()
    inputs[:, 0], inputs[:, 1] = 60000, -60000
    inputs.requires_grad_()
    engine = ActivationEngine(model, DAFConfig(precision=8))
    with engine.compress():
        loss = model(inputs).float().square().sum()
    loss.backward()
    assert engine.finish_step().stored_as["normalized"] == 1
    assert all(gradient.isfinite().all() for gradient in _gradients(model).values())


def test_checkpointed_block_is_not_recomputed_by_a_look() -> None:
    """The result of a block that keeps only its inputs is stored; its own saved tensors are left alone."""
    calls: list[int] = []

    def block(inputs: Tensor, model: Operands) -> Tensor:
        calls.append(1)
        return model.norm(2 * inputs)

    def loss_of(model: Operands) -> Tensor:
        return model.linear(checkpoint(block, model.inputs, model, use_reentrant=False)).square().sum()

    for precision in ("exact", 8):
        model = Operands()
        engine = ActivationEngine(model, DAFConfig(precision=precision))
        with engine.compress():
            loss = loss_of(model)
        assert len(calls) == 1
        loss.backward()
        assert len(calls) == 2
        assert "normalized" not in engine.finish_step().stored_as
        calls.clear()


def test_derived_tensor_may_be_asked_for_again() -> None:
    """A graph that is kept gives the same gradients twice."""
    torch.manual_seed(0)
    model = Operands()
    engine = ActivationEngine(model, DAFConfig(precision=4))
    with engine.compress():
        loss = _attend(model) + _normalize_and_drop(model)
    loss.backward(retain_graph=True)
    first = {name: gradient.clone() for name, gradient in _gradients(model).items()}
    model.zero_grad()
    loss.backward()
    assert _same(_gradients(model), first)
    assert engine.leased_pages == 0


def test_weight_changed_before_backward_is_an_error() -> None:
    """The normalization is computed again with its weight, which must be the one of forward."""
    model = Operands()
    engine = ActivationEngine(model, DAFConfig(precision=4))
    with engine.compress():
        loss = _normalize(model)
    with torch.no_grad():
        model.norm.weight.mul_(2)
    with pytest.raises(ModifiedInPlaceError):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Products of 16-bit tensors round as the operator does."""
    torch.manual_seed(0)
    model = Operands().to(dtype)
    plain = _attend(model)
    plain.backward()
    expected = {name: gradient.clone() for name, gradient in _gradients(model).items()}
    torch.manual_seed(0)
    model = Operands().to(dtype)
    engine = ActivationEngine(model, DAFConfig(precision="exact"))
    with engine.compress():
        loss = _attend(model)
    loss.backward()
    assert engine.finish_step().stored_as["product"] == 1
    assert _same(_gradients(model), expected)


def test_derived_tensor_lives_without_pages_of_its_own() -> None:
    """Under a budget its source loses bits, and it with it; the books stay right."""
    model = Operands()
    engine = ActivationEngine(model, DAFConfig(precision=4, memory_budget="16KB"))
    with engine.compress():
        loss = _attend(model)
    assert 0 < engine.held_bytes <= 16_000
    loss.backward()
    assert all(gradient.isfinite().all() for gradient in _gradients(model).values())
    assert engine.leased_pages == 0
