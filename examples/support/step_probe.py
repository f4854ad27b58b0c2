"""A Trainer callback that measures training from outside: step times, peak memory, one step's memory curve."""

import statistics
import threading
import time
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from daf_core.memory.system.release import release_free_memory
from daf_integrations.cli.bench import process_memory

_SAMPLING_SECONDS = 0.002


def live_bytes() -> int:
    """Returns the bytes in use: allocated on the GPU if there is one, else resident in main memory."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else process_memory.resident_bytes()


def reset_peak() -> None:
    """Starts a new peak, on a GPU and on Linux; elsewhere the peak stays that of the whole process."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        process_memory.reset_peak()


def peak_bytes() -> int:
    """Returns the most bytes that were in use since `reset_peak`."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else process_memory.peak_bytes()


class MemorySampler(threading.Thread):
    """Records live bytes every two milliseconds from `start` to `stop`.

    The sampler releases freed memory before each sample, which slows the training down: time other steps.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, int]] = []
        self._stopped = threading.Event()

    def run(self) -> None:
        """Samples (seconds since the start, live bytes) until stopped."""
        begin = time.perf_counter()
        while True:
            release_free_memory()
            self.samples.append((time.perf_counter() - begin, live_bytes()))
            if self._stopped.wait(_SAMPLING_SECONDS):
                return

    def stop(self) -> None:
        """Ends the recording and waits until the last sample is in."""
        self._stopped.set()
        self.join()


class StepProbe(TrainerCallback):
    """Measures a training run.

    Attributes:
        loaded_bytes: memory in use before the first step: the libraries and the model.
        peak_bytes: most memory in use at any moment of training, above `loaded_bytes`.
        curve: (seconds since the step began, bytes above `loaded_bytes`) over the middle step.
    """

    def __init__(self) -> None:
        self.loaded_bytes = 0
        self.peak_bytes = 0
        self.curve: list[tuple[float, int]] = []
        self._step_seconds: list[float] = []
        self._step_began = 0.0
        self._sampler: MemorySampler | None = None

    @property
    def median_step_seconds(self) -> float:
        """Median time of an optimizer step, forward to update."""
        return statistics.median(self._step_seconds)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Notes what is in use before the first step."""
        for parameter in kwargs["model"].parameters():
            parameter.sum()  # weights are mapped from their file: only what was read once is resident
        release_free_memory()
        reset_peak()
        self.loaded_bytes = live_bytes()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the clock, in the middle step the sampler."""
        if state.global_step == state.max_steps // 2:
            self._sampler = MemorySampler()
            self._sampler.start()
        self._step_began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stops both, once the device has done its work."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._step_seconds.append(time.perf_counter() - self._step_began)
        if self._sampler is not None:
            self._sampler.stop()
            self.curve = [(seconds, size - self.loaded_bytes) for seconds, size in self._sampler.samples]
            self._sampler = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Notes the peak."""
        self.peak_bytes = peak_bytes() - self.loaded_bytes
