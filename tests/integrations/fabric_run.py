"""What each process of a run with Lightning Fabric does; findings go to a file for each rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn

import daf_integrations as daf
from daf_core import ConfigError, timing
from tests.integrations.elastic_runs import CountingClock, classifier
from tests.integrations.hf_runs import lora
from tests.integrations.lightning_ddp_run import digest
from tests.integrations.loop_runs import adam, batches
from tests.integrations.planned import AMPLE

STEPS = 6
BUDGET = {"precision": "exact", "memory_budget": AMPLE}
ELASTIC = {"precision": "exact", "elastic": {"time": 0.6}}


class Module(lightning.LightningModule):
    """Its training_step is called by way of Fabric's wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.model = lora(dropout=0.0)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss


def trained(
    fabric: lightning.Fabric,
    options: dict[str, Any],
    make: Callable[[], nn.Module] = lambda: lora(dropout=0.0),
    first: bool = False,
    method: str | None = None,
) -> str:
    """Trains with gradients accumulated over two batches; returns the weights in short."""
    inner = make()
    if options and first:
        daf.prepare(inner, **options)
    model, optimizer = fabric.setup(inner, adam(inner))
    if options and not first:
        daf.prepare(model, **options)
    model.train()
    by_step = "memory_budget" in options and method is None
    for number, batch in enumerate(list(batches(lora(), 4 * STEPS))[fabric.global_rank :: 2]):
        last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not last):
            if by_step:
                daf.step(model, batch, backward=fabric.backward)
            else:
                fabric.backward(model(**batch).loss if method is None else getattr(model, method)(batch))
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return digest([value.detach() for value in inner.parameters()])


def refusal(*args: Any, **kwargs: Any) -> str:
    try:
        trained(*args, **kwargs)
    except ConfigError as error:
        return str(error)
    return "nothing"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(find_unused_parameters=True))
    fabric.launch()
    timing.synchronized_time = CountingClock(4.0 if fabric.global_rank == 0 else 0.1)
    exact = {"precision": "exact"}
    found: dict[str, Any] = {
        "plain": trained(fabric, {}),
        "exact": trained(fabric, exact),
        "exact, prepared first": trained(fabric, exact, first=True),
        "budget": trained(fabric, BUDGET),
        "elastic": trained(fabric, ELASTIC, classifier),
        "budget, prepared first": refusal(fabric, BUDGET, first=True),
        "elastic, prepared first": refusal(fabric, ELASTIC, classifier, first=True),
        "plain training_step": trained(fabric, {}, Module, method="training_step"),
        "training_step": trained(fabric, exact, Module, method="training_step"),
        "training_step with a budget": refusal(fabric, BUDGET, Module, method="training_step"),
    }
    module = fabric.setup(Module())
    daf.prepare(module.train(), precision=4)
    [batch] = batches(lora(), 1)
    fabric.backward(module.training_step(batch))
    adam(module).step()
    found["training_step compressed"] = daf.metrics(module)["daf/ratio"] > 4
    other = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    other.launch()
    found["elastic without it"] = refusal(other, ELASTIC, classifier)
    (folder / f"rank{fabric.global_rank}.json").write_text(json.dumps(found))
