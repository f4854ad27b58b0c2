"""Modules are set as they were before, and then as they were just now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daf_core.autograd.sites import ModuleFollower, ModuleScopes
from daf_core.model.module_hooks import CallHooks
from daf_core.snapshots.settings import LARGEST, Settings

Change = Callable[[Any], object]


class Layer(nn.Module):
    """Has an attribute of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.plain, self.names, self.scales, self.seen = 1, ["default"], {"default": 0.5}, {}
        self.table, self.mask, self.data = torch.zeros(2), None, [0] * (LARGEST + 1)


def _seen(model: Any) -> dict[str, Any]:
    """Returns what settings there are, as values."""
    attributes = {name: value for name, value in vars(model).items() if not isinstance(value, torch.Tensor)}
    plain = {name: repr(value) for name, value in attributes.items() if not name.startswith("_")}
    hooks = [*model.inner._forward_pre_hooks.values(), *model.inner._forward_hooks.values()]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    return {**plain, "hooks": hooks, "flags": flags, "mode": model.inner.training}


def _note(*_: object) -> None:
    """A hook of the user's."""


def _note_keywords(_module: object, _inputs: object, _keywords: object) -> None:
    """One that asks for keywords."""


CHANGES: dict[str, Change] = {
    "mode": lambda model: model.eval(),
    "number": lambda model: setattr(model, "plain", 2),
    "another list": lambda model: setattr(model, "names", ["other"]),
    "another dictionary": lambda model: setattr(model, "scales", {"default": 2.0}),
    "what was empty": lambda model: setattr(model, "seen", {"here": 1}),
    "nothing before": lambda model: setattr(model, "mask", [1]),
    "frozen": lambda model: model.inner.requires_grad_(False),
    "hook": lambda model: model.inner.register_forward_hook(_note, always_call=True),
    "hook with keywords": lambda model: model.inner.register_forward_pre_hook(_note_keywords, with_kwargs=True),
}


@pytest.mark.parametrize("first", [None, *CHANGES])
@pytest.mark.parametrize("name", CHANGES)
def test_settings_are_those_of_before_and_then_those_of_now(first: str | None, name: str) -> None:
    model = Layer()
    if first is not None:
        CHANGES[first](model)
    before = _seen(model)
    settings = Settings(model, set())
    settings.end_pass()
    CHANGES[name](model)
    now = _seen(model)
    for _ in range(2):
        with settings.again():
            assert _seen(model) == before
        assert _seen(model) == now
    model.inner(torch.ones(1, 2))


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_pass_writes_is_no_setting(name: str) -> None:
    """Nor is it in later passes."""
    model, written = Layer(), set[tuple[int, str]]()
    settings = Settings(model, written)
    CHANGES[name](model)
    settings.end_pass()
    now = _seen(model)
    with settings.again():
        assert _seen(model) == now
    later = Settings(model, written)
    model.inner.train()
    model.names, model.scales, model.seen, model.plain, model.mask = ["third"], {"third": 1}, {"third": 1}, 3, [3]
    model.inner.requires_grad_(True)
    model.inner._forward_hooks.clear()
    model.inner._forward_pre_hooks.clear()
    after = _seen(model)
    later.end_pass()
    with later.again():
        assert _seen(model) == after


def test_what_is_no_setting_stays() -> None:
    model = Layer()
    names, table, data, seen, mask = model.names, model.table, model.data, model.seen, torch.ones(2)
    settings = Settings(model, set())
    settings.end_pass()
    names.append("other")  # others may have the same list
    data.append(1)
    seen["state"] = model.mask = mask
    model.later = 1
    del model.plain
    with settings.again():
        assert model.names is names == ["default", "other"]
        assert model.table is table
        assert model.data is data
        assert model.seen == {"state": mask}
        assert model.mask is mask
        assert model.later == 1
        assert not hasattr(model, "plain")


def test_an_error_inside_puts_back_too() -> None:
    model = Layer()
    settings = Settings(model, set())
    model.plain = 2
    with pytest.raises(KeyError), settings.again():
        raise KeyError
    assert model.plain == 2


@pytest.mark.parametrize("on_before", [True, False])
def test_hooks_of_the_engine_stay_as_they_are(on_before: bool) -> None:
    model = Layer()
    calls, follower = CallHooks(), ModuleFollower(model, ModuleScopes())
    if on_before:
        calls.watch(model.inner, lambda _: None, lambda *_: None)
        follower.begin()
        follower.end()
    settings = Settings(model, set())
    calls.remove()
    follower.rest()
    if not on_before:
        calls.watch(model.inner, lambda _: None, lambda *_: None)
        follower.begin()
    now = _seen(model)
    assert len(now["hooks"]) == (0 if on_before else 4)
    with settings.again():
        assert _seen(model)["hooks"] == now["hooks"]
    assert _seen(model) == now


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_modules_of_torch_jit_are_left_alone() -> None:
    model = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), nn.Linear(2, 2))
    settings = Settings(model, set())
    model[1].requires_grad_(False)
    with settings.again():
        assert isinstance(model(torch.ones(1, 2)), Tensor)
        assert model[1].weight.requires_grad


def test_weights_that_are_no_leaves_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    settings = Settings(model, set())
    parameters = model._parameters
    parameters["weight"] = model.weight.detach()  # pyright: ignore[reportArgumentType] as FSDP's views are
    with settings.again():
        assert parameters["weight"] is not None
    assert not parameters["weight"].requires_grad
