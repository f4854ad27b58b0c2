"""Measuring a step takes memory itself: where that runs out, fewer rows are measured."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from daf_core import DAFConfig, ProfileError
from daf_core.autograd.torch_private import in_backward
from daf_core.model.layer_drop import all_layers
from daf_core.plan.cost.measure import measure
from daf_core.plan.cost.profile import Profile
from daf_core.plan.policies import COMPRESS, KEEP
from daf_core.plan.run.runner import described
from tests.core.harness import normal
from tests.core.plan import nets
from tests.core.plan.nets import takes_caches


def measured(most: int, error: Exception) -> tuple[Profile, list[int]]:
    """Measures where no more rows than `most` have room; returns the profile, and the rows that were tried."""
    tried: list[int] = []
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def loss_of(rows: int) -> Tensor:
        tried.append(rows)
        held = model(normal(rows, 64, 64))
        if rows > most:
            raise error
        return held.sum()

    config = DAFConfig(precision=4, memory_budget="64MB")
    return measure(model, config, loss_of, rows=32, limit=1 << 30), list(dict.fromkeys(tried))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("can't start new thread")])
@pytest.mark.parametrize(("most", "rows"), [(32, [1, 16]), (5, [1, 16, 8, 4]), (1, [1, 16, 8, 4, 2])])
def test_fewer_rows_are_measured_where_many_have_no_room(error: Exception, most: int, rows: list[int]) -> None:
    profile, tried = measured(most, error)
    assert tried == rows
    assert profile.at(4, 4).between.size > 0


def test_an_error_names_the_budget_where_one_row_has_no_room() -> None:
    with pytest.raises(ProfileError, match="measured, to plan for memory_budget=64000000"):
        measured(0, MemoryError())


@pytest.mark.parametrize(
    ("least", "rows"), [(2, [1, 2, 16]), (3, [1, 2, 4, 16]), (32, [1, 2, 4, 8, 16, 32]), (33, [1, 2, 4, 8, 16, 32])]
)
def test_more_rows_are_measured_where_few_have_no_loss(least: int, rows: list[int]) -> None:
    """As those of pairs, of which each is two rows."""
    tried: list[int] = []
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def loss_of(count: int) -> Tensor:
        tried.append(count)
        if count < least:
            raise ProfileError(f"{count} rows have no loss")
        return model(normal(count, 64, 64)).sum()

    config = DAFConfig(precision=4, memory_budget="64MB")
    if least > 32:
        with pytest.raises(ProfileError, match="32 rows have no loss"):
            measure(model, config, loss_of, rows=32, limit=1 << 30)
    else:
        assert measure(model, config, loss_of, rows=32, limit=1 << 30).at(4, 4).between.size > 0
    assert list(dict.fromkeys(tried)) == rows


@pytest.mark.parametrize("limit", [1 << 22, 1 << 30])
def test_a_loss_of_one_row_or_all_is_measured_with_all(limit: int) -> None:
    """Noise of the batch's size broadcasts with one row: a step was taken for one of as many times its size."""
    tried: list[int] = []
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def loss_of(rows: int) -> Tensor:
        tried.append(rows)
        try:
            return (model(normal(rows, 64)) - normal(512, 64)).square().mean()
        except RuntimeError as error:
            raise ProfileError("so many rows have no loss") from error

    profile = measure(model, DAFConfig(precision=4, memory_budget="64MB"), loss_of, rows=512, limit=limit)
    assert tried[0] == 1
    assert tried[-1] == 512
    assert profile.observed_peak(512) < 4 * profile.observed_peak(1)


def test_gradients_of_a_head_beside_the_model_are_left_alone() -> None:
    model, head = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), nn.Linear(64, 1)
    head.weight.grad = torch.ones(1, 64)
    hooks: list[Tensor] = []
    head.bias.register_post_accumulate_grad_hook(hooks.append)
    config = DAFConfig(precision=4, memory_budget="64MB")
    measure(model, config, lambda count: head(model(normal(count, 64, 64))).sum(), rows=32, limit=1 << 30)
    assert torch.equal(head.weight.grad, torch.ones(1, 64))
    assert head.bias.grad is None
    assert hooks == []


