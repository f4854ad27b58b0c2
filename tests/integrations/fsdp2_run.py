"""What each process of a run with FSDP2 does; its findings are written to a file for each rank."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import daf_integrations as daf
from tests.integrations.small_net import SmallNet, loader

STEPS = 3


def sharded() -> nn.Module:
    net = SmallNet().train()
    for layer in net.layers.layers:
        fully_shard(layer)
    return fully_shard(net)


def gradients(net: nn.Module, rank: int) -> list[Tensor]:
    """Trains and returns this process' part of each step's gradient."""
    optimizer, found = torch.optim.AdamW(net.parameters(), lr=1e-3), []
    for number, batch in enumerate(loader(2 * STEPS)):
        if number % 2 != rank:
            continue
        torch.manual_seed(number)
        net(**batch)["loss"].backward()
        found.append(torch.cat([parameter.grad.to_local().flatten() for parameter in net.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    said: list[str] = []
    logging.getLogger("daf").addFilter(lambda record: said.append(record.getMessage()) is not None)
    expected = gradients(sharded(), rank)
    runs: dict[Any, Any] = {}
    for precision in ("exact", 4, "auto"):
        net = daf.prepare(sharded(), precision=precision)
        found = gradients(net, rank)
        runs[precision] = {
            "same": all(map(torch.equal, found, expected)),
            "error": float((found[0] - expected[0]).norm() / expected[0].norm()),
            **daf.metrics(net),
        }
    runs["said"] = [message for message in said if "audits" in message]
    (folder / f"rank{rank}.json").write_text(json.dumps(runs))
    torch.distributed.destroy_process_group()
