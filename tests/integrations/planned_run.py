"""What each process of a run does whose steps keep a memory budget; findings go to a file for each rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import daf_integrations as daf
from daf_core import ConfigError
from daf_integrations import DAFCallback, DAFStrategy
from tests.integrations.hf_parts import made, masked, padded_rows, padded_trainer
from tests.integrations.hf_runs import run
from tests.integrations.lightning_parts_runs import Texts, fit, largest
from tests.integrations.loop_runs import collate, weights_of
from tests.integrations.planned import AMPLE, OutOfMemory, in_parts

EXACT: dict[str, Any] = {"precision": "exact", "memory_budget": AMPLE}
failures: list[OutOfMemory] = []
STEPS, ACCUMULATION, ROWS = 3, 2, 8


def trainer_weights(folder: Path, planned: bool, failing: int | None) -> dict[str, Tensor]:
    """Trains with the Trainer."""
    trainer = padded_trainer(
        folder, made(masked), gradient_accumulation_steps=ACCUMULATION, ddp_find_unused_parameters=True
    )
    if planned:
        trainer.add_callback(DAFCallback(**EXACT))
        _fail(trainer.model, failing, lambda: trainer.state.global_step == 1)
    run(trainer)
    return weights_of(trainer.model)


def lightning_weights(
    folder: Path, planned: bool, failing: int | None, accumulation: int = ACCUMULATION
) -> dict[str, Tensor]:
    """Trains with Lightning."""
    module = Texts(made(masked))
    if planned:
        _fail(module.model, failing, lambda: module.global_step == 1)
    strategy: Any = DAFStrategy(**EXACT) if planned else "ddp_find_unused_parameters_true"
    options = {"devices": 2, "accumulate_grad_batches": accumulation, "max_steps": 2}
    fit(folder, module, strategy=strategy, **options)
    return weights_of(module.model)


def loop_weights(_folder: Path, planned: bool, failing: int | None) -> dict[str, Tensor]:
    """Trains in a loop; the model knows in which of its steps it is."""
    model = made(masked)
    model.train()
    rows = padded_rows(model, 2 * ROWS * STEPS * ACCUMULATION)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    number = 0
    if planned:
        daf.prepare(wrapped, **EXACT)
        _fail(model, failing, lambda: number == 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        for part in range(ACCUMULATION):
            start = ROWS * (2 * (ACCUMULATION * number + part) + dist.get_rank())
            batch = collate(rows[start : start + ROWS])
            if part + 1 < ACCUMULATION:
                with wrapped.no_sync():
                    daf.step(wrapped, batch)
            else:
                daf.step(wrapped, batch)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def _fail(model: Any, rank: int | None, due: Callable[[], bool]) -> None:
    """Has one process run out of memory late in a backward pass."""
    if rank == dist.get_rank():
        failures.append(OutOfMemory(model.get_input_embeddings(), "backward", due))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    single = partial(lightning_weights, accumulation=1)
    runs = {"trainer": trainer_weights, "lightning": lightning_weights, "single": single, "loop": loop_weights}
    for name, train in runs.items():
        start = weights_of(made(masked))
        plain = train(folder, False, None)
        # Each process another number of parts, and then all as they find best, until one runs out of memory.
        with in_parts(2 + 2 * rank):
            cut = train(folder, True, None)
        retried = train(folder, True, 1)
        found[name] = [
            largest(plain, start),
            largest(cut, plain),
            largest(retried, plain),
            sum(each.raised for each in failures),
        ]
        failures.clear()
    found["refused"] = [
        *map(_refusal, (SpreadOut(), replicate(Small()), DistributedDataParallel(Small(), static_graph=True))),
        *map(_refusal_of_first_step, (_late_static, _late_sharded, _joined)),
    ]
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


class FSDPModule(nn.Module):
    """Has the name of what is spread over processes."""


class SpreadOut(FSDPModule):
    """As FSDP2 makes of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class Small(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def _refusal(model: nn.Module) -> str:
    try:
        daf.prepare(model, **EXACT)
    except ConfigError as error:
        return str(error)
    return "none"


def _refusal_of_first_step(first_step: Callable[[nn.Module], None]) -> str:
    try:
        first_step(Small())
    except ConfigError as error:
        return str(error)
    return "none"


def _late_static(model: nn.Module) -> None:
    """The loop calls the model, in whose forward nothing but torch knows what wraps it."""
    daf.prepare(model, **EXACT)
    DistributedDataParallel(model, static_graph=True)(torch.ones(8, 4)).backward()


def _late_sharded(model: nn.Module) -> None:
    daf.prepare(model, **EXACT)
    model.__class__ = type("Sharded", (FSDPModule, type(model)), {})  # as fully_shard does it
    daf.step(model, torch.ones(8, 4), model)


def _joined(model: nn.Module) -> None:
    """Steps in parts of the model's own choice are refused; what calls the model is not."""
    wrapped = daf.prepare(DistributedDataParallel(model), **EXACT)
    with Join([cast("Any", wrapped)]):
        wrapped(torch.ones(8, 4)).backward()
    # Leaving it would wait for processes that have other batches, and none has.
    with suppress(RuntimeError), Join([cast("Any", wrapped)]):
        daf.step(wrapped, torch.ones(8, 4), wrapped)
