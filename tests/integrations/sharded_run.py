"""What each process of runs with sharded training through Accelerate does; findings are written for each rank."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

import daf_integrations as daf
from tests.integrations.small_net import BATCH, SmallNet, loader

STEPS = 3


def zero(stage: int) -> Accelerator:
    """Returns an Accelerator with DeepSpeed, which is asked for in the environment, as `accelerate launch` does."""
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", DS_ACCELERATOR="cpu")
    options = {"train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": 1}
    options |= {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=options))


def fsdp2() -> Accelerator:
    """Returns an Accelerator that takes two CPUs for what it has FSDP for, which is GPUs alone."""
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    vars(accelerator.state).update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    return accelerator


RUNS: dict[str, Callable[[], Accelerator]] = {
    **{f"ZeRO-{stage}": lambda stage=stage: zero(stage) for stage in (1, 2, 3)},
    "FSDP2": fsdp2,
}


def trained(start: Callable[[], Accelerator], precision: Any) -> dict[str, Any]:
    """Trains, and returns each step's loss and the figures of all; a precision of None is training without DAF."""
    AcceleratorState._reset_state(True)
    accelerator = start()
    model: Any = SmallNet().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    if precision is not None:
        daf.prepare(model, precision=precision)
    losses: list[float] = []
    for number, batch in enumerate(loader(2 * STEPS)):
        if number % 2 == torch.distributed.get_rank():
            torch.manual_seed(number)
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses, "wrapper": type(model).__name__, **({} if precision is None else daf.metrics(model))}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found = {
        name: {str(precision): trained(start, precision) for precision in (None, "exact", 4)}
        for name, start in RUNS.items()
        if name in (folder / "runs.txt").read_text().split()
    }
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
