"""Runs methods in turn, each in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from daf_core.errors import ProfileError
from daf_integrations.cli.allocator import AUTO, is_preloaded, library_of, preloading
from daf_integrations.cli.bench.methods import traits
from daf_integrations.cli.bench.summary import MethodResult, Reference, load_gradients, summarize
from daf_integrations.cli.bench.worker import ERROR, OUT_OF_MEMORY, Measurement, Task
from daf_integrations.cli.doctor import MMAP_THRESHOLD, SMALL_BLOCK
from daf_integrations.cli.workload import Workload

EXACT = ("checkpoint", "daf-exact")  # what can take plain training's place anywhere
KILLED = 9  # SIGKILL, for which Windows has no name
PRINTED = 2000  # characters of what a process printed last that its error shows


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The methods to compare, "plain" among them, and how: each has `rounds` processes, which time `steps` steps.

    With "bf16" they run under autocast, over the model's own weights; `threads` are those of torch.
    """

    workload: Workload
    methods: tuple[str, ...]
    dtype: Literal["fp32", "bf16"]
    rounds: int
    steps: int
    threads: int
    compiled: bool = False


class Results(NamedTuple):
    """The figures of the methods that ran, in the order in which they were asked for, and where they ran.

    Attributes:
        reference: The method that they are compared with: "plain", or where that does not fit the first exact one.
        failed: What others ended with, by name.
    """

    methods: list[MethodResult]
    reference: str
    failed: dict[str, str]
    device: str
    allocator: str


class WorkerError(ProfileError):
    """A measuring process ended with an error."""


class WorkerMemoryError(WorkerError):
    """A measuring process ran out of memory."""


def compare(asked: Comparison, begin: Callable[[str], None] = lambda _: None) -> Results:
    """Runs each method in each round, each round beginning with another one; tells `begin` what runs next.

    Raises:
        WorkerError: Plain training fails for another reason than memory, or nothing exact runs either.
    """
    measured: dict[str, list[Measurement]] = {method: [] for method in asked.methods}
    failed: dict[str, str] = {}
    ran, standard = list(asked.methods), "plain"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = {method: folder / f"{number}.pt" for number, method in enumerate(asked.methods)}
        for turn in range(asked.rounds):
            for method in rotated(asked.methods, turn):
                begin(f"round {turn + 1}: {method}")
                if method in failed:
                    continue
                try:
                    measured[method].append(_measure(asked, method, files[method] if turn == 0 else None, folder))
                except WorkerError as error:
                    if method == "plain" and not isinstance(error, WorkerMemoryError):
                        raise
                    failed[method] = str(error)
            ran = [method for method in asked.methods if method not in failed]
            standard = _standard(ran, failed)
        reference = Reference(standard, measured[standard], load_gradients(files[standard]))
        # One at a time: with all parameters trained, gradients are as large as the model.
        results = [summarize(each, measured[each], load_gradients(files[each]), reference) for each in ran]
    first = reference.rounds[0]
    return Results(results, standard, failed, first.device, first.allocator)


def _standard(ran: Sequence[str], failed: Mapping[str, str]) -> str:
    """Returns the method that others are compared with: plain, or of the exact ones that ran one that is not DAF's."""
    exact = [method for method in ran if traits(method).can_be_reference]
    if not exact:
        reasons = [f"{method}: {first_line(text)}" for method, text in failed.items()]
        missing = [method for method in EXACT if method not in failed]
        add = f"add {' or '.join(missing)} to --methods, or " if missing else ""
        raise WorkerError(
            "plain training does not fit, and nothing exact ran that others could be compared with; "
            + "\n".join([f"{add}pass a smaller --batch or --length", *reasons])
        )
    return min(exact, key=lambda method: (method != "plain", method.startswith("daf")))


def first_line(text: str) -> str:
    """Returns what of a failure's text says why."""
    return (text.strip().splitlines() or [""])[0]


def rotated(methods: Sequence[str], turn: int) -> list[str]:
    """Returns the methods in the order of a round, so that none always runs first."""
    start = turn % len(methods)
    return [*methods[start:], *methods[:start]]


def run_process(
    module: str, task: Mapping[str, Any], name: str, folder: Path, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Has a module measure a task in a process of its own.

    Args:
        module: Takes the JSON of the task, and the file that it writes the JSON of its figures to.
        task: What to run; "threads" are those of torch.
        name: Of the task, for messages.
        folder: Where the process may leave its result.
        environment: None for the variables of this process, with an allocator that gives freed blocks back.

    Raises:
        WorkerMemoryError: Memory does not suffice.
        WorkerError: The process fails for another reason; the message ends with what it printed.
    """
    result = folder / "measurement.json"
    result.unlink(missing_ok=True)
    imported = os.pathsep.join(filter(None, sys.path))  # the process imports what this one would
    variables = environment or _with_allocator()
    process = subprocess.run(
        [sys.executable, "-m", module, json.dumps(task), str(result)],
        env={**variables, "PYTHONPATH": imported, "OMP_NUM_THREADS": str(task["threads"])},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    printed = process.stderr[-PRINTED:].strip()
    if process.returncode == -KILLED:  # by Linux, where main memory has run out
        raise WorkerMemoryError(f"the process for {name!r} was killed, as where memory runs out\n{printed}")
    if process.returncode or not result.exists():
        last = (printed.splitlines() or ["nothing was printed"])[-1]
        raise WorkerError(
            f"the process for {name!r} ended with code {process.returncode}: {last}\n"
            f"Correct what it says and run again. It printed:\n{printed}"
        )
    return checked(json.loads(result.read_text()))


def checked(found: dict[str, Any]) -> dict[str, Any]:
    """Returns what a process measured.

    Raises:
        WorkerMemoryError: It ran out of memory.
        WorkerError: It could not measure for another reason.
    """
    if OUT_OF_MEMORY in found:
        raise WorkerMemoryError(found[OUT_OF_MEMORY])
    if ERROR in found:
        raise WorkerError(found[ERROR])
    return found


def _measure(asked: Comparison, method: str, gradients: Path | None, folder: Path) -> Measurement:
    task = Task(
        method=method,
        workload=asdict(asked.workload),
        dtype=asked.dtype,
        steps=asked.steps,
        threads=asked.threads,
        gradients=str(gradients) if gradients else "",
        undropped=any(traits(each).splits for each in asked.methods),
        compiled=asked.compiled,
    )
    return Measurement(**run_process("daf_integrations.cli.bench.worker", asdict(task), method, folder))


def _with_allocator() -> dict[str, str]:
    library = library_of(AUTO)
    if library is not None or is_preloaded():
        return preloading(library)
    return {MMAP_THRESHOLD: str(SMALL_BLOCK), **os.environ}
