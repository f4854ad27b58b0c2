"""Models that cannot be trained elastically are refused before training, with what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from daf_core import ActivationEngine, ConfigError, DAFConfig
from daf_core.config import ElasticConfig
from daf_core.elastic.training import ElasticTraining
from daf_core.elastic.units import Units
from daf_core.model.blocks import layers_of
from daf_core.unsupported.elastic import ELASTIC, ELASTIC_OPTIMIZERS, ELASTIC_UNITS
from daf_core.unsupported.table import Context, check_supported
from tests.core.elastic.runs import Run, assumed_units, checkpoint, deep_gpt2, trained
from tests.core.plan import nets

BEGINNING = "^elastic training is not possible here: "


def check(model: nn.Module, outer: nn.Module | None = None) -> None:
    check_supported(ELASTIC, Context(model if outer is None else outer, blocks=len(layers_of(model))))


def refused(model: nn.Module, outer: nn.Module | None = None) -> str:
    with pytest.raises(ConfigError, match=BEGINNING) as raised:
        check(model, outer)
    return str(raised.value).partition(": ")[2]


def my_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False)


def replace(model: nn.Module, function: Callable[..., Any]) -> None:
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = function


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_is_not_refused() -> None:
    for model in (deep_gpt2(2), nets.make("gpt2")[0], nets.make("resnet")[0]):
        check(model)
        check_supported(ELASTIC_UNITS, assumed_units(model))


def test_checkpoints_of_the_other_kind_are_not_refused() -> None:
    model = deep_gpt2(2)
    checkpoint(model, use_reentrant=False)
    check(model)


def test_reentrant_checkpoints() -> None:
    model = deep_gpt2(2)
    checkpoint(model, use_reentrant=True)
    assert "recomputes in the reentrant way" in (said := refused(model))
    assert said.endswith('set gradient_checkpointing_kwargs={"use_reentrant": False}')


def test_checkpoints_that_are_reentrant_because_nothing_is_said() -> None:
    """Torch's function is where it is not told."""
    model = deep_gpt2(2)
    checkpoint(model, preserve_rng_state=False)
    assert "recomputes in the reentrant way" in refused(model)
    replace(model, torch_checkpoint)
    assert "recomputes in the reentrant way" in refused(model)
    replace(model, my_checkpoint)
    check(model)


def test_checkpoints_that_become_reentrant_before_the_first_step() -> None:
    model = deep_gpt2(2)
    run = Run(model, nets._tokens, time=0.8)
    checkpoint(model, use_reentrant=True)
    with pytest.raises(ConfigError, match="recomputes in the reentrant way"):
        run.step(nets.tokens(2))
    run.close()


def test_layers_that_are_skipped_at_random() -> None:
    """Also in a part that has a configuration of its own."""
    model = nets.make("bart")[0]
    model.model.decoder.config = copy.deepcopy(model.config)
    check(model)
    model.model.decoder.config.decoder_layerdrop = 0.5
    assert refused(model).startswith("config.decoder_layerdrop=0.5 of BartDecoder skips layers at random")
    model.model.decoder.config.decoder_layerdrop = 0.0
    model.model.encoder.layerdrop = 0.25
    assert refused(model).startswith("layerdrop=0.25 of BartEncoder skips layers at random")


def test_optimizers_that_move_what_has_no_gradient() -> None:
    """Also in a trainer's wrapper; it is named before anything has moved."""
    model = deep_gpt2(2)
    optimizer = torch.optim.LBFGS(trained(model))
    run = Run(model, nets._tokens, optimizers=[optimizer], time=0.8)
    with pytest.raises(ConfigError, match="LBFGS moves what is not trained in a step"):
        run.step(nets.tokens(2))
    run.close()
    with pytest.raises(ConfigError, match="SimpleNamespace moves"):
        check_supported(ELASTIC_OPTIMIZERS, [SimpleNamespace(optimizer=optimizer)])
    check_supported(ELASTIC_OPTIMIZERS, [SimpleNamespace(optimizer=torch.optim.SGD(trained(model)))])


