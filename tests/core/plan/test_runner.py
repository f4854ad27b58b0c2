"""Whole steps within a budget: gradients are those of a plain step, also where memory runs out."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from daf_core import ActivationEngine, DAFConfig
from daf_core.batch.rows import tensors_in
from daf_core.errors import PlanError, ProfileError
from daf_core.model.blocks import blocks_of
from daf_core.model.caches import watch_callers
from daf_core.plan.policies import RECOMPUTE, AppliedPolicies
from daf_core.plan.run.runner import StepRunner, described
from daf_core.plan.search.planner import Plan
from tests.core.harness import assert_same
from tests.core.plan import nets

MB = 1_000_000


class Training:
    """Steps of a model without dropout, and a fuse in them."""

    def __init__(self, name: str = "gpt2", rows: int = 8, loss: Any = None, around: Any = None, **options: Any) -> None:
        self.model, self.batch, self.loss = nets.make(name, rows)
        self.model = self.model if around is None else around(self.model)
        self.loss = loss or self.loss
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(getattr(module, "dropout", None), float):  # attention's
                module.dropout = 0.0
        config = DAFConfig(**{"memory_budget": 1000 * MB, "precision": "exact", "packing": "device", **options})
        self.engine = ActivationEngine(self.model, config)
        self.runner = StepRunner(self.model, self.model, self.engine, config)
        self.fails: list[str] = []
        self.plans: list[Plan] = []

    def run(self) -> list[Tensor]:
        """Runs a step; returns copies of the loss and the gradients."""
        loss = self.runner.run(self.batch, lambda part: self.loss(self.model, part), self._step)
        return [loss.clone(), *(p.grad.clone() for p in self.model.parameters() if p.grad is not None)]

    def _step(self, part: Any, weight: float, last: bool) -> Tensor:
        assert self.runner.plan is not None
        self.plans.append(self.runner.plan)
        place = self.fails.pop(0) if self.fails else ""
        with self.engine.compress(tensors_in(part)):
            loss = weight * self.loss(self.model, part)
            self._burn(place == "forward")
        first = next(self.model.parameters())
        handle = first.register_hook(lambda _: self._burn(place == "late"))
        try:
            loss.backward()
        finally:
            handle.remove()
        return loss.detach()

    def _burn(self, fails: bool) -> None:
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def tighten(self, times: int = 3, whole: str | None = None) -> None:
        """Has the next plan be a tight one."""
        self.run()
        for _ in range(times):
            if not self.runner.planner.tighten("the test says so"):
                break
            self.runner.planner.prepare(
                described(self.model, self.batch, lambda part: self.loss(self.model, part)), whole
            )
        self.model.zero_grad()
        self.plans.clear()


def plain(training: Training) -> list[Tensor]:
    model = copy.deepcopy(training.model)
    loss = training.loss(model, training.batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-8


@pytest.mark.parametrize("name", ["gpt2", "resnet", "encoder"])
def test_gradients_are_those_of_a_plain_step(name: str) -> None:
    training = Training(name)
    expected = plain(training)
    training.tighten(whole="batch norm" if name == "resnet" else None)
    assert_close(training.run(), expected)
    assert training.runner.plan is not None
    assert (training.runner.plan.parts > 1) == (name != "resnet")
    training.runner.close()


def _in_texts(model: nn.Module, batch: nets.Batch, given: bool) -> Tensor:
    """The loss of two texts, of which the second goes on from what a cache has of the first."""
    cache, losses = DynamicCache() if given else None, list[Tensor]()
    for part in batch["input_ids"].chunk(2, 1):
        output = model(part, labels=part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        losses.append(output.loss)
    return torch.stack(losses).sum()


class _Around(nn.Module):
    """Makes the cache itself, and calls the model inside with it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, **batch: Any) -> Any:
        return SimpleNamespace(loss=_in_texts(self.inner, batch, given=True))


