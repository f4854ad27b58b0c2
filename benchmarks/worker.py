"""One method of the training benchmark in a process of its own.

``benchmarks.training`` runs ``python -m benchmarks.worker TASK RESULT``; TASK is the JSON of a ``Task``,
RESULT the file that the JSON of the ``Measurement`` is written to.
"""

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.methods import Method, open_method
from benchmarks.models import SEED, build_batch, build_model
from benchmarks.process_memory import (
    GpuMemory,
    loaded_allocator,
    peak_bytes,
    reset_peak,
    resident_bytes,
)
from daf_core.memory.release import release_free_memory

LEARNING_RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one process runs; the fields are the options of ``benchmarks.training``.

    ``gradients`` names the file that gradients are saved to; empty: they are not saved.
    """

    method: str
    model: str
    batch: int
    seq: int
    image: int
    dtype: Literal["fp32", "bf16"]
    steps: int
    threads: int
    lora_dropout: float
    gradients: str = ""
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one process measured: bytes of one step, peak above the loaded model, median time of a step.

    ``audit_seconds`` is what measuring the error of the gradient took in all steps, which the median does not show.
    ``setup_rss_bytes`` is what opening the method loaded before the level that the peak is above: compiled
    kernels and their compiler. It does not grow with the model.
    """

    raw_bytes: int
    held_bytes: int
    pack_seconds: float
    unpack_seconds: float
    setup_rss_bytes: int
    peak_rss_bytes: int
    step_seconds: float
    allocator: str
    dropped_bytes: int = 0
    spilled_bytes: int = 0
    pager_seconds: float = 0.0
    audit_seconds: float = 0.0
    audited_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class GpuMeasurement(Measurement):
    """What one process measured on a GPU.

    ``loaded_device_bytes`` is what model, batch and optimizer have of the device's memory, ``peak_device_bytes`` the
    peak of allocated bytes above that.
    """

    loaded_device_bytes: int
    peak_device_bytes: int


class TrainingStep:
    """A training step on one batch; its random numbers depend on the seed alone, not on the method."""

    def __init__(
        self, model: nn.Module, batch: dict[str, Tensor], optimizer: Optimizer, method: Method, dtype: str
    ) -> None:
        self._model = model
        self._batch = batch
        self._optimizer = optimizer
        self._method = method
        self._autocast = dtype == "bf16"
        self._device = next(iter(batch.values())).device.type

    def forward(self, batch: dict[str, Tensor] | None = None) -> Tensor:
        """Returns the loss of the batch, or of another one."""
        with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._autocast):
            return self._model(**batch or self._batch).loss

    def compute_gradients(self, seed: int) -> None:
        """Sets the gradients and leaves the weights as they are."""
        torch.manual_seed(seed)
        self._optimizer.zero_grad()
        self._method.audit(self._batch, self.forward)
        with self._method.compress():
            loss = self.forward()
        loss.backward()
        self._method.finish_step()
        if not loss.isfinite():
            raise ArithmeticError(f"the loss is {float(loss)}; train at a higher precision")

    def timed_run(self, seed: int) -> float:
        """Sets the gradients, updates the weights and returns the seconds that this took."""
        _finish(self._device)
        start = time.perf_counter()
        self.compute_gradients(seed)
        self._optimizer.step()
        _finish(self._device)
        return time.perf_counter() - start


def measure(task: Task) -> Measurement:
    """Runs a task in this process.

    Memory is measured from the level at which training could begin: model, optimizer and the code of the method
    are loaded. What that code takes is given on its own. The peak is that of the timed steps. Before them come
    two warm-up steps with equal seeds that leave the weights as they are. The gradients of the second one are
    saved, so that a method has had one step to settle.
    """
    torch.set_num_threads(task.threads)
    model = build_model(task.model, lora_dropout=task.lora_dropout).to(task.device)
    batch = build_batch(task.model, batch=task.batch, seq=task.seq, image=task.image)
    batch = {name: tensor.to(task.device) for name, tensor in batch.items()}
    optimizer = _build_optimizer(model)
    release_free_memory()
    loaded = resident_bytes()
    gpu = GpuMemory() if task.device == "cuda" else None
    method = open_method(task.method, model)
    level = resident_bytes()
    step = TrainingStep(model, batch, optimizer, method, task.dtype)
    for _ in range(2):
        step.compute_gradients(SEED)
    if task.gradients:
        torch.save(_gradients(model), task.gradients)
    reset_peak()
    if gpu:
        gpu.reset_peak()
    seconds = [step.timed_run(SEED + number) for number in range(task.steps)]
    peak = peak_bytes() - level
    kind, figures = (GpuMeasurement, gpu.figures()) if gpu else (Measurement, {})
    stored = method.measure(step.forward)
    method.close()
    return kind(
        **asdict(stored),
        **figures,
        setup_rss_bytes=level - loaded,
        peak_rss_bytes=peak,
        step_seconds=statistics.median(seconds),
        allocator=loaded_allocator(),
    )


def _build_optimizer(model: nn.Module) -> Optimizer:
    """Returns an optimizer whose state exists already, made by a step that changes no weight."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamW(trained, lr=0.0)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    return optimizer


def _finish(device: str) -> None:
    """Waits for what a device has been given to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return {name: gradient.cpu() for name, gradient in gradients if gradient is not None}


def main(arguments: list[str]) -> None:
    """Runs the task given as JSON and writes what was measured to the file named after it."""
    task, result = arguments
    measurement = measure(Task(**json.loads(task)))
    Path(result).write_text(json.dumps(asdict(measurement)))


if __name__ == "__main__":
    main(sys.argv[1:])
