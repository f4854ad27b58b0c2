"""Compares what ``daf plan --device`` says of five models, from their configurations, with what ``daf bench`` measures.

Run ``daf run -m benchmarks.fits --json fits.json --markdown fits.md``: glibc's allocator keeps what
a process has freed. All methods run in one process, as `measure` starts a new peak for each.
"""

import gc
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.harness import benchmark_parser, megabytes, whole_number, write_results
from daf_core.plan.observe.without_values import without_values
from daf_integrations.cli.bench.tables import Grid
from daf_integrations.cli.bench.worker import Task, measure
from daf_integrations.cli.fit import TREATMENTS, Device, standing_of
from daf_integrations.cli.workload import Workload, build

METHODS = {"plain": "plain", "checkpoint": "checkpointing", "daf-4bit": "DAF, 4 bits"}
"""Methods of ``daf bench``, and what ``daf plan`` calls them."""

_DECODER = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "roberta": {
        **{"model_type": "roberta", "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "vocab_size": 8000, "max_position_embeddings": 514, "pad_token_id": 1},
    },
    "gpt2": {
        **{"model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
        "vocab_size": 8000,
    },
    "llama": {"model_type": "llama", **_DECODER, "intermediate_size": 352, "vocab_size": 8000},
    "qwen3": {
        **{"model_type": "qwen3", **_DECODER, "head_dim": 32, "intermediate_size": 384, "vocab_size": 12000},
        "tie_word_embeddings": True,
    },
    "t5": {
        **{"model_type": "t5", "d_model": 128, "d_ff": 512, "d_kv": 32, "num_layers": 4, "num_heads": 4},
        **{"decoder_start_token_id": 0, "vocab_size": 8000},
    },
}
"""Narrow models: of many rows they take hundreds of megabytes, and little time."""

RANK = 8


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Peaks of a step in bytes, beside weights and optimizer; `lora_rank` is None where all weights are trained."""

    model: str
    lora_rank: int | None
    method: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def ratio(self) -> float:
        """What was predicted, of what was measured."""
        return self.predicted_bytes / self.measured_bytes


def compared(name: str, workload: Workload, threads: int) -> Iterator[Compared]:
    """Yields the peaks of a workload by method, as they are predicted and as ``daf bench`` measures them."""
    with without_values():
        sized = build(workload, "meta")
        updating = standing_of(sized.model, Device(1 << 40, is_gpu=False)).updating
        predicted: dict[str, int] = {}
        for method, treatment in METHODS.items():
            with TREATMENTS[treatment](sized.model) as count:
                predicted[method] = max(count(sized).peak, updating)
    del sized
    for method, size in predicted.items():
        gc.collect()  # what is left of the method before would be given back while this one is measured
        task = Task(method=method, workload=asdict(workload), dtype="fp32", steps=2, threads=threads)
        yield Compared(
            model=name,
            lora_rank=workload.lora_rank,
            method=method,
            predicted_bytes=size,
            measured_bytes=measure(task).peak_bytes,
        )


def grid(found: Sequence[Compared], size: str) -> Grid:
    """Returns a table with a row for each model and method."""
    rows = [
        [
            each.model,
            "all weights" if each.lora_rank is None else f"LoRA r={each.lora_rank}",
            each.method,
            *(megabytes(size, 0) for size in (each.predicted_bytes, each.measured_bytes)),
            f"{each.ratio:.3f}",
        ]
        for each in found
    ]
    return Grid(f"Peak of a step, {size}", ("model", "trained", "method", "predicted MB", "measured MB", "ratio"), rows)


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark with these command-line arguments."""
    parser = benchmark_parser("fits", "Compare predicted with measured peaks.", "json", "markdown", threads=1)
    parser.add_argument("--batch", type=whole_number(1), default=16, help="rows of a batch")
    parser.add_argument("--length", type=whole_number(2, 512), default=256, help="tokens of a row")
    parser.add_argument("--models", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS), help="which")
    options = parser.parse_args(arguments)
    found: list[Compared] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, rank in track([(name, rank) for name in options.models for rank in (RANK, None)], transient=True):
            path = Path(folder, name)
            path.mkdir(exist_ok=True)
            (path / "config.json").write_text(json.dumps(CONFIGURATIONS[name]))
            workload = Workload(model=str(path), batch=options.batch, length=options.length, lora_rank=rank)
            found += compared(name, workload, options.threads)
    write_results(options, {"compared": found}, [grid(found, f"{options.batch} x {options.length}, fp32")])


if __name__ == "__main__":
    main(sys.argv[1:])
