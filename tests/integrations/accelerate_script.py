"""A training script with Accelerate that knows nothing of DAF; its findings are written to a file for each rank."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path

import torch
from accelerate import Accelerator

import daf_integrations as daf
from tests.integrations.small_net import SmallNet, loader
from tests.integrations.two_processes import leave


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save-at", type=int)
    parser.add_argument("--resume-at", type=int)
    parser.add_argument("--killed", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model, checkpoint = SmallNet(), str(options.folder / "checkpoint")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(2 * options.steps))
    torch.manual_seed(1)
    losses = []
    model.train()
    for number, batch in enumerate(batches):
        if number == options.steps:
            break
        if number < (options.resume_at or 0):
            continue
        if number == options.resume_at:  # not before: the loader takes a random number when it begins
            accelerator.load_state(checkpoint)
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if number + 1 == options.save_at:
            accelerator.save_state(checkpoint)
    digest = hashlib.sha256(torch.cat([gradient.flatten() for gradient in gradients]).numpy().tobytes()).hexdigest()
    found = {"processes": accelerator.num_processes, "gradients": digest, "losses": losses}
    found["held_mb"] = daf.metrics().get("daf/held_mb")  # only to look at what DAF did
    (options.folder / f"rank{accelerator.process_index}.json").write_text(json.dumps(found))
    if options.killed:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
    leave()
