"""A Trainer callback that measures training from outside: step times, peak memory, one step's memory curve."""

import statistics
import time
from typing import Any

import torch
from process_memory import MemorySampler, live_bytes, peak_bytes, reset_peak
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from daf_core.memory.system.release import release_free_memory


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
