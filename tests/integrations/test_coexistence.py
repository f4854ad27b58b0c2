"""Other libraries' adapters, weights and saved-tensor hooks beside DAF: each works as without it, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import Trainer

from daf_core import HooksActiveError
from daf_core.autograd.torch_private import innermost_hooks
from daf_integrations import DAFCallback
from tests.integrations.hf_runs import (
    MakeModel,
    MakeTrainer,
    differing,
    last_step,
    left_behind,
    losses,
    roberta,
    run,
    weights,
)


def dora() -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS", use_dora=True)
    return peft.get_peft_model(roberta(), config)


def ia3() -> nn.Module:
    modules = ["key", "value", "output.dense"]
    return peft.get_peft_model(
        roberta(), peft.IA3Config(target_modules=modules, feedforward_modules=["output.dense"], task_type="SEQ_CLS")
    )


def with_whole_modules() -> nn.Module:
    config = peft.LoraConfig(
        r=4, target_modules=["query"], modules_to_save=["classifier", "intermediate.dense"], task_type="SEQ_CLS"
    )
    return peft.get_peft_model(roberta(), config)


class Coded(Tensor):
    """A frozen weight in eight bits that is decoded where an operator takes it, as libraries of quantized models do."""

    codes: Tensor
    step: Tensor

    @staticmethod
    def __new__(cls, weight: Tensor) -> Coded:
        return Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight: Tensor) -> None:
        self.step = weight.abs().max() / 127
        self.codes = (weight / self.step).round().to(torch.int8)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        plain = torch.utils._pytree.tree_map_only(cls, lambda coded: coded.codes * coded.step, args)
        return func(*plain, **(kwargs or {}))


def coded() -> nn.Module:
    model = peft.get_peft_model(roberta(), peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS"))
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.requires_grad:
            module.weight = nn.Parameter(Coded(module.weight.detach()), requires_grad=False)
    return model


@pytest.mark.parametrize("model", [dora, ia3, with_whole_modules, coded])
def test_adapters_and_weights(make_trainer: MakeTrainer, model: MakeModel) -> None:
    plain, exact, four = make_trainer(model=model()), DAFCallback(precision="exact"), DAFCallback(precision=4)
    same, close = make_trainer(exact, model=model()), make_trainer(four, model=model())
    for trainer in (plain, same, close):
        run(trainer)
    assert losses(same) == losses(plain)
    assert differing(trained(same), trained(plain)) == []
    assert losses(close) == pytest.approx(losses(plain), rel=0.02)
    assert last_step(four).ratio > 4
    assert left_behind(close) == []


def trained(trainer: Trainer) -> dict[str, Tensor]:
    return {name: values.detach() for name, values in trainer.model.named_parameters() if values.requires_grad}


class OffloadsSteps(Trainer):
    """Enters hooks of its own around the whole training step, as trainers that offload activations do."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with save_on_cpu():
            return super().training_step(*args, **kwargs)


def test_hooks_around_the_training_step_are_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(DAFCallback(), trainer=OffloadsSteps)
    with pytest.raises(HooksActiveError, match=r"torch\.autograd\.graph .*Leave the other scope first"):
        run(trainer)
    assert innermost_hooks() is None


def test_hooks_inside_keep_what_they_save(make_trainer: MakeTrainer) -> None:
    """Torch applies the innermost pair alone, so a block with hooks of its own is not compressed."""
    callbacks = [DAFCallback(precision="exact") for _ in range(2)]
    plain, whole, own = (make_trainer(*each, model=roberta()) for each in ([], callbacks[:1], callbacks[1:]))
    for trainer in (plain, own):
        block = trainer.model.roberta.encoder.layer[0]
        block.forward = offloading(block.forward)
    for trainer in (plain, whole, own):
        run(trainer)
    assert differing(weights(own), weights(plain)) == []
    assert 0.4 < last_step(callbacks[1]).raw_bytes / last_step(callbacks[0]).raw_bytes < 0.8


def offloading(forward: Callable[..., Any]) -> Callable[..., Any]:
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu():
            return forward(*args, **kwargs)

    return offloaded
