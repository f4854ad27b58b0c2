"""What the runs of trainers need: one thread, little output, and a Trainer of a small model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments

from tests.integrations.hf_runs import QUICK, MakeTrainer, lora, rows_for


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are so small that a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keeps what transformers says about its own work off the output that tests look at."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@pytest.fixture
def make_trainer(tmp_path: Path) -> MakeTrainer:
    """Makes a Trainer that writes below the test's own folder."""

    def make(
        *callbacks: Any,
        model: nn.Module | None = None,
        trainer: type[Trainer] = Trainer,
        compute_loss_func: Callable[..., Any] | None = None,
        **arguments: Any,
    ) -> Trainer:
        model = model or lora()
        rows = rows_for(model)
        return trainer(
            model,
            TrainingArguments(**{"output_dir": str(tmp_path / "run"), **QUICK, **arguments}),
            train_dataset=rows,
            eval_dataset=rows[:16],
            compute_loss_func=compute_loss_func,
            callbacks=list(callbacks),
        )

    return make


@pytest.fixture
def arguments(tmp_path: Path) -> TrainingArguments:
    """Training arguments for a callback that is called by hand."""
    return TrainingArguments(output_dir=str(tmp_path / "run"), **QUICK)
