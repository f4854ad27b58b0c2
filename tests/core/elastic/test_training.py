"""Elastic training of small models."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from daf_core.errors import StateError
from tests.core.elastic.runs import DecoderFirst, Run, checkpoint, deep_gpt2, depth_of, make, trained
from tests.core.plan import nets

KINDS = ["gpt2", "llama", "roberta", "bart", "t5"]


@pytest.mark.parametrize(
    ("kind", "adapters"),
    [*((kind, True) for kind in KINDS), *((kind, False) for kind in ("gpt2", "encoder", "resnet"))],
)
def test_gradients_of_what_is_trained_are_those_of_plain_training(kind: str, adapters: bool) -> None:
    model, batch, loss = make(kind, adapters)
    model.eval()  # no dropout
    loss(model, batch).backward()
    expected = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    run = Run(model, loss, optimizers=[torch.optim.SGD(trained(model), lr=0.0)], time=0.85)
    compared: set[frozenset[str]] = set()

    def compare(*_: object) -> None:
        assert run.training._choice is not None
        units = run.training._learned.units
        on = [*units.always, *(each for number in run.training._choice.on for each in units.units[number].parameters)]
        known = set(map(id, on))
        found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        assert compared == set() or found.keys() == {n for n in expected if id(model.get_parameter(n)) in known}
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name])
        compared.add(frozenset(found))

    run.optimizers[0].register_step_pre_hook(compare)
    run.steps(10, batch)
    assert len(compared) >= 2
    run.close()


@pytest.mark.parametrize("kind", [*KINDS, "encoder", "resnet"])
def test_models_that_are_trained_as_a_whole(kind: str) -> None:
    model, batch, loss = make(kind, adapters=False)
    before = [parameter.requires_grad for parameter in model.parameters()]
    run = Run(model, loss, precision=4, time=0.8)
    steps = run.steps(10, batch)
    assert max(step.elastic.depth for step in steps) == len(run.training._learned.units.blocks)
    assert len({step.names for step in steps}) >= 2
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    run.close()


@pytest.mark.parametrize("kind", KINDS)
def test_models_with_adapters(kind: str) -> None:
    model, batch, loss = make(kind)
    run = Run(model, loss, precision=4, time=0.85)
    steps = run.steps(12, batch)
    blocks = len(run.training._learned.units.blocks)
    assert {step.elastic.depth for step in steps} >= {steps[0].elastic.depth, blocks}
    assert steps[0].elastic.depth < blocks
    assert sum(step.elastic.share for step in steps[4:]) / 8 <= 0.86
    run.close()


def held_by_blocks(run: Run, batch: nets.Batch) -> list[int]:
    """Trains a step and returns the bytes that each block's activations hold."""
    levels: list[int] = []
    blocks = run.training._learned.units.blocks

    def note(*_: object) -> None:
        levels.append(run.engine.held_bytes)

    def watch() -> None:
        handles.extend(block.module.register_forward_pre_hook(note) for block in blocks)
        handles.append(blocks[-1].module.register_forward_hook(note))

    handles: list[Any] = []
    step = run.step(batch, aside=watch)
    for handle in handles:
        handle.remove()
    held = [after - before for before, after in pairwise(levels)]
    assert [each > 0 for each in held] == [number >= len(blocks) - step.elastic.depth for number in range(len(blocks))]
    return held


@pytest.mark.parametrize("precision", ["exact", 4])
@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "recomputed"])
def test_blocks_below_the_lowest_one_hold_nothing(precision: Any, checkpoints: bool) -> None:
    model = deep_gpt2(6)
    if checkpoints:
        checkpoint(model, use_reentrant=False)
        assert model.get_input_embeddings()._forward_hooks  # transformers has the input require a gradient
    run = Run(model, nets._tokens, precision=precision, time=0.75)
    # Inputs of blocks take more than 16 kB: what is smaller counts as held until the last of its pass is let go.
    found = [held_by_blocks(run, nets.tokens(8)) for _ in range(12)]
    assert {sum(size > 0 for size in held) for held in found} >= {1, 6}
    run.close()


@pytest.mark.parametrize("memory", [0.3, 0.6])
def test_a_share_of_memory_is_kept_in_each_step(memory: float) -> None:
    run = Run(deep_gpt2(8), nets._tokens, precision=4, time=0.99)
    whole = max(step.held for step in run.steps(3, nets.tokens(4)))
    run.close()
    run = Run(deep_gpt2(8), nets._tokens, precision=4, memory=memory, refresh=4)
    steps = run.steps(12, nets.tokens(4))
    assert max(step.held for step in steps) <= memory * whole
    assert max(step.held for step in steps) > (memory - 1 / 8) * whole
    assert len({step.names for step in steps[2:]}) == 1
    run.close()


