"""Inputs of several linear layers that are dropped or cast from one tensor, of which one copy is stored."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from daf_core.saved_tensors import derive, hooks, replay
from daf_core.saved_tensors.background import BackgroundPacker
from daf_core.saved_tensors.pending import PackJob
from tests.core.harness import assert_empty, error, normal

ROWS, WIDTH = 192, 320


def _gpu_dropout(input: Tensor, p: float, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, training)[0]


@pytest.fixture(autouse=True, params=["a CPU's dropout", "a GPU's dropout"])
def dropout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has an operator of its own for dropout, which CPUs have, too."""
    if request.param == "a GPU's dropout":
        monkeypatch.setattr(F, "dropout", _gpu_dropout)
        for module in (hooks, replay):
            monkeypatch.setattr(module, "DROPOUT", _gpu_dropout.__code__)


class Adapter(nn.Module):
    """A layer with an input of its own, as adapters have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, make: Callable[[Tensor], Tensor], *_: Tensor) -> Tensor:
        return self.linear(make(x)).float()


class Model(nn.Module):
    """Adapters on a sum, which nobody else saves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, WIDTH)
        self.adapters = nn.ModuleList(Adapter() for _ in range(3))
        self.last = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))

    def begin(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the sum."""
        inputs = normal(ROWS, 64, seed=1)
        return (self.first(inputs) + normal(ROWS, WIDTH, seed=2)).to(dtype)

    def adapted(self, x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns what the adapters give for what each makes of one tensor."""
        return torch.stack([adapter(x, make) for adapter in self.adapters])

    def loss(self, form: Callable[[Model], Tensor]) -> Tensor:
        """Returns the loss of what the adapters give in some form."""
        return self.last(form(self)).square().mean()


Form = Callable[[Model], Tensor]


def _adapted(make: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32, half: bool = False) -> Form:
    def form(model: Model) -> Tensor:
        x = model.begin(dtype) * 1
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return model.adapted(x, make)

    return form


def _dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.25)


FORMS = {
    "dropped": _adapted(_dropped),
    "dropped, then cast": _adapted(_dropped, half=True),
    "cast, then dropped": _adapted(lambda x: _dropped(x.float()), torch.bfloat16),
    "cast": _adapted(Tensor.float, torch.bfloat16),
    "cast by autocast": _adapted(lambda x: x, half=True),
    "cast, then cast by autocast": _adapted(Tensor.float, torch.bfloat16, half=True),
    "cast, dropped, cast": _adapted(lambda x: _dropped(x.float()), torch.bfloat16, half=True),
    "dropped, seen otherwise": _adapted(lambda x: _dropped(x.view(2, -1, WIDTH)).view(ROWS, WIDTH)),
}


def _gradients(
    form: Form, precision: object = None, steps: int = 3, packing: str = "device"
) -> tuple[list[Tensor], int]:
    """Returns the gradients, and the bytes that are held; without a precision those of plain training."""
    model = Model()
    engine = None
    if precision is not None:
        engine = ActivationEngine(model, DAFConfig.from_dict({"precision": precision, "packing": packing}))
    held = 0
    for _ in range(1 if engine is None else steps):  # the later ones are replayed
        model.zero_grad()
        torch.manual_seed(3)
        if engine is None:
            model.loss(form).backward()
            continue
        with engine.compress():
            loss = model.loss(form)
        held = engine.held_bytes
        loss.backward()
        del loss
        assert_empty(engine)
        engine.finish_step()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], held


