"""One method of `daf bench` in a process of its own.

`daf_integrations.cli.bench.rounds` runs ``python -m daf_integrations.cli.bench.worker TASK RESULT``; TASK is the JSON
of a `Task`, RESULT the file that the JSON of the `Measurement` is written to.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from daf_core.errors import DAFError
from daf_core.memory.system.release import release_free_memory
from daf_core.plan.run.retry import is_out_of_memory
from daf_core.timing import synchronized_time
from daf_integrations.cli.bench.methods import Method, StoredBytes, Traits, traits
from daf_integrations.cli.bench.process_memory import GpuMemory, peak_bytes, reset_peak, resident_bytes
from daf_integrations.cli.doctor import loaded_allocator
from daf_integrations.cli.workload import SEED, BuiltWorkload, Workload, build

ERROR, OUT_OF_MEMORY = "error", "out of memory"
"""Keys of the message in the file of a process that could not measure, the latter where memory was what it lacked."""

DROPOUT, NO_DROPOUT = "dropout", "no dropout"  # keys of what was computed with dropout, and without

ADAPTER_DEVIATION = 0.02  # of LoRA's B: as long as it is zero, as it is made, A has no gradient to compare

ALTERNATING_STEPS = 20
"""Steps at least of a method whose steps differ by design: elastic training has those of two depths in turn."""

ELASTIC_RATE = 1e-4  # learning rate where it is measured what steps gain


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one process runs.

    Attributes:
        workload: The fields of a `Workload`.
        dtype: "bf16" is autocast over the model's own weights.
        steps: Steps that are timed; at least `ALTERNATING_STEPS` of a method whose steps differ by design.
        gradients: File that loss and gradients are saved to; empty: they are not.
        undropped: Whether those without dropout are saved too, of what others may be compared with.
        compiled: Whether the whole model is compiled by torch.compile, before the method is opened.
    """

    method: str
    workload: dict[str, Any]
    dtype: Literal["fp32", "bf16"]
    steps: int
    threads: int
    gradients: str = ""
    undropped: bool = False
    compiled: bool = False


@dataclass(frozen=True, kw_only=True)
class Measurement(StoredBytes):
    """What one process measured; its ``held_bytes`` are a mean if the steps differ by design.

    Attributes:
        setup_rss_bytes: Bytes that opening the method loads before the level that the peak is above: compiled kernels
            and their compiler, which do not grow with the model, and a compiled model's graphs.
        peak_bytes: Largest size that the timed steps reach above the loaded model: of the process' resident memory, or
            of the GPU's allocated bytes.
        peak_rss_bytes: The same of the process' resident memory, wherever the model is.
        step_seconds: Median time of a step, or mean for methods whose steps differ by design.
    """

    setup_rss_bytes: int
    peak_bytes: int
    peak_rss_bytes: int
    step_seconds: float
    device: str
    dtype: str
    allocator: str


class TrainingStep:
    """A training step on one batch, whose passes a method runs; its random numbers depend on the seed alone."""

    def __init__(self, sized: BuiltWorkload, optimizer: Optimizer, method: Method, dtype: str) -> None:
        self._sized, self._optimizer, self._method = sized, optimizer, method
        self._autocast = dtype == "bf16"

    def loss_of(self, batch: Any) -> Tensor:
        """Returns the loss of a batch."""
        with torch.autocast(self._sized.parameter.device.type, dtype=torch.bfloat16, enabled=self._autocast):
            return self._sized.loss(batch)

    def run(self, seed: int) -> Tensor:
        """Trains a step and returns its loss."""
        torch.manual_seed(seed)
        self._optimizer.zero_grad()
        loss = self._method.run(self._sized.batch, self.loss_of)
        self._optimizer.step()
        return loss

    def timed_run(self, seed: int) -> float:
        """Trains a step and returns the seconds that this took."""
        start = synchronized_time()
        self.run(seed)
        return synchronized_time() - start

    def stored(self) -> StoredBytes:
        """Returns what the last step stored."""
        return self._method.stored(self._sized.batch, self.loss_of)


