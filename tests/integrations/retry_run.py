"""What each process of a run does in which single processes run out of memory; findings go to a file for each rank."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from daf_core.distributed import any_rank_failed, reduce_gradients, unsynchronized
from daf_core.plan.run.retry import with_retries
from daf_core.snapshots.step import Snapshot
from daf_core.unsupported.models import RERUNS
from daf_core.unsupported.table import Context, unsupported_reasons

STEPS = 3
TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."


class FSDPModule(nn.Module):
    """Has the name of what is spread over processes."""


class Net(nn.Module):
    """Has running statistics, dropout, a layer that rank 1 alone uses, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 16))
        self.side, self.idle = nn.Linear(16, 4), nn.Linear(16, 4)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, side: bool) -> Tensor:
        y = self.body(x)
        return self.head(y) + (self.side(y) if side else 0)


def train(model: nn.Module, step: Callable[[DistributedDataParallel, int], None]) -> list[Tensor]:
    """Trains a copy; returns weights, buffers and the random state."""
    wrapper = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(wrapper.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for number in range(STEPS):
        step(wrapper, number)
        optimizer.step()
        optimizer.zero_grad()
    for buffer in wrapper.buffers():
        dist.broadcast(buffer, 0)  # which the next forward pass would have done
    return [*wrapper.state_dict().values(), torch.get_rng_state()]


def plain(model: DistributedDataParallel, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    x, y = torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)
    F.cross_entropy(model(x, dist.get_rank() == 1), y).backward()


def retried(failing: dict[int, int], attempts: list[int]) -> Callable[[DistributedDataParallel, int], None]:
    """Returns a step whose first attempt fails in one process: `failing` names its rank for a step."""

    def step(model: DistributedDataParallel, number: int) -> None:
        tries: list[int] = []

        def attempt() -> None:
            tries.append(1)
            attempts.append(number)
            with unsynchronized(model):
                if len(tries) == 1 and failing.get(number) == dist.get_rank():
                    raise torch.OutOfMemoryError(TEXT)
                plain(model, number)

        with_retries(attempt, Snapshot(model), lambda message: True, partial(any_rank_failed, model))
        reduce_gradients(model)

    return step


def hopeless(model: nn.Module) -> str:
    """Returns the error where rank 1 alone runs out of memory, whatever the plan."""
    told: list[str] = []

    def attempt() -> None:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError(TEXT)

    def tighten(message: str) -> bool:
        told.append(message)
        return len(told) < 2

    try:
        with_retries(attempt, Snapshot(model), tighten, partial(any_rank_failed, model))
    except Exception as error:
        return f"{type(error).__name__}: {error} ({told[0] if told else 'did not fail'})"
    return "none"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model, attempts = Net(), list[int]()
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    hooked = DistributedDataParallel(nn.Linear(2, 2))
    hooked.register_comm_hook(None, allreduce_hook)
    expected = train(model, plain)
    found = train(model, retried({0: 1, 2: 0}, attempts))
    result: dict[str, Any] = {
        "processes": dist.get_world_size(),
        "agreed": [any_rank_failed(hooked, failed) for failed in (False, rank == 0, True)],
        "alone": any_rank_failed(DistributedDataParallel(nn.Linear(2, 2), process_group=groups[rank]), rank == 0),
        "differing": [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)],
        "attempts": attempts,
        "error": hopeless(hooked),
        "reasons": [
            unsupported_reasons(RERUNS, Context(each))
            for each in (model, nn.SyncBatchNorm(3), nn.Embedding(3, 3, sparse=True), hooked, FSDPModule())
        ],
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