def _worst(found: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the largest error of a gradient that is not zero."""
    return max(error([a], [b]) for a, b in zip(found, expected, strict=True) if b.any())


def _without_arguments(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("daf_core.saved_tensors.store.Arguments.recipe", lambda *_: None)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("precision", [8, 4, 2])
def test_one_copy_is_stored_of_what_all_are_made_of(
    precision: int, steps: int, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = _gradients(form)
    found, held = _gradients(form, precision, steps)
    _without_arguments(monkeypatch)
    each, held_of_each = _gradients(form, precision, steps)
    assert held_of_each - held > 1.9 * ROWS * WIDTH * precision // 8
    assert error(found, expected) < 1.2 * error(each, expected) + 1e-3


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_are_the_same_in_exact_mode(steps: int, form: Form) -> None:
    found, _ = _gradients(form, "exact", steps)
    assert all(map(torch.equal, found, _gradients(form)[0]))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_worker_stores_the_same(form: Form) -> None:
    found, held = _gradients(form, 4, packing="workers")
    expected, at_once = _gradients(form, 4)
    assert held == at_once
    assert all(map(torch.equal, found, expected))


def test_nothing_waits_for_a_device_in_exact_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is exact would be compared, for which the host waits: the tensor is kept."""
    found, held = _gradients(_gated, "exact")
    monkeypatch.setattr(derive, "COMPARABLE", ())
    stored, held_of_each = _gradients(_gated, "exact")
    assert all(map(torch.equal, found, stored))
    assert held_of_each - held > 2.9 * ROWS * WIDTH * 4


@pytest.mark.parametrize("late", [0.0, 0.02])
def test_a_worker_reads_it_before_it_may_be_changed(late: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = BackgroundPacker._pack

    def pack_late(packer: BackgroundPacker, job: PackJob) -> None:
        time.sleep(late)
        pack(packer, job)

    monkeypatch.setattr(BackgroundPacker, "_pack", pack_late)
    expected, _ = _gradients(_changed_between_layers)
    found, _ = _gradients(_changed_between_layers, 8, packing="workers")
    assert _worst(found, expected) < 0.05


def test_nothing_is_remembered_after_a_pass() -> None:
    model = Model()
    engine = ActivationEngine(model, DAFConfig(precision=4))
    with engine.compress():
        loss = model.loss(FORMS["dropped"])
        assert engine._packer.replayed_by._arguments._own.met
    assert not engine._packer.replayed_by._arguments._own.met
    del loss
    assert_empty(engine)


def _saved_too(model: Model) -> Tensor:
    """Another operator saves the sum."""
    x = model.begin()
    return model.adapters[0](x, _dropped) + model.adapters[1](x, _dropped) + model.adapters[2](x, lambda x: x)


def _saved_before(model: Model) -> Tensor:
    x = model.begin()
    return model.adapters[2](x, lambda x: x) + model.adapters[0](x, _dropped) + model.adapters[1](x, _dropped)


def test_what_is_saved_itself_serves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for form in (_saved_too, _saved_before):
        assert all(map(torch.equal, _gradients(form, "exact")[0], _gradients(form)[0]))
    held = _gradients(_saved_before, 8)[1]
    _without_arguments(monkeypatch)
    assert _gradients(_saved_before, 8)[1] - held > 1.9 * ROWS * WIDTH


def test_what_its_own_operator_keeps_serves_in_exact_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    held = _gradients(_merged_heads, "exact")[1]
    _without_arguments(monkeypatch)
    assert _gradients(_merged_heads, "exact")[1] - held > 2.9 * ROWS * WIDTH * 4


def _gated(model: Model) -> Tensor:
    """What is dropped follows from what two operators have saved."""
    wide = model.begin()
    gate, up = F.silu(wide), wide * 2
    x = gate * up
    return model.adapted(x, _dropped)


def test_what_follows_takes_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it in exact mode."""
    expected, _ = _gradients(_gated)
    found, held = _gradients(_gated, "exact")
    assert all(map(torch.equal, found, expected))
    lossy, held_in_few_bits = _gradients(_gated, 4)
    _without_arguments(monkeypatch)
    each, held_of_each = _gradients(_gated, 4)
    assert held_of_each - held_in_few_bits > 2.9 * ROWS * WIDTH // 2
    assert error(lossy, expected) < 1.2 * error(each, expected)
    assert _gradients(_gated, "exact")[1] - held > 2.9 * ROWS * WIDTH * 4


def _argument_changed_before_its_layer(model: Model) -> Tensor:
    x = model.begin() * 1

    def make(x: Tensor) -> Tensor:
        dropped = _dropped(x)
        with torch.no_grad():
            x.mul_(3)
        return dropped

    return model.adapted(x, make)


def _result_changed(model: Model) -> Tensor:
    x = model.begin() * 1

    def make(x: Tensor) -> Tensor:
        dropped = _dropped(x)
        with torch.no_grad():
            dropped[:, :9].mul_(3)
        return dropped

    return model.adapted(x, make)


def _result_changed_before_a_cast(model: Model) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return _result_changed(model)


def _cast_changed(model: Model) -> Tensor:
    x = model.begin(torch.bfloat16) * 1

    def make(x: Tensor) -> Tensor:
        wide = x.float()
        with torch.no_grad():
            wide[:, :9].mul_(3)
        return _dropped(wide)

    return model.adapted(x, make)


def _input_changed_after_its_cast(model: Model) -> Tensor:
    x = model.begin(torch.bfloat16) * 1

    def make(x: Tensor) -> Tensor:
        wide = x.float()
        with torch.no_grad():
            x[:, :9].mul_(3)
        return _dropped(wide)

    return model.adapted(x, make)


def _merged_heads(model: Model) -> Tensor:
    """The dropouts get what another operator has saved in another shape."""
    heads = (model.begin().view(2, -1, 8, 40) * 1).transpose(1, 2)
    merged = heads.exp().transpose(1, 2)
    return model.adapted(merged.reshape(ROWS, WIDTH), _dropped)


def _repeated(model: Model) -> Tensor:
    """What is given to the modules has fewer elements than what the layers save."""
    half = model.begin()[: ROWS // 2] * 1
    return model.adapted(half, lambda half: _dropped(half.expand(2, -1, -1)))


def _in_another_order(model: Model) -> Tensor:
    columns = model.begin().mT.contiguous() * 1
    return model.adapted(columns.mT, _dropped)


def _cast_of_another_order(model: Model) -> Tensor:
    columns = model.begin(torch.bfloat16).mT.contiguous() * 1
    make = partial(Tensor.to, dtype=torch.float32, memory_format=torch.contiguous_format)
    return model.adapted(columns.mT, make)


def _columns(model: Model) -> Tensor:
    """What is dropped is a half of each row, and may stay as it is."""
    wide = torch.cat([model.begin(), model.begin().sin()], -1).exp()
    return model.adapted(wide.chunk(2, -1)[1], _dropped)


def _negated(model: Model) -> Tensor:
    """Memory holds the negative of its values."""
    x = torch.complex(model.begin(), model.begin() * 2).conj().imag
    return model.adapted(x, _dropped)


def _of_double_precision(model: Model) -> Tensor:
    x = model.begin(torch.float64) * 1
    return model.adapted(x, lambda x: _dropped(x.float()))


class _Conditioned(nn.Module):
    """An adapter that is given something else first."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.adapter = adapter

    def forward(self, condition: Tensor, x: Tensor) -> Tensor:
        return self.adapter.linear(_dropped(x.float())) + condition.to_dense().sum()


def _beside_a_tensor_of_inference(model: Model) -> Tensor:
    with torch.inference_mode():
        condition = normal(8, seed=7)
    x = model.begin(torch.bfloat16) * 1
    return torch.stack([_Conditioned(adapter)(condition, x) for adapter in model.adapters])


def _beside_a_sparse_tensor(model: Model) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are in beta state
        condition = normal(8, 8, seed=7).to_sparse_csr()
    x = model.begin(torch.bfloat16) * 1
    return torch.stack([_Conditioned(adapter)(condition, x) for adapter in model.adapters])


def _in_a_vmap(model: Model) -> Tensor:
    x = (model.begin() * 1).view(2, ROWS // 2, WIDTH)
    mapped = [torch.vmap(partial(adapter, make=_dropped), randomness="different") for adapter in model.adapters]
    return torch.stack([each(x) for each in mapped])


def _changed_where_a_log_has_saved_it(model: Model) -> Tensor:
    """Its reader never runs backward."""
    x = model.begin() * 1
    x.norm()
    results = [adapter(x, _dropped) for adapter in model.adapters]
    x += 1
    return torch.stack(results)


def _rectified(model: Model) -> Tensor:
    x = F.relu(model.begin())
    return model.adapted(x, _dropped)


def _of_two_values(model: Model) -> Tensor:
    x = model.begin().sign() + 0 * model.begin()
    return model.adapted(x, _dropped)


def _changed_between_layers(model: Model) -> Tensor:
    x, results = model.begin() * 1, list[Tensor]()
    for adapter in model.adapters:
        results.append(adapter(x, _dropped))
        with torch.no_grad():
            x[:, :9].mul_(3)
    return torch.stack(results)


def _added_to_between_layers(model: Model) -> Tensor:
    x, results = model.begin() * 1, list[Tensor]()
    for adapter in model.adapters:
        results.append(adapter(x, _dropped))
        x += results[-1].sum(-1, keepdim=True)
    return torch.stack(results)


def _another_result_of_the_same_node(model: Model) -> Tensor:
    """The modules' input is one half of a tensor, and what is cast the other one."""
    x = model.begin(torch.bfloat16) * 1
    one, other = x.split(ROWS // 2)
    return model.adapted(one, lambda _: _dropped(other.float()))


def _another_dropout(model: Model) -> Tensor:
    """The latest dropout is not the one whose result the layer gets."""
    x = model.begin() * 1

    def make(x: Tensor) -> Tensor:
        dropped = _dropped(x * 2)
        _dropped(x)
        return dropped

    return model.adapted(x, make)


def _dropped_twice(model: Model) -> Tensor:
    x = model.begin() * 1
    return model.adapted(x, lambda x: _dropped(_dropped(x)))


def _dropped_in_place(model: Model) -> Tensor:
    x = model.begin() * 1
    return model.adapted(x, lambda x: F.dropout(x * 1, 0.25, inplace=True))


def _not_finite(model: Model) -> Tensor:
    x = torch.where(normal(ROWS, WIDTH, seed=5) > 3, torch.inf, model.begin())
    return model.adapted(x, _dropped).nan_to_num(0, 0, 0)


HARD_FORMS = [
    _argument_changed_before_its_layer,
    _result_changed,
    _result_changed_before_a_cast,
    _cast_changed,
    _input_changed_after_its_cast,
    _merged_heads,
    _repeated,
    _in_another_order,
    _cast_of_another_order,
    _columns,
    _negated,
    _of_double_precision,
    _beside_a_tensor_of_inference,
    _beside_a_sparse_tensor,
    _in_a_vmap,
    _changed_where_a_log_has_saved_it,
    _rectified,
    _of_two_values,
    _changed_between_layers,
    _added_to_between_layers,
    _another_result_of_the_same_node,
    _another_dropout,
    _dropped_twice,
    _dropped_in_place,
    _not_finite,
]


@pytest.mark.parametrize("form", HARD_FORMS, ids=lambda form: form.__name__[1:])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("precision", "bound"), [(8, 0.05), ("exact", 0.0)], ids=str)
def test_what_was_changed_is_not_taken_for_what_it_was(precision: object, bound: float, steps: int, form: Form) -> None:
    expected, found = _gradients(form)[0], _gradients(form, precision, steps)[0]
    if bound:
        assert all(torch.equal(a.isfinite(), b.isfinite()) for a, b in zip(found, expected, strict=True))
        found, expected = ([each.nan_to_num(0, 0, 0) for each in gradients] for gradients in (found, expected))
        assert _worst(found, expected) < bound
    else:
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("form", [_columns, _merged_heads], ids=lambda form: form.__name__[1:])
@pytest.mark.parametrize("precision", [8, "auto"])
def test_audits_measure_what_keeps_its_values(precision: object, form: Form) -> None:
    model = Model()
    engine = ActivationEngine(model, DAFConfig.from_dict({"precision": precision}))
    for _ in range(2):  # before the first pass nothing is measured
        with torch.autocast("cpu", torch.bfloat16):
            measured = engine.audit(lambda: model.loss(form))
            with engine.compress():
                loss = model.loss(form)
        loss.backward()
        engine.finish_step()
    assert measured is not None
    assert measured.error < 0.2


def test_a_write_that_no_version_tells_is_found_in_exact_mode() -> None:
    def form(model: Model) -> Tensor:
        def make(x: Tensor) -> Tensor:
            dropped = _dropped(x)
            dropped.data[:, 3] *= 3
            return dropped

        wide = model.begin()
        x = F.silu(wide) * (wide * 2)
        return model.adapted(x, make)

    assert all(map(torch.equal, _gradients(form, "exact")[0], _gradients(form)[0]))


def test_what_is_too_small_for_codes_keeps_its_values() -> None:
    """Codes of a wider argument would take as many bytes as the tensor."""

    def form(model: Model) -> Tensor:
        x = model.begin()[:16] * 1
        with torch.autocast("cpu", torch.bfloat16):
            return model.adapted(x, lambda x: x)

    found, held = _gradients(form, 8)
    with pytest.MonkeyPatch.context() as patch:
        _without_arguments(patch)
        each, held_of_each = _gradients(form, 8)
    assert held <= held_of_each
    assert all(map(torch.equal, found, each))


def test_a_budget_is_kept() -> None:
    model = Model()
    engine = ActivationEngine(model, DAFConfig(precision=8, memory_budget="128 KiB"))
    for _ in range(3):
        with engine.compress():
            loss = model.loss(FORMS["dropped"])
        assert engine.held_bytes <= 128 << 10
        loss.backward()
        engine.finish_step()
