"""What each process of a distributed Lightning run does; its findings are written to a file for each rank."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from daf_integrations import DAFStrategy
from tests.integrations.hf_runs import lora
from tests.integrations.lightning_runs import Classifier, fit, left_behind


class Watched(Classifier):
    """Notes the gradients that the optimizer gets, and writes them to a file of the process at the end."""

    def __init__(self, found: Path) -> None:
        super().__init__(lora(dropout=0.0))
        self.found = found
        self.gradients: list[str] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(digest([value.grad for value in self.parameters() if value.grad is not None]))

    def on_fit_end(self) -> None:
        step = getattr(self.trainer.strategy, "last_step", None)
        found = {
            "gradients": self.gradients,
            "weights": digest([value.detach() for value in self.parameters()]),
            "held bytes": None if step is None else step.held_bytes,
            "left behind": left_behind(self, self.trainer),
            "world size": self.trainer.world_size,
            "strategy": type(self.trainer.strategy).__name__,
        }
        self.found.with_suffix(f".rank{self.trainer.global_rank}").write_text(json.dumps(found))


def digest(tensors: list[Tensor]) -> str:
    """Returns one short text for the bits of many tensors."""
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def findings(folder: Path, name: str) -> list[dict[str, Any]]:
    """Returns what the processes of a run have written."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}.rank*"))]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    strategies = {"plain": "ddp", "exact": DAFStrategy(precision="exact"), "lossy": DAFStrategy(precision=4)}
    for name, strategy in strategies.items():
        fit(folder, Watched(folder / name), strategy=strategy, devices=2)