@takes_caches
@pytest.mark.parametrize("rows", [1, 4])
def test_a_cache_that_outlives_a_pass_is_refused(rows: int) -> None:
    """Each pass that is measured would add to it; one that the loss makes is read as it is."""
    model, batch, _ = nets.make("llama", rows)

    def past(part: nets.Batch) -> DynamicCache:
        with torch.no_grad():
            return model(part["input_ids"][:, :8], use_cache=True).past_key_values

    config = DAFConfig(precision=4, memory_budget="64MB")
    made = described(model, batch, lambda part: model(**part, past_key_values=past(part)).loss)
    assert measure(model, config, made.loss_of, rows, limit=1 << 30).blocks
    lasting = past(batch)
    given = described(model, batch, lambda part: model(**part, past_key_values=lasting).loss)
    with pytest.raises(ProfileError, match="DynamicCache that was there before"):
        measure(model, config, given.loss_of, rows, limit=1 << 30)


def test_other_errors_are_passed_on() -> None:
    with pytest.raises(RuntimeError, match="sizes do not match"):
        measured(4, RuntimeError("sizes do not match"))


@pytest.mark.parametrize("fails", [False, True])
def test_layers_that_are_skipped_at_random_are_measured(fails: bool) -> None:
    """As if they ran in each step: a step in which all of them run must keep its budget, too."""
    model, batch, loss = nets.make("bart")
    encoder, decoder = model.model.encoder, model.model.decoder
    decoder.config = copy.deepcopy(decoder.config)

    def loss_of(rows: int) -> Tensor:
        if fails:
            raise ProfileError("no loss")
        return loss(model, {name: tensor[:rows] for name, tensor in batch.items()})

    def peak() -> int:
        config = DAFConfig(precision="exact", memory_budget="64MB")
        return measure(model, config, loss_of, rows=8, limit=1 << 30).observed_peak(8)

    all_run = 0 if fails else peak()
    encoder.layerdrop = decoder.config.decoder_layerdrop = 0.999
    decoder.layerdrop = 0.999
    if fails:
        with pytest.raises(ProfileError, match="no loss"):
            peak()
    else:
        assert peak() == all_run
    assert encoder.layerdrop == decoder.layerdrop == decoder.config.decoder_layerdrop == 0.999


@dataclass(frozen=True)
class Frozen:
    """A configuration that cannot be changed."""

    layerdrop: float = 0.5


class OfClass(nn.Linear):
    """Has the share as an attribute of its class."""

    layerdrop = 0.5


class Computed(nn.Linear):
    """Has the share as a property."""

    @property
    def layerdrop(self) -> float:
        return 0.5


def test_shares_of_skipped_layers_come_back_or_stay() -> None:
    frozen, of_class, computed, own = nn.Linear(1, 1), OfClass(1, 1), Computed(1, 1), nn.Linear(1, 1)
    frozen.config, own.layerdrop = Frozen(), 0.25
    with suppress(KeyError), all_layers(nn.ModuleList([frozen, of_class, computed, own])):
        assert (frozen.config.layerdrop, of_class.layerdrop, computed.layerdrop, own.layerdrop) == (0.5, 0, 0.5, 0)
        raise KeyError
    assert (of_class.layerdrop, own.layerdrop) == (0.5, 0.25)
    assert "layerdrop" not in vars(of_class)


def test_blocks_that_save_something_else_when_they_run_again_in_backward() -> None:
    """As by chance, where they draw from a generator that is a global."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return 2 * x if in_backward() else self.second(self.first(x).tanh())

    model, x = nn.Sequential(*(Skipping() for _ in range(4))), normal(8, 64).requires_grad_()

    def loss_of(rows: int) -> Tensor:
        return model(x[:rows]).square().sum()

    profile = measure(model, DAFConfig(precision="exact", memory_budget="64MB"), loss_of, rows=8, limit=1 << 30)
    assert profile.unlike == ["0", "1", "2", "3"]
    assert x.grad is None


class Branching(nn.Module):
    """A layer with two results, of which the second is read by the next layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x + side).tanh(), self.second(side).exp().sin().cos().sin()


class Branches(nn.Module):
    """Lets go of the last layer's second result, which nobody needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Branching() for _ in range(3))
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        side = x
        for layer in self.layers:
            x, side = layer(x, side)
        del side
        return self.head(x).exp().square().sum()


def test_what_blocks_hold_in_vain_is_not_missing_outside() -> None:
    model, x = Branches(), normal(256, 64)  # larger than what is counted together
    profile = measure(
        model,
        DAFConfig(precision="exact", memory_budget="64MB"),
        lambda rows: model(x[:rows]),
        rows=256,
        limit=1 << 30,
    )
    outside = {policy: profile.at(256, None)[policy].held[0] for policy in (KEEP, COMPRESS)}
    assert outside[KEEP] == x.nbytes  # the result of exp; the last layer has its own
    assert outside[COMPRESS] == pytest.approx(
        2 * x.nbytes, rel=0.1
    )  # and its input, where the last layer is recomputed
