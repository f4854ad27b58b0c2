"""Methods by name, and what each of them computes and stores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor

from daf_core.errors import ConfigError
from daf_integrations.cli.bench.methods import METHODS, is_method, open_method, traits
from daf_integrations.cli.bench.process_memory import SavedTensorCounter
from daf_integrations.cli.bench.summary import Gradients, compare_gradients, load_gradients, problem_of
from daf_integrations.cli.bench.worker import DROPOUT, NO_DROPOUT, Measurement, Task, measure
from daf_integrations.loop.training import trainings
from tests.integrations.cli.bench.models import Net, net
from tests.integrations.elastic_runs import count_time

MODEL = f"{Path(__file__).with_name('models.py')}:net"
ROWS, LENGTH = 16, 64
FLOAT_BYTES = 4


def run(
    method: str, folder: Path, dtype: str = "fp32", model: str = MODEL, kind: str = DROPOUT, compiled: bool = False
) -> tuple[Measurement, Gradients]:
    file = folder / "gradients.pt"
    workload = {"model": model, "batch": ROWS, "length": LENGTH}
    task = Task(
        method=method,
        workload=workload,
        dtype="bf16" if dtype == "bf16" else "fp32",
        steps=1,
        threads=torch.get_num_threads(),
        gradients=str(file),
        undropped=True,
        compiled=compiled,
    )
    return measure(task), load_gradients(file)[kind]


@pytest.mark.parametrize("name", METHODS)
def test_each_listed_method_has_a_name_that_is_known(name: str) -> None:
    assert is_method(name)


@pytest.mark.parametrize(
    "name",
    [
        *("", "daf", "daf-3bit", "daf-4bit@", "daf-4bit@40", "daf-4bit@4..2MB", "daf-step@1MB+spill"),
        *("elastic", "elastic@1", "elastic@.0", "plain@1MB", "torch-budget@2"),
    ],
)
def test_others_are_not(name: str) -> None:
    assert not is_method(name)
    with pytest.raises(ConfigError, match="there is no method"):
        open_method(name, Net())


def test_methods_that_lose_nothing_give_identical_gradients(tmp_path: Path) -> None:
    plain, expected = run("plain", tmp_path)
    for method in ("checkpoint", "daf-exact"):
        measured, found = run(method, tmp_path)
        assert compare_gradients(found.of, expected.of).identical
        assert measured.held_bytes < plain.held_bytes
        assert traits(method).exact


@pytest.mark.parametrize("method", ["bf16", "classic-8bit", "classic-4bit", "classic-2bit", "daf-4bit", "daf-auto"])
def test_others_hold_less_and_are_near(method: str, tmp_path: Path) -> None:
    plain, expected = run("plain", tmp_path)
    measured, found = run(method, tmp_path)
    assert measured.held_bytes < 0.6 * plain.held_bytes
    assert not compare_gradients(found.of, expected.of).identical
    assert problem_of(method, found, expected, 1e-4) is None
    assert compare_gradients(found.of, expected.of).error < (1.5 if "2bit" in method else 0.5)
    assert not traits(method).exact


@inductor.patch(fallback_random=True)  # the same dropouts
def test_a_compiled_model_has_the_same_gradients_and_saves_less(tmp_path: Path) -> None:
    plain, expected = run("plain", tmp_path)
    measured, found = run("plain", tmp_path, compiled=True)
    assert 0 < measured.held_bytes < plain.held_bytes
    gradients = {name.removeprefix("_orig_mod."): gradient for name, gradient in found.of.items()}
    assert compare_gradients(gradients, expected.of).error < 1e-4


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_daf_counts_the_bytes_that_plain_saves(dtype: str, tmp_path: Path) -> None:
    (plain, _), (coded, _) = (run(method, tmp_path, dtype) for method in ("plain", "daf-4bit"))
    assert coded.raw_bytes == pytest.approx(plain.raw_bytes, rel=0.01)


def test_a_budget_is_part_of_a_methods_name(tmp_path: Path) -> None:
    free, first = run("daf-4bit", tmp_path)
    size = f"{free.held_bytes // 2000}kB"
    dropped, second = run(f"daf-4bit@{size}", tmp_path)
    spilled, third = run(f"daf-4bit@{size}+spill", tmp_path)
    assert dropped.held_bytes <= free.held_bytes / 2
    assert (dropped.dropped_bytes > 0, dropped.spilled_bytes) == (True, 0)
    assert (spilled.dropped_bytes, spilled.spilled_bytes > 0) == (0, True)
    assert compare_gradients(third.of, first.of).identical
    assert not compare_gradients(second.of, first.of).identical


def test_a_budget_for_steps_and_a_share_of_the_time_are_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_time(monkeypatch)  # on a loaded machine no step may be as short as is asked
    _, expected = run("plain", tmp_path)
    exact, _ = run("daf-exact", tmp_path)
    _, undropped = run("plain", tmp_path, kind=NO_DROPOUT)
    _, within = run("daf-step@2MB", tmp_path, kind=NO_DROPOUT)
    assert problem_of("daf-step@2MB", within, undropped, 1e-4) is None
    assert not compare_gradients(within.of, undropped.of).identical, "there is no room for all of it"
    measured, part = run("elastic@0.8", tmp_path)
    assert problem_of("elastic@0.8", part, expected, 1e-4) is None
    assert measured.held_bytes < 0.95 * exact.held_bytes, "steps that train a part hold less"
    assert trainings() == []


def test_a_bound_is_kept_by_audits(tmp_path: Path) -> None:
    measured, _ = run("daf-auto<0.05", tmp_path)
    assert measured.audited_error is not None
    assert 0 < measured.audited_error < 0.05


@pytest.mark.parametrize("name", ["plain", "checkpoint", "bf16", "daf-4bit", "elastic@0.9"])
def test_a_method_leaves_the_model_as_it_was(name: str) -> None:
    model, batch = net(2, 8)
    before = [list(vars(module)) for module in model.modules()]
    method = open_method(name, model)
    method.run(batch, lambda rows: model(**rows))
    method.close()
    assert [list(vars(module)) for module in model.modules()] == before


def test_checkpointing_needs_blocks() -> None:
    with pytest.raises(ConfigError, match="finds no blocks in this model; leave it out"):
        open_method("checkpoint", nn.Linear(2, 2))


def test_counter_takes_each_storage_once_and_no_weights() -> None:
    layer = nn.Linear(6, 4)
    inputs = torch.randn(8, 6, requires_grad=True)  # else the weight would not be saved
    with SavedTensorCounter(layer) as counter:
        outputs = layer(inputs)  # saves the inputs and the weight
        (outputs.exp() + layer(inputs.view(8, 6))).sum()  # saves its own outputs, and the inputs again
    assert counter.bytes == (8 * 6 + 8 * 4) * FLOAT_BYTES


def test_counter_leaves_casts_of_weights_out() -> None:
    layer = nn.Linear(6, 4)
    inputs = torch.randn(8, 6, requires_grad=True)  # else the weight would not be saved
    with SavedTensorCounter(layer) as counter, torch.autocast("cpu", dtype=torch.bfloat16):
        layer(inputs)  # saves the inputs and the weight, both in two bytes
    assert counter.bytes == 8 * 6 * FLOAT_BYTES // 2
