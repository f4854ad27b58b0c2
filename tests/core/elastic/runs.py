"""What the tests of elastic training share: models with adapters, and training step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import peft
import torch
from torch import Tensor, nn

from daf_core import ActivationEngine, DAFConfig
from daf_core.config import ElasticConfig
from daf_core.elastic.call_order import ForwardTracer
from daf_core.elastic.schedule import ElasticStep
from daf_core.elastic.training import ElasticTraining
from daf_core.elastic.units import Units, registered_calls, units_of
from daf_core.model.blocks import layers_of
from tests.core.plan import nets

TARGETS: dict[str, dict[str, Any]] = {
    "gpt2": {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    "llama": {"target_modules": ["q_proj", "v_proj"]},
    "bart": {"target_modules": ["q_proj", "v_proj"]},
    "t5": {"target_modules": ["q", "v"]},
    "roberta": {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"},
}


def with_adapters(model: nn.Module, kind: str, **options: Any) -> nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(r=4, **TARGETS[kind] | options))


def make(kind: str, adapters: bool = True) -> tuple[nn.Module, nets.Batch, nets.Loss]:
    model, batch, loss = nets.make(kind)
    return (with_adapters(model, kind) if adapters else model), batch, loss


def deep_gpt2(layers: int = 8, width: int = 32, dropout: float = 0.1, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nets.gpt2(layers, width)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return with_adapters(model, "gpt2", **options).train()


class DecoderFirst(nn.Module):
    """Blocks of which the later ones are registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.later, self.earlier = (nn.ModuleList(nets.FeedForward() for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.earlier, *self.later]:
            x = block(x)
        return x


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def assumed_units(model: nn.Module) -> Units:
    """Returns the units as they are taken to be before the model was seen to run."""
    return units_of(model, layers_of(model), trained(model), registered_calls(model))


def watched(model: nn.Module, forward: Callable[[], object]) -> ForwardTracer:
    """Runs a forward pass and returns what was seen of it."""
    watch = ForwardTracer(model)
    try:
        forward()
    finally:
        watch.stop()
    return watch


def units_in_order(model: nn.Module, batch: nets.Batch, loss: nets.Loss) -> Units:
    calls = watched(model, lambda: loss(model, batch)).calls
    return units_of(model, layers_of(model), trained(model), calls)


@dataclass(frozen=True)
class Step:
    """A step that was trained.

    Attributes:
        elastic: What is said of it.
        names: Of the parameters that had a gradient.
        held: Bytes of saved activations between forward and backward of its last pass.
    """

    elastic: ElasticStep
    names: frozenset[str]
    held: int


def depth_of(step: Step, layers: int = 4) -> int:
    """Returns how many layers of a GPT-2 lie above its lowest one that had a gradient, with that one."""
    return layers - min(int(name.partition(".h.")[2].partition(".")[0]) for name in step.names)


class Run:
    """Trains a model elastically, as a trainer would."""

    def __init__(
        self,
        model: nn.Module,
        loss: nets.Loss,
        precision: Any = "exact",
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
        zero: Callable[[torch.optim.Optimizer], None] = torch.optim.Optimizer.zero_grad,
        **elastic: Any,
    ) -> None:
        config = DAFConfig(precision=precision, audit_every=None, elastic=ElasticConfig(**elastic))
        assert config.elastic is not None
        self.model, self.loss, self.zero = model, loss, zero
        self.optimizers = optimizers or [torch.optim.AdamW(trained(model), 1e-3)]
        self.engine = ActivationEngine(model, config)
        self.training = ElasticTraining(model, model, self.engine, config.elastic)

    def step(self, *batches: nets.Batch, aside: Callable[[], None] = lambda: None) -> Step:
        self.training.begin_step()
        aside()
        held = 0
        for batch in batches:
            with self.training.holding(), self.engine.compress():
                loss = self.loss(self.model, batch)
            held = self.engine.held_bytes
            (loss / len(batches)).backward()
        names = frozenset(name for name, each in self.model.named_parameters() if each.grad is not None)
        for optimizer in self.optimizers:
            self.training.before_update([optimizer])
            optimizer.step()
        done = self.training.finish_step()
        self.engine.finish_step()
        for optimizer in self.optimizers:
            self.zero(optimizer)
        assert done is not None
        return Step(done, names, held)

    def steps(self, count: int, *batches: nets.Batch) -> list[Step]:
        return [self.step(*batches) for _ in range(count)]

    def close(self) -> None:
        self.training.close()
        self.engine.close()


def checkpoint(model: nn.Module, **options: Any) -> None:
    """Has transformers recompute layers; 5.12 calls it by another name."""
    newer = hasattr(model, "activation_checkpointing_enable")
    (model.activation_checkpointing_enable if newer else model.gradient_checkpointing_enable)(options)