def test_micro_batches() -> None:
    """Several passes make a step, in all of which the same is trained."""
    model = deep_gpt2(4)
    run = Run(model, nets._tokens, time=0.75)
    batches = [nets.tokens(2, seed=seed) for seed in range(3)]
    for _ in range(10):
        step = run.step(*batches)
        assert depth_of(step) == step.elastic.depth
    assert run.training._learned.schedule.is_planned
    run.close()


def test_blocks_that_run_in_another_order_than_they_are_registered() -> None:
    _, batch, loss = make("encoder", adapters=False)
    model = DecoderFirst()
    run = Run(model, loss, time=0.75)
    first = run.step(batch)
    assert all(name.startswith("earlier.1.") for name in first.names)
    assert first.elastic.depth == 3
    assert max(step.elastic.depth for step in run.steps(8, batch)) == 4
    assert min(step.elastic.depth for step in run.steps(8, batch)) < 4
    run.close()


def test_memory_is_kept_where_the_order_was_not_known() -> None:
    _, batch, loss = make("encoder", adapters=False)
    run = Run(DecoderFirst(), loss, memory=0.6)
    assert [step.elastic.depth for step in run.steps(8, batch)][1:] == [1] + [2] * 6
    run.close()


def test_a_head_that_was_registered_before_it_is_used() -> None:
    """BART's decoder has a normalization before its blocks that is registered after them."""
    model, batch, loss = make("bart", adapters=False)
    run = Run(model, loss, time=0.8)
    assert run.step(batch).elastic.depth == 2
    assert max(step.elastic.depth for step in run.steps(4, batch)) == 4
    run.close()


def test_what_runs_apart_is_no_part_of_a_step() -> None:
    """An audit runs in each step, with other rows and a graph through all blocks."""
    model = deep_gpt2(4)
    run, alone = Run(model, nets._tokens, time=0.75), Run(deep_gpt2(4), nets._tokens, time=0.75)

    def audit() -> None:
        with run.training.apart():
            model(inputs_embeds=torch.randn(1, 8, 32, requires_grad=True)).logits.sum().backward()
            model.zero_grad()

    batch = nets.tokens(2)
    steps = [(run.step(batch, aside=audit).elastic, alone.step(batch).elastic) for _ in range(12)]
    assert [one.depth for one, _ in steps] == [other.depth for _, other in steps]
    assert {one.depth for one, _ in steps} >= {1, 4}
    run.close()
    alone.close()


def test_what_measures_everything_in_the_first_step() -> None:
    model = deep_gpt2(4)
    run = Run(model, nets._tokens, time=0.75)
    seen: list[int] = []

    def measure() -> None:
        with run.training.everything():
            seen.append(len(trained(model)))
            nets._tokens(model, nets.tokens(2)).backward()
        seen.append(len(trained(model)))
        model.zero_grad()

    step = run.step(nets.tokens(2), aside=measure)
    assert seen == [16, 4]
    assert step.elastic.depth == 1
    assert len(step.names) == 4
    assert run.step(nets.tokens(2), aside=measure).elastic.depth == 4
    with run.training.everything():
        assert len(trained(model)) == 16
    run.close()


def test_several_optimizers() -> None:
    """What the first one has moved counts too."""
    model = deep_gpt2(4)
    parts = [[each for name, each in model.named_parameters() if each.requires_grad and kind in name] for kind in "AB"]
    run = Run(model, nets._tokens, optimizers=[torch.optim.SGD(part, lr=0.1) for part in parts], time=0.75)
    run.steps(2, nets.tokens(2))
    found: list[list[float]] = []
    finish = run.training._learned.schedule.finish

    def note(choice: Any, times: Any, gains: Any) -> bool:
        found.append(gains)
        return finish(choice, times, gains)

    run.training._learned.schedule.finish = note
    gradient = [0.0] * 4

    def measure(*_: object) -> None:
        for number, unit in enumerate(run.training._learned.units.units):
            gradient[number] = sum(0.1 * float(each.grad.square().sum()) for each in unit.parameters)

    run.optimizers[0].register_step_pre_hook(measure)
    run.step(nets.tokens(2))
    assert found[0] == pytest.approx(gradient, rel=1e-4)
    run.close()