def measure(task: Task) -> Measurement:
    """Runs a task in this process.

    Memory is measured from the level at which training could begin: model, optimizer and the code of the method are
    loaded, and of a compiled model its graphs. What that code takes is given on its own. Loss and gradients are those
    of one more step at the end, with the weights of the beginning: the learning rate is zero, but for methods that
    measure what steps gain.

    Raises:
        DAFError: The model cannot be made, or the method does not work with it.
    """
    importlib.import_module("torch._dynamo")  # the first checkpoint would load it: code, not activations
    torch.set_num_threads(task.threads)
    sized = build(Workload(**task.workload))
    fill_adapters(sized.model)
    if task.compiled:
        sized = replace(sized, model=cast("nn.Module", torch.compile(sized.model)))
    trained = [parameter for parameter in sized.model.parameters() if parameter.requires_grad]
    weights = [parameter.detach().clone() for parameter in trained]
    how = traits(task.method)
    optimizer = _optimizer_of(trained, ELASTIC_RATE if how.partial else 0.0)
    device = sized.parameter.device
    release_free_memory()
    loaded = resident_bytes()
    gpu = GpuMemory() if device.type == "cuda" else None
    method = how.open(sized.model)
    release_free_memory()
    level = resident_bytes()
    step = TrainingStep(sized, optimizer, method, task.dtype)
    for number in range(how.settling):
        step.run(SEED + number)
    release_free_memory()  # what compiling kernels took in the first step is free, and the steps would fill it
    if task.compiled:
        level = resident_bytes()  # code of the model's graphs, too, is loaded
    reset_peak()
    if gpu:
        gpu.reset_peak()
    seconds: list[float] = []
    held: list[int] = []
    for number in range(max(task.steps, ALTERNATING_STEPS) if how.alternates else task.steps):
        seconds.append(step.timed_run(SEED + number))
        if how.alternates:
            held.append(step.stored().held_bytes)
    peak_rss = peak_bytes() - level
    peak = gpu.peak_bytes() if gpu else peak_rss
    stored = step.stored()
    if how.alternates:
        stored = replace(stored, held_bytes=round(statistics.fmean(held)))
    if task.gradients:
        _save_gradients(sized, step, task, how, partial(_restore, trained, weights))
    method.close()
    return Measurement(
        **asdict(stored),
        setup_rss_bytes=level - loaded,
        peak_bytes=peak,
        peak_rss_bytes=peak_rss,
        step_seconds=(statistics.fmean if how.alternates else statistics.median)(seconds),
        device=torch.cuda.get_device_name(device) if gpu else device.type,
        dtype=task.dtype,
        allocator=loaded_allocator(),
    )


def fill_adapters(model: nn.Module) -> None:
    """Gives LoRA's B small random values, the same in every process."""
    torch.manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=ADAPTER_DEVIATION)


def computed(model: nn.Module, loss: Tensor) -> dict[str, Any]:
    """Returns the loss of a step and copies, on the CPU, of the gradients that it has left."""
    gradients = {name: each.to("cpu", copy=True) for name, each in gradients_of(model).items()}
    return {"loss": float(loss), "gradients": gradients}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients that a model has, by parameter name."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def switch_dropout_off(model: nn.Module) -> None:
    """Has the model drop nothing from now on."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def serve(arguments: list[str], measure_task: Callable[[dict[str, Any]], Any]) -> None:
    """Measures in a process that `daf_integrations.cli.bench.rounds.run_process` starts with these arguments.

    The file takes what the function returns for the fields of the task, a dataclass, or the reason why there is none.
    """
    task, result = arguments
    try:
        found = asdict(measure_task(json.loads(task)))
    except DAFError as error:
        found = {ERROR: str(error)}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found = {OUT_OF_MEMORY: f"memory ran out: {type(error).__name__}: {error}"}
    Path(result).write_text(json.dumps(found))


def main(arguments: list[str]) -> None:
    """Measures the task given as JSON."""
    serve(arguments, lambda fields: measure(Task(**fields)))


def _optimizer_of(trained: list[nn.Parameter], rate: float) -> Optimizer:
    """Returns an optimizer whose state exists already."""
    optimizer = AdamW(trained, lr=0.0)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = rate
    return optimizer


def _restore(trained: list[nn.Parameter], weights: list[Tensor]) -> None:
    """Gives parameters the values that they had first."""
    with torch.no_grad():
        for parameter, weight in zip(trained, weights, strict=True):
            parameter.copy_(weight)


def _save_gradients(
    sized: BuiltWorkload, step: TrainingStep, task: Task, how: Traits, restore: Callable[[], None]
) -> None:
    """Saves what a step computes with dropout, or without it where a batch is split, or both.

    Parts of a batch draw other numbers than the whole.
    """
    found: dict[str, Any] = {}
    if not how.splits:
        restore()
        found[DROPOUT] = computed(sized.model, step.run(SEED))
    if how.splits or (task.undropped and how.can_be_reference):
        restore()
        switch_dropout_off(sized.model)
        found[NO_DROPOUT] = computed(sized.model, step.run(SEED))
    torch.save(found, task.gradients)


if __name__ == "__main__":
    main(sys.argv[1:])