@nets.takes_caches
@pytest.mark.parametrize("given", [True, False], ids=["given", "made by the model"])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_cache_that_a_later_call_reads_is_filled_by_layers_that_are_recomputed(
    name: str, given: bool, around: bool
) -> None:
    training = Training(name, rows=1, loss=partial(_in_texts, given=given))
    if around:
        training.runner.close()
        training.engine.close()
        training = Training(name, rows=1, loss=lambda model, batch: model(**batch).loss, around=_Around)
    expected = plain(training)
    training.run()
    training.runner.planner.applied.follow(dict.fromkeys(blocks_of(training.model), RECOMPUTE))
    training.model.zero_grad()
    loss = training.loss(training.model, training.batch)
    loss.backward()
    assert_close([loss.detach(), *(p.grad for p in training.model.parameters() if p.grad is not None)], expected)
    training.runner.close()
    training.engine.close()
    assert not any(module._forward_pre_hooks for module in training.model.modules())


@nets.takes_caches
def test_a_cache_that_is_read_for_the_first_time_says_so() -> None:
    """Where no pass was measured that reads it; an evaluation may read what it likes."""
    training = Training("llama", rows=1)
    training.run()
    training.runner.planner.applied.follow(dict.fromkeys(blocks_of(training.model), RECOMPUTE))
    with pytest.raises(ProfileError, match="run the step again"):
        _in_texts(training.model, training.batch, given=False)
    _in_texts(training.model, training.batch, given=False).backward()
    training.runner.close()


@nets.takes_caches
def test_a_cache_that_was_left_empty_is_refused_once() -> None:
    """Else measuring, which begins again where it is refused, would not end."""
    model, batch, _ = nets.make("llama", 1)
    blocks = blocks_of(model)
    watched = watch_callers(model, {block.module for block in blocks})
    applied = AppliedPolicies()
    applied.follow(dict.fromkeys(blocks, RECOMPUTE))
    cache = model(batch["input_ids"], use_cache=True).past_key_values
    with pytest.raises(ProfileError, match="have left it empty"):
        model(batch["input_ids"], past_key_values=cache)
    model(batch["input_ids"], past_key_values=cache)
    assert cache.get_seq_length() == batch["input_ids"].shape[1]
    watched.close()