@pytest.mark.parametrize("steps", [0, 2, 5, 9])
def test_state_goes_on_with_the_same_choices(steps: int) -> None:
    """Trainers write keys in their order, so that it may not matter; a deep model has blocks 2 and 10."""

    def run_of(model: nn.Module) -> Run:
        return Run(model, nets._tokens, time=0.75, refresh=5)

    first = run_of(deep_gpt2(11, dropout=0.0))
    first.steps(steps, nets.tokens(2))
    state = json.loads(json.dumps(first.training.state(), sort_keys=True))
    other = run_of(deep_gpt2(11, dropout=0.0))
    other.model.load_state_dict(first.model.state_dict())
    other.optimizers[0].load_state_dict(copy.deepcopy(first.optimizers[0].state_dict()))
    other.training.load(state)
    assert other.training._learned.units.units[0].name == "base_model.model.transformer.h.10"
    for _ in range(12):
        one, two = first.step(nets.tokens(2)), other.step(nets.tokens(2))
        assert (one.names, one.elastic) == (two.names, two.elastic)
    assert other.training.state() == first.training.state()
    first.close()
    other.close()


@pytest.mark.parametrize("wrong", [None, [], {}, {"calls": [["h", 1]]}, {"calls": 3, "idle": {}, "course": {}}])
def test_what_is_no_state(wrong: Any) -> None:
    run = Run(deep_gpt2(2), nets._tokens, time=0.75)
    with pytest.raises(StateError, match="no saved state of elastic training of this model"):
        run.training.load(wrong)
    run.close()


def test_state_of_another_model() -> None:
    run, other = (Run(deep_gpt2(layers), nets._tokens, time=0.75) for layers in (2, 3))
    with pytest.raises(StateError, match="the model's units are others"):
        run.training.load(other.training.state())
    run.close()
    other.close()


def test_summaries() -> None:
    run = Run(deep_gpt2(4), nets._tokens, time=0.75)
    assert run.training.summary == "the best of 4 blocks, once it is known"
    run.steps(8, nets.tokens(2))
    assert " units in " in run.training.summary
    run.close()
    run = Run(deep_gpt2(4), nets._tokens, memory=0.5)
    run.steps(8, nets.tokens(2))
    assert run.training.summary == "1 of 4 blocks in every step"
    assert run.training.without_graph == frozenset()
    run.training.begin_step()
    assert run.training.without_graph == {f"base_model.model.transformer.h.{number}" for number in range(3)}
    run.close()


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_the_model_are_not_trained_elastically(make_copy: Callable[[nn.Module], nn.Module]) -> None:
    """Made at any time, as for an average of weights."""
    model, batch, loss = make("encoder", adapters=False)
    run = Run(model, loss, time=0.8)
    copies: list[nn.Module] = []
    run.optimizers[0].register_step_pre_hook(lambda *_: copies.append(make_copy(model)))
    run.steps(5, batch)
    copies.append(make_copy(model))
    pair = run.training._learned.schedule.pair
    run.training.begin_step()
    for each in copies:
        each.requires_grad_(True)
        with run.training.holding():
            loss(each, batch).backward()
        assert all(parameter.grad is not None for parameter in each.parameters())
    assert run.training._learned.schedule.pair == pair
    run.close()


def test_forward_passes_of_others_train_everything() -> None:
    """A training may have ended in the middle of a step with an error that nobody told of."""
    model = deep_gpt2(4)
    run = Run(model, nets._tokens, time=0.75)
    run.training.begin_step()
    nets._tokens(model, nets.tokens(2)).backward()
    assert all(parameter.grad is not None for parameter in trained(model))
    assert len(trained(model)) == 16
    run.close()


def test_what_the_user_freezes_in_a_step_stays_frozen() -> None:
    """Between its beginning and the forward pass; what pays is then measured anew, without it."""
    model = deep_gpt2(4)
    run = Run(model, nets._tokens, time=0.75)
    run.steps(6, nets.tokens(2))
    frozen = [each for name, each in model.named_parameters() if ".h.1." in name and each.requires_grad]

    def freeze() -> None:
        for parameter in frozen:
            parameter.requires_grad_(False)

    run.step(nets.tokens(2), aside=freeze)
    for step in run.steps(8, nets.tokens(2)):
        assert not any(".h.1." in name for name in step.names)
    assert not any(parameter.requires_grad for parameter in frozen)
    assert len(run.training._learned.units.units) == 3
    for parameter in frozen:
        parameter.requires_grad_(True)
    run.step(nets.tokens(2))
    assert len(run.training._learned.units.units) == 4
    run.close()


