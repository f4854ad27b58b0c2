"""A language model with a small body and a large vocabulary: what a step takes where logits outweigh all else.

Peaks are bytes of tensors, and of DAF's pages, above what is there before the step. Times are those of the process'
CPUs, so that other work on the machine counts for less. Nothing is offloaded from a CPU: saved tensors are copied to
memory that does not count, and back, as offloading from a device does.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from benchmarks.harness import benchmark_parser, megabytes, whole_number, write_results
from daf_core.plan.observe.meter import TensorMeter
from daf_integrations.cli.bench.baselines import Stored, Stores
from daf_integrations.cli.bench.methods import Method, open_method
from daf_integrations.cli.bench.summary import compare_gradients, paired_ratio
from daf_integrations.cli.bench.tables import Grid
from daf_integrations.cli.bench.worker import fill_adapters, gradients_of
from daf_integrations.loop.training import training_of


class Contestant(NamedTuple):
    """A method, whether TRL's fused output projection gives the loss, and steps before those that count."""

    open: Callable[[nn.Module], Method]
    fused: bool = False
    settling: int = 0


def _named(name: str) -> Callable[[nn.Module], Method]:
    return lambda model: open_method(name, model)


def _offloaded(model: nn.Module) -> Method:
    return Method(model, Stores(model, _moved))


def _moved(tensor: Tensor) -> Stored:
    array = tensor.contiguous().numpy().copy()
    return Stored(lambda: torch.from_numpy(array).clone(), 0)


CONTESTANTS = {
    "plain": Contestant(_named("plain")),
    "checkpoint": Contestant(_named("checkpoint")),
    "offload": Contestant(_offloaded),
    "chunked loss": Contestant(_named("daf-loss"), settling=1),
    "daf-auto": Contestant(_named("daf-auto"), settling=3),
    "trl, checkpoint": Contestant(_named("checkpoint"), fused=True),
    "trl, offload": Contestant(_offloaded, fused=True),
    "trl, daf-auto": Contestant(_named("daf-auto"), fused=True, settling=3),
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the model and its batch of one row."""

    layers: int = 8
    width: int = 512
    vocabulary: int = 128256
    tokens: int = 4096


class Steps:
    """Training steps of LoRA adapters on one batch, by a method; nothing is learned, so that all have the same weights.

    Args:
        body: The model, of which a copy is trained that shares the weights that are frozen.
        size: Of the batch.
        contestant: What runs the passes.
    """

    def __init__(self, body: nn.Module, size: Size, contestant: Contestant) -> None:
        frozen = {id(each): each for each in body.parameters() if not each.requires_grad}
        self.model: Any = copy.deepcopy(body, frozen)
        ids = torch.randint(4, size.vocabulary, (1, size.tokens), generator=torch.Generator().manual_seed(0))
        self._batch = {"input_ids": ids, "labels": ids}
        self._options = {"fused_lm_head": True} if contestant.fused else {}
        if contestant.fused:
            add_fused_lm_head(self.model.get_base_model())
        self._method = contestant.open(self.model)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.SGD(trained, lr=0.0)

    def run(self) -> tuple[int, float]:
        """Trains a step; returns the most bytes that it took at once, and the seconds of the process' CPUs."""
        training = training_of(self.model)
        engine = None if training is None else training.session._engine
        self._optimizer.zero_grad()
        with TensorMeter(int if engine is None else lambda: engine.resident_bytes) as meter:
            start = time.process_time()
            self._method.run(self._batch, self._loss)
            self._optimizer.step()
            return meter.take_peak(), time.process_time() - start

    def close(self) -> None:
        self._method.close()

    def _loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        outputs = self.model(**batch, **self._options)
        return -outputs.log_probs.sum() / outputs.label_mask.sum() if self._options else outputs.loss


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What steps of a method take, and how far their gradient is from that of plain training."""

    method: str
    peak_bytes: int
    peak_ratio: float
    seconds: float
    time_ratio: float
    gradient_error: float


def build(size: Size) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.width * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=8,
        max_position_embeddings=size.tokens,
        use_cache=False,
    )
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), lora)
    fill_adapters(model)
    return model.train()


def measure(size: Size, names: Sequence[str], rounds: int) -> list[StepCost]:
    """Measures methods in turn: each takes a step in every round."""
    body, console = build(size), Console(stderr=True)
    steps = {name: Steps(body, size, CONTESTANTS[name]) for name in names}
    for name in track(names, "settling", console=console):
        for _ in range(CONTESTANTS[name].settling):
            steps[name].run()
    taken: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    for name in track([*names] * rounds, "measuring", console=console):
        taken[name].append(steps[name].run())
    exact = gradients_of(steps["plain"].model)
    peaks = {name: max(peak for peak, _ in found) for name, found in taken.items()}
    seconds = {name: [each for _, each in found] for name, found in taken.items()}
    costs = [
        StepCost(
            method=name,
            peak_bytes=peaks[name],
            peak_ratio=peaks[name] / peaks["plain"],
            seconds=statistics.median(seconds[name]),
            time_ratio=paired_ratio(seconds[name], seconds["plain"]),
            gradient_error=compare_gradients(gradients_of(each.model), exact).error,
        )
        for name, each in steps.items()
    ]
    for each in steps.values():
        each.close()
    return costs


def grid(costs: Sequence[StepCost]) -> Grid:
    """Returns the table of what was measured."""
    headings = ["method", "peak MB", "peak of plain", "CPU seconds", "time of plain", "gradient error"]
    return Grid("a step with a large vocabulary", headings, [_row(each) for each in costs])


def _row(each: StepCost) -> list[str]:
    ratios = f"{each.peak_ratio:.3f}", f"{each.time_ratio:.2f}"
    error = f"{each.gradient_error:.1e}" if each.gradient_error < 1e-3 else f"{each.gradient_error:.3f}"
    return [each.method, megabytes(each.peak_bytes, 0), ratios[0], f"{each.seconds:.1f}", ratios[1], error]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints its table and writes the files asked for."""
    parser = benchmark_parser(
        "vocabulary",
        "Steps of a small Llama with a large vocabulary: peak memory and time.",
        *("json", "markdown"),
        rounds=2,
        threads=1,
    )
    for name, value in vars(Size()).items():
        parser.add_argument(f"--{name}", type=whole_number(1), default=value, help="default: %(default)s")
    parser.add_argument("--methods", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), help="default: all")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    size = Size(**{name: getattr(options, name) for name in vars(Size())})
    costs = measure(size, options.methods, options.rounds)
    write_results(options, {"size": size, "rounds": options.rounds, "results": costs}, [grid(costs)])


if __name__ == "__main__":
    main()