class _Hybrid(nn.Module):
    """Hands a cache on, as layers do that hold a block which layers share."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(32, 32)

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        return self.shared(self.own(hidden), **kwargs)


@nets.takes_caches
def test_a_cache_that_layers_hand_on_is_the_models_own() -> None:
    """No earlier call has left it empty, but a layer before; where layers share one, they fill it instead."""
    model, batch, _ = nets.make("llama", 1)
    blocks = blocks_of(model)
    model.model.layers[1] = _Hybrid(model.model.layers[1])
    model.model.layers.append(_Hybrid(model.model.layers[1].shared))
    watched = watch_callers(model, {block.module for block in blocks})
    applied = AppliedPolicies()
    applied.follow(dict.fromkeys(blocks, RECOMPUTE))
    for attempt in range(2):
        try:
            model(batch["input_ids"], use_cache=True).logits.sum().backward()
            break
        except ProfileError:
            assert not attempt
    watched.close()


@nets.takes_caches
def test_a_cache_inside_of_another_is_somebodys_too() -> None:
    model, batch, _ = nets.make("t5", 2)
    cache = DynamicCache()
    blocks = blocks_of(model)
    watched = watch_callers(model, {block.module for block in blocks})
    applied = AppliedPolicies()
    applied.follow(dict.fromkeys(blocks, RECOMPUTE))
    model(**batch, past_key_values=cache, use_cache=True).loss.backward()
    assert cache.get_seq_length() > 0
    watched.close()


class Cache(dict[str, int]):
    """Has the name of a class of transformers."""


class _WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)])

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * cache["scale"]


def test_classes_of_others_are_no_caches() -> None:
    model = _WithCache()
    watched = watch_callers(model, set(model.layers))
    assert model(torch.ones(2, 4), Cache(scale=2)).requires_grad
    watched.close()


def test_gradients_that_were_there_are_added_to() -> None:
    training = Training()
    expected = plain(training)[1:]
    training.tighten()
    training.run()
    found = training.run()[1:]
    assert_close(found, [2 * gradient for gradient in expected])


@pytest.mark.parametrize(("place", "failures"), [("forward", 1), ("late", 2)])
def test_step_that_runs_out_of_memory_is_run_again(place: str, failures: int) -> None:
    training = Training()
    expected = plain(training)
    training.fails = [place] * failures
    assert_close(training.run(), expected)
    first, *_, last = training.plans
    assert last.forecast.peak_bytes < 0.8**failures * first.forecast.peak_bytes
    assert not training.fails


def test_whole_batch_that_is_run_again_is_bit_identical() -> None:
    training = Training("resnet")
    expected = plain(training)
    training.fails = ["late"]
    assert_same(training.run(), expected)
    assert {plan.parts for plan in training.plans} == {1}
    assert int(training.model.stages[0][0].norm_1.num_batches_tracked) == 1


def test_memory_that_never_suffices_is_the_first_error() -> None:
    training = Training("resnet")
    training.fails = ["forward"] * 50
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        training.run()
    assert all(p.grad is None for p in training.model.parameters())
    training.fails = []
    training.run()


def _contrastive(model: nn.Module, batch: nets.Batch) -> Tensor:
    rows = model(batch["x"]).flatten(1)
    return torch.cdist(rows, rows).exp().mean().log()


def test_batch_norms_keep_a_batch_whole() -> None:
    training = Training("resnet")
    training.run()
    training.runner.planner._available._most = 1000
    with pytest.raises(PlanError, match="BatchNorm2d"):
        training.run()


def test_contrastive_loss_keeps_a_batch_whole() -> None:
    training = Training("encoder", loss=_contrastive)
    expected = plain(training)
    training.tighten(1)
    assert_close(training.run(), expected)
    assert {plan.parts for plan in training.plans} == {1}


def test_batches_after_one_whose_rows_have_no_loss_are_cut() -> None:
    """A new padding has the law looked for again, where single rows of this batch have no loss."""

    def loss(model: nn.Module, batch: nets.Batch) -> Tensor:
        if not bool(batch["mask"].all()) and len(batch["mask"]) < 8:
            raise ValueError("not without the others")
        return nets._squares(model, batch)

    def made(budget: int) -> Training:
        training = Training("encoder", loss=loss, memory_budget=budget)
        training.batch["mask"] = torch.ones(8, dtype=torch.bool)
        return training

    with pytest.raises(PlanError) as error:
        made(1000).run()
    training = made(int(1.1 * error.value.least))
    good, bad = training.batch, {**training.batch, "mask": torch.arange(8) != 3}
    for _ in range(2):
        training.batch = bad
        with pytest.raises(PlanError, match="not without the others"):
            training.run()
        training.batch = good
        training.model.zero_grad()
        expected = plain(training)
        training.model.zero_grad()
        assert_close(training.run(), expected)
        assert training.plans[-1].parts > 1


def test_lack_of_a_plan_is_not_taken_for_lack_of_memory() -> None:
    training = Training(memory_budget=1000)
    with pytest.raises(PlanError):
        training.run()
    assert training.plans == []


def test_the_error_says_what_later_batches_of_a_step_take() -> None:
    """They copy the gradients of those before."""
    with pytest.raises(PlanError, match=r"at least .* if gradients of several batches add up") as first:
        Training(memory_budget=1000).run()
    least, copies = first.value.least, first.value.copies
    enough = Training(memory_budget=least + copies)
    for _ in range(2):
        enough.run()
    too_small = Training(memory_budget=least)
    too_small.run()
    with pytest.raises(PlanError) as second:
        too_small.run()
    assert (second.value.least, second.value.copies) == (least + copies, 0)
    assert "add up" not in str(second.value)


def test_loss_that_few_rows_do_not_have() -> None:
    """It is measured on all, and they stay together."""

    def loss(model: nn.Module, batch: nets.Batch) -> Tensor:
        assert len(batch["x"]) == 8, "eight rows"
        return nets._squares(model, batch)

    training = Training("encoder", loss=loss)
    expected = plain(training)
    training.tighten(1)
    assert_close(training.run(), expected)
    assert {plan.parts for plan in training.plans} == {1}


def test_loss_that_no_rows_have() -> None:
    def loss(model: nn.Module, batch: nets.Batch) -> Tensor:
        raise ValueError("no loss")

    with pytest.raises(ProfileError, match=r"8 of 8 rows.*no loss"):
        Training("encoder", loss=loss).run()


def test_step_leaves_random_numbers_and_statistics_of_its_own() -> None:
    training = Training(precision=4)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    training.run()
    assert torch.equal(torch.rand(3), expected)
    first = training.engine.finish_step()
    training.run()
    second = training.engine.finish_step()
    assert (first.raw_bytes, first.stored_as) == (second.raw_bytes, second.stored_as)


@pytest.mark.parametrize(
    ("batch", "rows", "length"),
    [
        ({"x": torch.zeros(6, 3, 4), "y": torch.zeros(6), "z": torch.zeros(2, 99)}, 6, 12),
        ((torch.zeros(5), torch.zeros(5)), 5, 1),
        ({"texts": ["a", "b"], "n": 3}, 1, 1),
        ([{"x": torch.zeros(4, 2)}, {"x": torch.zeros(4, 7)}], 4, 7),
        (torch.tensor(1.0), 1, 1),
        ({"x": torch.zeros(0, 5)}, 1, 1),
    ],
)
def test_rows_and_lengths_of_batches(batch: Any, rows: int, length: int) -> None:
    found = described(nn.Identity(), batch, lambda part: torch.zeros(()))
    assert (found.rows, found.length) == (rows, length)
    assert found.loss_of(rows) is not None


def test_closing_undoes_everything() -> None:
    training = Training()
    before = [set(vars(module)) for module in nets.make("gpt2")[0].modules()]
    training.tighten()
    training.runner.close()
    training.engine.close()
    assert [set(vars(module)) for module in training.model.modules()] == before
    training.loss(training.model, training.batch).backward()


def test_the_least_budget_is_that_of_a_loss_without_parts() -> None:
    """What is named first counts on micro-batches, which the loss does not have."""
    training = Training("encoder", rows=8, loss=_contrastive, memory_budget=1000)
    with pytest.raises(PlanError, match="no micro-batches") as info:
        training.run()
    enough = Training("encoder", rows=8, loss=_contrastive, memory_budget=info.value.least)
    assert_close(enough.run(), plain(enough))
    assert {plan.parts for plan in enough.plans} == {1}


IMAGE = nets.VOCABULARY - 1  # the token that stands for one


def _with_images(model: nn.Module, batch: nets.Batch) -> Tensor:
    """As a model does that looks for a row's images among those of all rows."""
    if int((batch["input_ids"] == IMAGE).sum()) != len(batch["images"]):
        raise ValueError("images and texts do not match")
    return model(input_ids=batch["input_ids"], labels=batch["labels"]).loss