def test_gains_are_known_where_an_optimizer_lacks_something() -> None:
    """A head that nobody updates has a gradient all the same."""
    model, batch, loss = make("roberta")
    optimizer = torch.optim.SGD([each for name, each in model.named_parameters() if "lora" in name], lr=0.1)
    run = Run(model, loss, optimizers=[optimizer], time=0.8)
    for _ in range(8):
        run.training.begin_step()
        with run.training.holding(), run.engine.compress():
            result = loss(model, batch)
        result.backward()
        run.training.before_update([optimizer])
        optimizer.step()
        assert run.training.finish_step() is None
        assert len(trained(model)) == len(run.training._learned.trained)
        optimizer.zero_grad()
        run.training.finish_stepped()
    gains = run.training._learned.schedule._gains
    assert gains is not None
    assert all(gain > 0 for gain in gains)
    run.close()


def test_steps_that_cannot_be_timed_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Once: as where forward passes run inside of a backward pass, which trains everything."""
    model = deep_gpt2(4)
    run = Run(model, nets._tokens, time=0.75)
    start = torch.zeros((), requires_grad=True)

    def loss_in_backward(_model: nn.Module, batch: nets.Batch) -> torch.Tensor:
        result = start * 1

        def forward(_gradient: torch.Tensor) -> None:
            with torch.enable_grad():
                nets._tokens(model, batch).backward()

        result.register_hook(forward)
        return result

    run.loss = loss_in_backward
    first, *others = run.steps(8, nets.tokens(2))
    assert len(first.names) == 4
    assert all(len(step.names) == 16 for step in others)
    assert [message for message in caplog.messages if "saves nothing" in message] == [
        "elastic training saves nothing: 5 steps in a row could not be timed, as the model's forward passes run inside "
        "of backward passes (as in gradient caching), or where DAF does not see them"
    ]
    run.close()


def test_what_takes_turns_is_known_in_each() -> None:
    """As adapters of two tasks: each set of parameters has a course of its own."""
    model = deep_gpt2(4)
    run = Run(model, nets._tokens, time=0.75)
    halves = [[each for name, each in model.named_parameters() if each.requires_grad and kind in name] for kind in "AB"]
    for _ in range(10):
        for on, off in (halves, halves[::-1]):
            for parameter in [*on, *off]:
                parameter.requires_grad_(any(parameter is each for each in on))
            run.step(nets.tokens(2))
            assert run.training._learned.trained == [each for each in model.parameters() if each.requires_grad]
    assert len(run.training._others) == 3
    assert run.training._learned.schedule.is_planned
    run.close()


def test_nothing_is_chosen_where_a_head_alone_is_trained() -> None:
    """Until the user unfreezes more."""
    model, batch, loss = make("roberta")
    run = Run(model, loss, time=0.8)
    lower = [each for name, each in model.named_parameters() if "lora" in name]
    for parameter in lower:
        parameter.requires_grad_(False)
    run.training.begin_step()
    assert run.training._choice is None
    with run.training.holding():
        loss(model, batch).backward()
    run.training.before_update(run.optimizers)
    assert run.training.finish_step() is None
    for parameter in lower:
        parameter.requires_grad_(True)
    assert len(run.steps(6, batch)) == 6
    run.close()


def _shorten(layers: nn.ModuleList) -> None:
    del layers[0]


def _replace(layers: nn.ModuleList) -> None:
    layers[1] = copy.deepcopy(layers[1])


@pytest.mark.parametrize("change", [_shorten, _replace])
@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_blocks_that_are_taken_out_or_replaced(
    change: Callable[[nn.ModuleList], None], steps: int, is_frozen: bool
) -> None:
    """The step after that raised a KeyError; an ElasticError where they were frozen."""
    model = deep_gpt2(5)
    [layers] = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for block in layers[:2] if is_frozen else ():
        block.requires_grad_(False)
    run = Run(model, nets._tokens, time=0.75)
    run.steps(steps, nets.tokens(2))
    change(layers)
    run.optimizers = [torch.optim.AdamW(trained(model), 1e-3)]
    assert len({step.names for step in run.steps(10, nets.tokens(2))}) >= 2
    assert [block.module for block in run.training._learned.units.blocks] == [*layers]
    assert run.training._learned.schedule.is_planned
    assert not run.training._others
    run.close()


def test_nothing_is_chosen_where_one_block_is_left() -> None:
    model = deep_gpt2(3)
    run = Run(model, nets._tokens, time=0.75)
    run.steps(3, nets.tokens(2))
    [layers] = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    del layers[1:]
    for _ in range(2):
        run.training.begin_step()
        assert run.training._choice is None
    run.close()
