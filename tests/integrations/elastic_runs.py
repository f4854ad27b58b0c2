"""Elastic runs: small models of several blocks, a clock that counts, and what each step trained."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
)
from typing_extensions import override

from daf_core import timing
from daf_core.autograd.torch_private import in_backward
from tests.integrations.hf_runs import LENGTH, VOCABULARY, roberta

BLOCKS = 4
TIME = 0.6
ELASTIC: dict[str, Any] = {"precision": "exact", "elastic": {"time": TIME, "refresh": 10}}
STEPS = 16
"""The four of the beginning, those that are measured, and some in which two sets take turns."""

BACKWARD = 4.0
"""Seconds of each phase in backward; one elsewhere."""


class CountingClock:
    """Has each phase of a pass take as long on every machine."""

    def __init__(self, backward: float = BACKWARD) -> None:
        self._now, self._backward = 0.0, backward

    def __call__(self) -> float:
        self._now += self._backward if in_backward() else 1.0
        return self._now


def count_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has what a step trains follow from a clock that counts how often it is read."""
    monkeypatch.setattr(timing, "synchronized_time", CountingClock())


def classifier(dropout: float = 0.0) -> nn.Module:
    """Has adapters, and a head that every step trains."""
    model = roberta(dropout, BLOCKS, width=32)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS"))


def whole(blocks: int = BLOCKS) -> nn.Module:
    """Is trained as a whole, without dropout."""
    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    shape = {"n_embd": 32, "n_layer": blocks, "n_head": 2, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **shape, **none, **tokens))


def adapters(blocks: int = BLOCKS) -> nn.Module:
    """Has adapters, of which every step trains those of the last block at least."""
    return peft.get_peft_model(
        whole(blocks),
        peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    )


def trained(model: nn.Module) -> frozenset[str]:
    """Returns the names of the parameters that require a gradient."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def with_gradient(model: nn.Module) -> frozenset[str]:
    """Returns the names of the parameters that have a gradient: after backward, those that the step trains."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.grad is not None)


class Watched(TrainerCallback):
    """Notes what each step of a Trainer trains, and what it changes."""

    def __init__(self) -> None:
        self.trained: list[frozenset[str]] = []
        self.changed: list[frozenset[str]] = []
        self.evaluated: list[frozenset[str]] = []
        self._in_step: set[frozenset[str]] = set()
        self._before: dict[str, Tensor] = {}

    @override
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._in_step.add(with_gradient(kwargs["model"]))

    @override
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = with_gradient(kwargs["model"])
        assert self._in_step <= {now}, "what is trained has changed within an optimizer step"
        self._in_step.clear()
        self.trained.append(now)
        self._before = {name: value.detach().clone() for name, value in kwargs["model"].named_parameters()}

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parameters = kwargs["model"].named_parameters()
        self.changed.append(frozenset(name for name, value in parameters if not torch.equal(value, self._before[name])))

    @override
    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluated.append(trained(kwargs["model"]))