def test_a_compiled_model() -> None:
    model = deep_gpt2(2)
    assert "leave out torch.compile" in refused(model, torch.compile(model, backend="eager"))
    model.base_model.model.lm_head.compile(backend="eager")
    assert "Linear is compiled" in refused(model)


@pytest.mark.usefixtures("processes")
def test_distributed_data_parallel() -> None:
    model = deep_gpt2(2)
    with_all = DistributedDataParallel(model)
    assert "give it find_unused_parameters=True (TrainingArguments" in refused(model, with_all)
    static = DistributedDataParallel(model, static_graph=True)
    assert "DistributedDataParallel(static_graph=True) expects the same graph" in refused(model, static)
    check(model, DistributedDataParallel(model, find_unused_parameters=True))


@pytest.mark.usefixtures("processes")
def test_training_in_distributed_data_parallel() -> None:
    model = deep_gpt2(4)
    outer = DistributedDataParallel(model, find_unused_parameters=True)
    engine = ActivationEngine(model, DAFConfig(precision="exact"))
    training = ElasticTraining(model, outer, engine, ElasticConfig(time=0.75))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    depths: list[int] = []
    for _ in range(8):
        training.begin_step()
        with training.holding(), engine.compress():
            loss = nets._tokens(outer, nets.tokens(2))
        loss.backward()
        training.before_update([optimizer])
        optimizer.step()
        step = training.finish_step()
        optimizer.zero_grad()
        assert step is not None
        depths.append(step.depth)
    assert {1, 4} <= {*depths}
    training.close()
    engine.close()


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"])
def test_parameters_in_several_processes(name: str) -> None:
    model = deep_gpt2(2)
    kind = type(name, (nn.Sequential,), {})
    subclass = type("Mine", (kind,), {})
    assert f"{name} spreads each parameter over several processes" in refused(model, kind(model))
    assert "Mine spreads each parameter over several processes" in refused(model, subclass(model))


def test_sharded_tensors() -> None:
    model = deep_gpt2(2)
    next(model.parameters()).placements = ()
    assert "DTensor spreads" in refused(model)


@pytest.mark.parametrize(("model", "count"), [(nn.Linear(2, 2), 0), (nets.gpt2(1), 1)])
def test_too_few_blocks(model: nn.Module, count: int) -> None:
    assert refused(model).startswith(f"{type(model).__name__} has {count} blocks")


def units_with(model: nn.Module, *names: str) -> Units:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(each in name for each in names))
    return assumed_units(model)


@pytest.mark.parametrize("names", [("wpe",), ("ln_f",), ("h.1.mlp.c_fc.weight",), ("h.1.ln_2", "h.1.mlp.c_fc")])
def test_nothing_to_choose_from(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=rf"{BEGINNING}nothing is trained in blocks of the model, or in one alone"):
        check_supported(ELASTIC_UNITS, units_with(nets.gpt2(), *names))


@pytest.mark.parametrize("names", [("h.0.ln_1", "h.1.ln_1"), ("wpe", "h.1.ln_1"), ("h.1.ln_1", "ln_f")])
def test_something_to_choose_from(names: tuple[str, ...]) -> None:
    check_supported(ELASTIC_UNITS, units_with(nets.gpt2(), *names))


def test_a_model_that_is_refused_stays_as_it_is() -> None:
    model = nets.gpt2(1)
    model.enable_input_require_grads()
    hooks = [*model.get_input_embeddings()._forward_hooks.values()]
    engine = ActivationEngine(model, DAFConfig(precision="exact"))
    with pytest.raises(ConfigError):
        ElasticTraining(model, model, engine, ElasticConfig(time=0.5))
    engine.close()
    assert [*model.get_input_embeddings()._forward_hooks.values()] == hooks
    assert all(parameter.requires_grad for parameter in model.parameters())