def test_a_batch_whose_parts_do_not_belong_together_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which an earlier batch of the same tensors did not show. Any other error is the user's."""
    training = Training(loss=_with_images)
    ids = training.batch["input_ids"].clamp(max=IMAGE - 1)
    ids[:, 0] = IMAGE
    training.batch = {**training.batch, "input_ids": ids, "images": torch.zeros(8, 2)}
    training.tighten()
    training.run()
    assert training.plans[-1].parts > 1
    ids[1, 1], ids[2, 0] = IMAGE, 0
    expected, before = plain(training), [copy.deepcopy(p.grad) for p in training.model.parameters()]
    training.plans.clear()
    loss, *found = training.run()
    assert_close([loss], expected[:1])
    assert_close([one - other for one, other in zip(found, before, strict=True)], expected[1:])
    assert training.plans[-1].parts == 1
    reasons = list[str | None]()
    prepare = training.runner.planner.prepare

    def note(batch: Any, whole: str | None = None) -> Plan:
        reasons.append(whole)
        return prepare(batch, whole)

    monkeypatch.setattr(training.runner.planner, "prepare", note)
    ids[1, 1], ids[2, 0] = 0, IMAGE
    training.run()
    assert reasons == [None]  # it says nothing of other batches
    ids[0, 0] = 0
    with pytest.raises(ValueError, match="do not match"):
        training.run()
