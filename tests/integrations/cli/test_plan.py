"""`daf plan`: what it plans for models that are made on the spot, and what it says of those that cannot be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import daf_integrations as daf
from daf_core.plan.policies import COMPRESS, KEEP
from daf_core.plan.run import step_planner
from daf_integrations.cli.main import main
from daf_integrations.cli.plan import OUTSIDE, PlannedBlock, joined
from daf_integrations.cli.workload import Workload, build
from daf_integrations.loop.training import training_of

pytest.importorskip("transformers", reason="plans are made for models of transformers")
pytest.importorskip("peft", reason="plans are made for LoRA")

SIZE = ("--batch", "4", "--length", "64")
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 2, "vocab_size": 256, "n_positions": 64}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
BERT = {
    **{"model_type": "bert", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "vocab_size": 256, "max_position_embeddings": 64},
}


def folder_of(path: Path, **config: Any) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def gpt2(tmp_path: Path) -> str:
    return folder_of(tmp_path, **GPT2, **TOKENS)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def report(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_plans_keep_their_budgets_down_to_the_least(gpt2: str) -> None:
    found = report(gpt2, *SIZE)
    budgets = [plan["budget_bytes"] for plan in found["plans"]]
    assert budgets[0] == found["plain"]["peak_bytes"]
    assert budgets[-1] == found["least_budget_bytes"] < budgets[0] / 4
    assert budgets == sorted(budgets, reverse=True)
    assert all(0 < plan["peak_bytes"] <= plan["budget_bytes"] for plan in found["plans"])
    first, last = found["plans"][0], found["plans"][-1]
    assert {block["treatment"] for block in first["blocks"]} == {"keep"}
    assert last["micro_batches"] == 4
    assert (found["task"], found["dtype"]) == ("causal-lm", "float32")


def test_table_joins_alike_blocks_and_shows_plain_training(gpt2: str) -> None:
    output = run(gpt2, *SIZE, "--budget", "100MB").output
    assert "h.1 - h.2" in output  # the input of the first block has no gradient: it saves less
    assert "plain training" in output
    assert "Smallest budget that can be met" in output
    assert "Weights are random" in output


def test_several_budgets_make_a_row_each(gpt2: str) -> None:
    output = run(gpt2, *SIZE, "--budget", "50MB", "--budget", "100MB").output
    assert "50 MB" in output
    assert "100 MB" in output
    assert "parts" in output


def test_a_budget_that_no_plan_meets_is_an_error(gpt2: str) -> None:
    result = run(gpt2, *SIZE, "--budget", "1000")
    assert result.exit_code == 1
    assert "memory_budget allows 1 KB; tried: fewer bits, recomputation of 3 blocks, micro-batches" in result.output


def test_exact_plans_lose_nothing_and_take_more(gpt2: str) -> None:
    exact, lossy = (report(gpt2, *SIZE, "--precision", precision) for precision in ("exact", "4"))
    assert all(plan["bits"] is None for plan in exact["plans"])
    assert {plan["bits"] for plan in lossy["plans"]} >= {None, 4}, "nothing is lost where there is room"


def test_models_that_are_no_language_models_classify(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, **BERT)
    assert report(folder, *SIZE, "--budget", "1GB")["task"] == "sequence-classification"
    assert report(folder, *SIZE, "--budget", "1GB", "--task", "token-classification")["task"] == "token-classification"


def test_full_training_saves_more_than_lora(gpt2: str) -> None:
    full, lora = (report(gpt2, *SIZE, "--budget", "1GB", option) for option in ("--full", "--lora=2"))
    assert full["plans"][0]["blocks"][0]["held_bytes"] != lora["plans"][0]["blocks"][0]["held_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "12 parsecs"], "is not a size; give a positive number of bytes or a size such as"),
        (["--batch", "0"], "0 is not in the range x>=1"),
        (["--precision", "3"], "'3' is not one of 'auto', 'exact', '8', '4', '2', '1'"),
        (["--task", "chess"], "'chess' is not one of 'causal-lm'"),
        (["--full", "--lora", "4"], "--lora and --full exclude each other"),
    ],
)
def test_wrong_options_are_answered_with_what_is_allowed(gpt2: str, arguments: list[str], message: str) -> None:
    result = run(gpt2, *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_rows_that_are_too_long(gpt2: str) -> None:
    result = run(gpt2, "--length", "65")
    assert result.exit_code == 1
    assert "does not run on a row of 65 tokens" in result.output
    assert "Pass a smaller --length" in result.output


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    result = run(str(tmp_path))
    assert result.exit_code == 1
    assert "no configuration is found for the folder" in result.output


def test_a_model_that_does_not_do_the_task(tmp_path: Path) -> None:
    config = {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    result = run(folder_of(tmp_path, **config), "--task", "causal-lm")
    assert result.exit_code == 1
    assert "cannot be made for the task 'causal-lm'" in result.output


def test_a_configuration_with_a_value_of_another_type(tmp_path: Path) -> None:
    result = run(folder_of(tmp_path, model_type="gpt2", n_layer="two"))
    assert result.exit_code == 1
    assert "no configuration is found for the folder" in result.output
    assert "n_layer" in result.output


FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    def forward(self, x):
        return self.layers(x).square().mean()

class Detached(Net):
    def forward(self, x):
        return super().forward(x).detach()

def frozen(rows, length):
    return Net().requires_grad_(False), {"x": torch.randn(rows, length, 64)}

def detached(rows, length):
    return Detached(), {"x": torch.randn(rows, length, 64)}

def meta(rows, length):
    return Net().to("meta"), {"x": torch.randn(rows, length, 64)}

class Forces(Net):
    def forward(self, x):
        x = x.requires_grad_()
        [force] = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
        return super().forward(x) + force.square().mean()

def forces(rows, length):
    return Forces(), {"x": torch.randn(rows, length, 64)}

def compiled(rows, length):
    return torch.compile(Net(), backend="eager"), {"x": torch.randn(rows, length, 64)}
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (":frozen", "Net has no parameter that requires a gradient"),
        (":detached", "no gradient flows from the loss to the model; return the loss itself, not loss.detach()"),
        (":meta", "returned a model on device 'meta', which has no values; build it on the CPU"),
        (":compiled", "is compiled, and what a graph of torch.compile takes is not measured"),
        ("", "names no function in it; give MODEL as FILE.py:FUNCTION"),
    ],
)
def test_models_that_cannot_be_planned(function: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FILE)
    result = run(f"{tmp_path}/net.py{function}", *SIZE)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())


def test_a_model_that_takes_a_gradient_in_forward_is_planned(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FILE)
    result = run(f"{tmp_path}/net.py:forces", "--precision", "exact", *SIZE)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("package", ["transformers", "peft"])
def test_missing_packages_are_named(gpt2: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    result = run(gpt2, *SIZE)
    assert result.exit_code == 1
    assert f"needs {package}, which is not installed" in result.output


def test_only_alike_neighbours_are_joined() -> None:
    rows = [
        (OUTSIDE, KEEP, 10),
        ("a.h.0", KEEP, 10),
        ("a.h.1", KEEP, 10),
        ("a.h.2", COMPRESS, 2),
        ("a.h.3", COMPRESS, 3),
    ]
    found = [(name, count) for name, count, _ in joined([PlannedBlock(*row) for row in rows])]
    assert found == [(OUTSIDE, 1), ("h.0 - h.1", 2), ("h.2", 1), ("h.3", 1)]


def test_batches_of_models_that_count_their_passes_stay_whole(tmp_path: Path) -> None:
    """As in training: each part would count."""
    file = tmp_path / "counting.py"
    file.write_text(
        "from torch.utils.data import default_collate\n"
        "from tests.integrations.session.test_traces import DATA, Net\n"
        "def made(rows, length):\n"
        "    return Net().train(), default_collate(DATA[:rows])\n"
    )
    result = run(f"{file}:made", "--batch", "32", "--precision", "exact", "--budget", "30KB")
    assert result.exit_code == 1
    assert "no micro-batches (each forward pass changes blocks.0." in result.output


def test_a_saved_plan_is_followed_by_a_training(gpt2: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> None:
        raise AssertionError("the plan is there")

    path, budget = tmp_path / "plan.json", 3_000_000
    path.write_text("of an earlier model")
    [plan] = report(gpt2, *SIZE, "--budget", str(budget), "--save", str(path))["plans"]
    written = path.read_text()
    sized = build(Workload(model=gpt2, batch=4, length=64, lora_rank=8))
    model = daf.prepare(sized.model, memory_budget=budget, plan_file=str(path))
    monkeypatch.setattr(step_planner, "measure", measure)
    daf.step(model, sized.batch)
    training = training_of(model)
    assert training is not None
    assert training.session.runner is not None
    followed = training.session.runner.plan
    assert followed is not None
    assert (followed.parts, followed.forecast.peak_bytes) == (plan["micro_batches"], plan["peak_bytes"])
    assert [each.words for each in followed.blocks] == [block["treatment"] for block in plan["blocks"]]
    assert path.read_text() == written
    training.stop()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--save", "plan.json"), "--save takes the plan for one budget; pass --budget once"),
        (("--save", "plan.json", "--budget", "5MB", "--budget", "6MB"), "--save takes the plan for one budget"),
        (("--save", "missing/plan.json", "--budget", "5MB"), "--save missing/plan.json: there is no such folder"),
    ],
)
def test_what_cannot_be_saved(gpt2: str, arguments: tuple[str, ...], message: str) -> None:
    result = run(gpt2, *SIZE, *arguments)
    assert result.exit_code == 2
    assert message in result.output
