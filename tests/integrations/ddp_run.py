"""What each process of a distributed run does; its findings are written to a file for each rank."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from daf_integrations import DAFCallback
from tests.integrations.hf_runs import QUICK, Recorder, differing, last_step, left_behind, lora, rows_for, run, weights


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    arguments = TrainingArguments(output_dir=str(folder), **QUICK, ddp_find_unused_parameters=False)
    callback = DAFCallback(precision="exact")
    plain, compressed = (
        Trainer(lora(), arguments, train_dataset=rows_for(lora()), callbacks=callbacks)
        for callbacks in ([Recorder()], [callback])
    )
    run(plain)
    run(compressed)
    found = {
        "processes": arguments.world_size,
        "differing": differing(weights(compressed), weights(plain)),
        "left behind": left_behind(compressed),
        "raw bytes": last_step(callback).raw_bytes,
    }
    (folder / f"rank{arguments.process_index}.json").write_text(json.dumps(found))
