"""Trains a row of many tokens in a memory budget, with the plan that is made from the configuration alone.

Run ``daf run -m benchmarks.long_text --tokens 32768 --budget 1.5GB --json long_text.json``: glibc's allocator keeps
what a process has freed. Plans are made on torch's device "meta", so that no pass is measured before the step: of a row
that takes many minutes there would be ten. ``--plain`` trains the same row without DAF.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

import daf_integrations as daf
from benchmarks.harness import benchmark_parser, megabytes, whole_number, write_results
from daf_core import DAFConfig
from daf_core.errors import PlanError
from daf_core.memory.system.release import release_free_memory
from daf_core.plan.cost.measure import measure
from daf_core.plan.observe.meter import TensorMeter
from daf_core.plan.observe.without_values import without_values
from daf_core.plan.plan_file import NamedPlan, PlanFile
from daf_core.plan.run.runner import described
from daf_core.plan.run.step_planner import digest_of, trained_in
from daf_core.plan.search.planner import find_plan, least_budget
from daf_core.rewrites.registry import OperatorRewrites
from daf_integrations.cli.bench.process_memory import peak_bytes, reset_peak, resident_bytes
from daf_integrations.cli.bench.tables import Grid
from daf_integrations.cli.fit import UNLIMITED
from daf_integrations.cli.workload import BuiltWorkload, Workload, build
from daf_integrations.loop.training import training_of

CONFIGURATION: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8},
    **{"num_attention_heads": 8, "vocab_size": 128256, "use_cache": False},
}
RANK = 8
ROWS = 1


@dataclass(frozen=True, kw_only=True)
class LongStep:
    """A step with one row; sizes in bytes beside weights, with gradients.

    Attributes:
        tokens: Of the row.
        budget: `memory_budget`; None for plain training.
        planned_bytes: What the plan expects, without gradients; None for plain training.
        tensor_bytes: Most bytes of tensors, and of DAF's pages, at once.
        resident_bytes: Largest size of the process above that before the step.
        seconds: Of the step.
        loss: What it computes.
    """

    tokens: int
    budget: str | None
    planned_bytes: int | None
    tensor_bytes: int
    resident_bytes: int
    seconds: float
    loss: float


def planned(workload: Workload, config: DAFConfig, file: Path) -> int:
    """Writes the plan of a step, made without values, to a file; returns the bytes that it expects.

    Raises:
        PlanError: No plan keeps the budget.
    """
    assert isinstance(config.memory_budget, int)
    with without_values():
        sized = build(workload, "meta")
        rewrites = OperatorRewrites(sized.model)
        rewrites.apply()
        batch = described(sized.model, sized.batch, sized.loss)
        profile = measure(sized.model, config, batch.loss_of, batch.rows, UNLIMITED)
        size = batch.size(batch.length)
        plan = find_plan(profile, size, config.memory_budget, config, splits=False)
        if plan is None:
            least = least_budget(profile, size, config, splits=False)
            raise PlanError(config.memory_budget, least, "a row is not split")
    model = with_values(workload).model
    plans = PlanFile(str(file), config, model)
    plans.begin_batch()
    plans.add_plan(batch.kind("one row", digest_of(trained_in(model))), NamedPlan(tuple(profile.names), plan))
    return plan.forecast.peak_bytes


def with_values(workload: Workload) -> BuiltWorkload:
    """Returns the model and its row on the CPU; `build` alone would try it on the whole row, with all of its logits."""
    sized = build(replace(workload, length=2), "cpu")
    ids = torch.randint(CONFIGURATION["vocab_size"], (ROWS, workload.length))
    return replace(sized, batch={"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})


def stepped(model: nn.Module, sized: BuiltWorkload) -> tuple[int, int, float, float]:
    """Trains a step; returns the most bytes of tensors and of the process above those before, seconds and the loss."""
    training = training_of(model)
    engine = None if training is None else training.session._engine
    optimizer = SGD([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    release_free_memory()
    before = resident_bytes()
    reset_peak()
    with TensorMeter(int if engine is None else lambda: engine.resident_bytes) as meter:
        start = time.monotonic()
        loss = daf.step(model, sized.batch, sized.loss)
        optimizer.step()
        seconds = time.monotonic() - start
        return meter.take_peak(), peak_bytes() - before, seconds, float(loss)


def trained(tokens: int, budget: str | None, folder: Path) -> LongStep:
    """Trains a step with a row of so many tokens."""
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIGURATION, "max_position_embeddings": tokens}))
    workload = Workload(model=str(folder), batch=ROWS, length=tokens, lora_rank=RANK)
    expected, file = None, folder / "plan.json"
    config = DAFConfig(memory_budget=budget or "auto", precision=8, audit_every=None, plan_file=str(file))
    if budget is not None:
        expected = planned(workload, config, file)
    sized = with_values(workload)
    model = sized.model if budget is None else daf.prepare(sized.model, config)
    tensors, resident, seconds, loss = stepped(model, sized)
    return LongStep(
        tokens=tokens,
        budget=budget,
        planned_bytes=expected,
        tensor_bytes=tensors,
        resident_bytes=resident,
        seconds=seconds,
        loss=loss,
    )


def grid(found: Sequence[LongStep]) -> Grid:
    """Returns a table with a row for each step."""
    rows = [
        [
            f"{each.tokens:,}",
            each.budget or "plain",
            "" if each.planned_bytes is None else megabytes(each.planned_bytes, 0),
            *(megabytes(size, 0) for size in (each.tensor_bytes, each.resident_bytes)),
            f"{each.seconds:.0f}",
            f"{each.loss:.4f}",
        ]
        for each in found
    ]
    headings = ("tokens", "budget", "planned MB", "tensors MB", "process MB", "seconds", "loss")
    return Grid("a step with one row", headings, rows)


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark with these command-line arguments."""
    parser = benchmark_parser("long_text", "Train one long row within a budget.", "json", "markdown")
    parser.add_argument("--tokens", type=whole_number(2), default=32768, help="default: %(default)s")
    parser.add_argument("--budget", default="1.5GB", help="memory_budget; default: %(default)s")
    parser.add_argument("--plain", action="store_true", help="without DAF, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        budgets = [options.budget, *([None] if options.plain else [])]
        found = [trained(options.tokens, budget, Path(folder)) for budget in budgets]
    write_results(options, {"configuration": CONFIGURATION, "steps": found}, [grid(found)])


if __name__ == "__main__":
    main(sys.argv[1:])
