"""The comparison with a small suite of a peer's, in which one test fails with DAF alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.__main__ import Result, differences, main, parse_arguments, report, results_in

SUITE = """
import pytest, torch
from accelerate import Accelerator
from torch import nn

def train():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model, optimizer = (accelerator := Accelerator(cpu=True)).prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.randn(256, 64)).mean())
    optimizer.step()
    return model

def test_trains():
    train()

def test_is_left_alone():
    assert "forward" not in vars(train()), "its forward was replaced"

def test_never_passes():
    raise ValueError

@pytest.mark.skip
def test_does_not_run():
    raise ValueError
"""

STATES = """
import dataclasses
from pathlib import Path
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 1)

    def forward(self, x):
        return {"loss": self.layer(x).sin().mean()}

def state(folder):
    torch.manual_seed(0)
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "max_steps": 2}
    data = [{"x": torch.ones(64)}] * 8
    trainer = Trainer(Model(), TrainingArguments(folder, save_strategy="no", **options), train_dataset=data)
    trainer.train()
    found = dataclasses.asdict(trainer.state)
    return found["stateful_callbacks"], found["log_history"][:-1]

def test_runs_end_alike(tmp_path: Path):
    assert state(tmp_path) == state(tmp_path)

def test_callbacks(tmp_path: Path):
    assert "DAFCallback" not in state(tmp_path)[0]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A package `tests`, as most peers have one."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "helpers.py").write_text(SUITE.partition("def test_")[0])
    (folder / "test_training.py").write_text(f"from tests.helpers import train\n{SUITE}")
    return tmp_path


def test_says_what_fails_with_daf_alone(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what was raised."""
    arguments = ["--accelerate", str(checkout), "--paths", "tests/test_training.py", "--precision", "exact"]
    assert main(arguments, {}) == 1
    printed = capsys.readouterr().out
    assert "accelerate without DAF: 2 passed, 1 skipped, 1 failed" in printed
    assert "accelerate exact: 1 passed, 1 skipped, 2 failed" in printed
    [line] = [line for line in printed.splitlines() if line.startswith("accelerate:exact ")]
    assert line.startswith("accelerate:exact tests/test_training.py::test_is_left_alone: AssertionError: its forward")
    assert "NOT EXPLAINED" in printed
    assert report(line, {"exact .*is_left_alone": "prepare wraps forward"})
    assert "prepare wraps forward" in capsys.readouterr().out


def test_states_of_trainers_are_without_times(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tests compare those of two runs."""
    (checkout / "tests" / "test_states.py").write_text(STATES)
    assert main(["--transformers", str(checkout), "--paths", "tests/test_states.py", "--precision", "exact"], {}) == 1
    printed = capsys.readouterr().out
    assert "transformers exact: 1 passed, 0 skipped, 1 failed" in printed
    assert "test_callbacks: AssertionError" in printed


def test_a_suite_that_does_not_run_is_no_success(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And its error is shown; with DAF it does not run then."""
    (checkout / "tests" / "test_training.py").write_text("import no_such_module")
    assert main(["--accelerate", str(checkout), "--paths", "tests/test_training.py"], {}) == 2
    printed = capsys.readouterr().out
    assert "No module named 'no_such_module'" in printed
    assert "exact" not in printed


def test_the_worst_of_a_test_counts(tmp_path: Path) -> None:
    """One that passes and whose fixtures cannot be torn down has failed; one that is missing, too."""
    file = tmp_path / "results"
    file.write_text(
        '{"test": "a", "outcome": "passed", "error": ""}\n{"test": "a", "outcome": "failed", "error": "late"}\n'
    )
    assert results_in(file) == {"a": Result("failed", "late")}
    plain = {"a": Result("passed"), "b": Result("passed"), "c": Result("failed")}
    assert differences(plain, results_in(file)) == ["a: late", "b: did not run: the process ended before"]
    assert results_in(tmp_path / "none") == {}


@pytest.mark.parametrize("arguments", [[], ["--peft", "/no/such/folder"], ["--precision", "4"]])
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert "error: " in capsys.readouterr().err
