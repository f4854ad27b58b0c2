"""Lightning runs whose steps run in parts, on padded texts for a causal language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from daf_integrations import DAFStrategy
from tests.integrations.hf_parts import padded_rows
from tests.integrations.lightning_runs import trainer_for
from tests.integrations.planned import AMPLE, in_parts

PARTS = 3
BATCH = 8


class Texts(lightning.pytorch.LightningModule):
    """Trains a model on its own loss; notes what gradients each step begins and ends with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.after: list[float] = []
        self.before_clearing: list[float] = []
        self.outputs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        self.log("number", float(loss.detach()), True)
        self.log("rows", float(len(batch["labels"])), on_step=False, on_epoch=True)
        return {"loss": loss, "index": batch_idx}

    def on_after_backward(self) -> None:
        self.after.append(_length(self))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.before_clearing.append(_length(self))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _length(module: nn.Module) -> float:
    gradients = [value.grad.norm() for value in module.parameters() if value.grad is not None]
    return float(torch.stack(gradients).norm()) if gradients else 0.0


def fit(folder: Path, module: Any, **options: Any) -> Any:
    trainer = trainer_for(folder, **{"gradient_clip_val": 1.0, **options})
    torch.manual_seed(0)
    trainer.fit(module, DataLoader(padded_rows(module.model, 64), batch_size=BATCH))
    return trainer


def fit_in_parts(folder: Path, module: Any, **options: Any) -> Any:
    """Trains within a budget, in parts."""
    with in_parts(PARTS):
        return fit(folder, module, strategy=DAFStrategy(precision="exact", memory_budget=AMPLE), **options)


def largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Returns the largest difference between the weights of two models."""
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in other)
