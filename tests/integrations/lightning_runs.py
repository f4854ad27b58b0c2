"""Small runs of Lightning's Trainer, in either of its packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch
import pytorch_lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from daf_core.autograd.torch_private import innermost_hooks
from daf_integrations import pytorch_lightning as daf_pytorch_lightning
from daf_integrations.lightning import strategy as daf_lightning
from tests.integrations.hf_runs import BATCH, lora, rows_for

STEPS = 4
METRICS = {"daf/raw_mb", "daf/held_mb", "daf/ratio", "daf/pack_ms", "daf/unpack_ms"}

PACKAGES: dict[str, Any] = {"lightning.pytorch": lightning.pytorch, "pytorch_lightning": pytorch_lightning}


class Steps:
    """A classifier's training, for a LightningModule of either package; dropout repeats from batch to batch."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model or lora()
        self.losses: list[float] = []
        self.validations = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        self.losses.append(float(loss.detach()))
        return loss

    def on_validation_start(self) -> None:
        self.validations += 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.model(**batch).loss, sync_dist=True)
        assert innermost_hooks() is None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=5e-3)


class Classifier(Steps, lightning.pytorch.LightningModule):
    """For `lightning.pytorch`."""


class OtherClassifier(Steps, pytorch_lightning.LightningModule):
    """For `pytorch_lightning`."""


MODULES: dict[str, Any] = {"lightning.pytorch": Classifier, "pytorch_lightning": OtherClassifier}

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
    "log_every_n_steps": 1,
    "max_steps": STEPS,
}


def loader(model: nn.Module, batch_size: int = BATCH, count: int = 8 * BATCH) -> DataLoader[Any]:
    return DataLoader(rows_for(model, count), batch_size=batch_size)


def trainer_for(folder: Path, package: str = "lightning.pytorch", **options: Any) -> Any:
    return PACKAGES[package].Trainer(**{"default_root_dir": folder, **QUIET, **options})


def fit(folder: Path, module: Any, package: str = "lightning.pytorch", ckpt_path: Any = None, **options: Any) -> Any:
    """Trains from a fixed state of torch's generator and returns the Trainer."""
    trainer = trainer_for(folder, package, **options)
    torch.manual_seed(0)
    trainer.fit(module, loader(module.model), loader(module.model, count=BATCH), ckpt_path=ckpt_path)
    return trainer


def strategy_of(package: str) -> Any:
    """Returns the DAFStrategy for a package's Trainer."""
    return {"lightning.pytorch": daf_lightning, "pytorch_lightning": daf_pytorch_lightning}[package].DAFStrategy


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def left_behind(module: nn.Module, trainer: Any) -> list[str]:
    """Names what a run left installed."""
    return [
        *(["saved-tensor hooks"] if innermost_hooks() is not None else []),
        *(f"{name}: hook" for name, part in module.named_modules() if part._forward_hooks or part._forward_pre_hooks),
        *(f"{callback}" for callback in trainer.callbacks if type(callback).__module__.startswith("daf_")),
        *(["log"] if "log" in vars(module) else []),
    ]
