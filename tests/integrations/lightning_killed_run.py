"""A run that saves after each epoch and is killed in its third."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from daf_integrations import DAFStrategy
from tests.integrations.lightning_runs import Classifier, fit


class Killed(Classifier):
    """Ends without any of the goodbyes of Python."""

    def on_train_batch_end(self, *args: Any) -> None:
        if len(self.losses) == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 3, "limit_train_batches": 2, "enable_checkpointing": True}
    keep = ModelCheckpoint(folder, filename="last", enable_version_counter=False)
    fit(folder, Killed(), strategy=DAFStrategy(precision=4, audit_every=1), callbacks=[keep], **options)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
