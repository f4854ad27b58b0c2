"""What each process of an elastic run does; findings go to a file for each rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

import daf_integrations as daf
from daf_core import ConfigError, timing
from daf_integrations import DAFCallback, DAFStrategy
from tests.integrations.elastic_runs import (
    ELASTIC,
    STEPS,
    CountingClock,
    Watched,
    adapters,
    classifier,
    trained,
    whole,
    with_gradient,
)
from tests.integrations.hf_runs import QUICK, checkpointed, rows_for, run
from tests.integrations.lightning_ddp_run import digest
from tests.integrations.lightning_runs import Classifier, loader, trainer_for
from tests.integrations.loop_runs import collate, weights_of
from tests.integrations.planned import AMPLE

ROWS = 8
FILE = {"plan_file": "plan.json"}
SHORT = 32
"""Tokens of the first batches of the second process, where only it is to measure its model anew later."""

Masks = list[frozenset[str]]


def batch_of(rows: list[Any], step: int, process: int, processes: int) -> dict[str, Tensor]:
    size = ROWS // processes
    start = ROWS * step + size * process
    return collate(rows[start : start + size])


def loop(budget: bool, **options: Any) -> tuple[Masks, nn.Module]:
    """Trains in a loop, within a budget or not."""
    model, rank = classifier(), dist.get_rank()
    rows = rows_for(model, ROWS * STEPS)
    wrapped = DistributedDataParallel(model.train(), find_unused_parameters=True)
    daf.prepare(wrapped, **ELASTIC, **({"memory_budget": AMPLE} if budget else {}), **options)
    optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.1)
    masks: Masks = []
    for number in range(STEPS):
        batch = batch_of(rows, number, rank, 2)
        if budget and rank and number < 3:
            batch["input_ids"] = batch["input_ids"][:, :SHORT]
        if budget:
            daf.step(wrapped, batch)
        else:
            wrapped(**batch).loss.backward()
        masks.append(with_gradient(model))
        optimizer.step()
        optimizer.zero_grad()
    return masks, model


def alone(masks: Masks) -> nn.Module:
    """Trains on the whole batches in one process, without DAF, what the masks say."""
    model = classifier().train()
    rows = rows_for(model, ROWS * STEPS)
    optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.1)
    for number, mask in enumerate(masks):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in mask)
        model(**batch_of(rows, number, 0, 1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def trainer(folder: Path) -> tuple[Masks, nn.Module]:
    """Trains with the Trainer, which expects all gradients of a model with checkpoints if nothing is said."""
    watched, model = Watched(), whole()
    arguments = {**QUICK, **checkpointed(use_reentrant=False), "output_dir": str(folder), "max_steps": STEPS}
    each = Trainer(
        model,
        TrainingArguments(**arguments),
        train_dataset=rows_for(model),
        callbacks=[DAFCallback(**ELASTIC), watched],
    )
    run(each)
    return watched.trained, model


class Watching(Classifier):
    """Notes what each step trains."""

    def __init__(self) -> None:
        super().__init__(adapters())
        self.trained: Masks = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.trained.append(with_gradient(self.model))


def lightning(folder: Path, strategy: Any = None) -> tuple[Masks, nn.Module]:
    """Trains with Lightning."""
    module = Watching()
    options = {"devices": 2, "max_steps": STEPS, "strategy": strategy or DAFStrategy(**ELASTIC)}
    trainer_for(folder, **options).fit(module, loader(module.model, 4))
    return module.trained, module.model


def repeated(folder: Path) -> list[str]:
    """Trains three times by other clocks, the last two times with a file of plans; returns digests of the weights."""
    digests = []
    for backward, options in ((0.1, {}), (4.0, FILE), (0.1, FILE)):
        timing.synchronized_time = CountingClock(backward)
        _, model = loop(True, **{name: str(folder / value) for name, value in options.items()})
        digests.append(digest([value.detach() for value in model.parameters()]))
    return digests


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Left to itself, the second process would find that backward passes take little.
    timing.synchronized_time = CountingClock(4.0 if rank == 0 else 0.1)
    runs = {"loop": loop(False), "budget": loop(True), "trainer": trainer(folder), "lightning": lightning(folder)}
    found: dict[str, Any] = {
        name: {
            "masks": [sorted(mask) for mask in masks],
            "weights": digest([value.detach() for value in model.parameters()]),
            "parameters": len(trained(model)),
        }
        for name, (masks, model) in runs.items()
    }
    masks, model = runs["loop"]
    one, other, start = weights_of(model), weights_of(alone(masks)), weights_of(classifier())
    found["largest difference"] = max(float((one[name] - other[name]).abs().max()) for name in one)
    found["largest change"] = max(float((one[name] - start[name]).abs().max()) for name in one)
    try:
        lightning(folder, DAFStrategy(base=DDPStrategy(), **ELASTIC))
    except ConfigError as error:
        found["refused"] = str(error)
    found["repeated"] = repeated(folder)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
