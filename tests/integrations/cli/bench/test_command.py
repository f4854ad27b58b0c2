"""`daf bench`: its options, tables and files, and what it does not show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from daf_integrations.cli.bench import rounds, worker
from daf_integrations.cli.bench.rounds import checked, rotated
from daf_integrations.cli.main import main

MODELS = Path(__file__).with_name("models.py")
QUICK = ["--batch", "16", "--length", "64", "--rounds", "1", "--steps", "1", "--threads", "1"]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has tasks run here: a process of its own takes ten seconds to load."""
    threads = torch.get_num_threads()

    def run_process(module: str, task: dict[str, Any], name: str, folder: Path) -> dict[str, Any]:
        assert module == worker.__name__
        result = folder / "measurement.json"
        worker.main([json.dumps(task), str(result)])
        torch.set_num_threads(threads)
        return checked(json.loads(result.read_text()))

    monkeypatch.setattr(rounds, "run_process", run_process)


def bench(*arguments: str, model: str = "net") -> Result:
    return CliRunner().invoke(main, ["bench", f"{MODELS}:{model}", *QUICK, *arguments])


@pytest.mark.usefixtures("in_process")
def test_figures_are_shown_and_written(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("bench.json", "bench.md", "bench.png")]
    named = zip(("--json", "--markdown", "--png"), files, strict=True)
    options = [text for name, file in named for text in (name, str(file))]
    result = bench("--methods", "checkpoint,daf-4bit", *options)
    assert result.exit_code == 0, result.output
    report = json.loads(files[0].read_text())
    plain, checkpoint, coded = report["methods"]
    assert [each["method"] for each in report["methods"]] == ["plain", "checkpoint", "daf-4bit"]
    assert (plain["step_ratio"], plain["peak_ratio"], plain["gradient_error"]) == (1.0, 1.0, 0.0)
    assert checkpoint["gradients_identical"]
    assert coded["held_bytes"] < coded["raw_bytes"] == pytest.approx(plain["raw_bytes"], rel=0.01)
    assert 0 < coded["gradient_error"] < 1
    assert report["machine"].keys() == {"cpu", "cores", "threads", "torch", "python", "allocator", "dtype"}
    assert report["settings"]["workload"]["batch"] == 16
    assert report["failed"] == {}
    for table in (result.output, files[1].read_text()):
        assert "daf-4bit" in table
        assert f"{coded['held_bytes'] / 1e6:.1f}" in table
    assert files[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("in_process")
def test_no_time_is_shown_of_what_is_wrong(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    result = bench("--methods", "daf-exact", "--json", str(output), model="restless")
    assert result.exit_code == 1
    assert "daf-exact is wrong: its loss is" in result.output
    plain, wrong = json.loads(output.read_text())["methods"]
    assert plain["step_seconds"] > 0
    assert (wrong["step_seconds"], wrong["step_ratio"], wrong["rounds"]) == (None, None, [])
    [row] = [line for line in result.output.splitlines() if line.strip().startswith("daf-exact  ")]
    assert "wrong" in row


@pytest.mark.usefixtures("in_process")
def test_a_method_that_fails_stops_no_other() -> None:
    result = bench("--methods", "checkpoint,offload", "--json", "-", model="single")
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert [each["method"] for each in report["methods"]] == ["plain"]
    assert set(report["failed"]) == {"checkpoint", "offload"}
    assert "finds no blocks" in report["failed"]["checkpoint"]


class Limited:
    """Has methods run out of memory.

    Args:
        monkeypatch: Puts it in the place of `worker.measure`.
        fitting: How often a method fits; those that are not named always do.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **fitting: int) -> None:
        self._measure, self._left = worker.measure, fitting
        self.measured: list[str] = []
        monkeypatch.setattr(worker, "measure", self.measure)

    def measure(self, task: worker.Task) -> worker.Measurement:
        name = task.method.replace("-", "_")
        left = self._left.get(name, 1)
        self._left[name] = left - (name in self._left)
        if left == 0:
            raise torch.OutOfMemoryError("tried to allocate 90 GiB")
        self.measured.append(task.method)
        return self._measure(task)


@pytest.mark.usefixtures("in_process")
def test_where_plain_does_not_fit_others_are_compared_with_what_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Limited(monkeypatch, plain=0)
    files = [tmp_path / "bench.json", tmp_path / "bench.png"]
    methods = "elastic@0.8,classic-4bit,daf-exact,checkpoint,daf-step@2MB"
    result = bench("--methods", methods, "--json", str(files[0]), "--png", str(files[1]))
    assert result.exit_code == 1
    assert "plain failed: memory ran out: OutOfMemoryError: tried to allocate 90 GiB" in result.output
    assert "Plain training did not fit: ratios, errors and checks are relative to checkpoint" in result.output
    report = json.loads(files[0].read_text())
    assert report["reference"] == "checkpoint", "a method that is not DAF's, of all parameters"
    found = {each["method"]: each for each in report["methods"]}
    assert list(found) == methods.split(",")
    assert (found["checkpoint"]["step_ratio"], found["checkpoint"]["gradient_error"]) == (1.0, 0.0)
    assert 0 < found["classic-4bit"]["gradient_error"] < 1
    assert not any(each["problem"] for each in report["methods"]), "the last splits its batch"


@pytest.mark.usefixtures("in_process")
def test_what_fails_later_is_left_out_and_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    Limited(monkeypatch, plain=1, checkpoint=1)
    result = bench("--methods", "checkpoint,daf-exact,bf16", "--rounds", "2", "--json", "-")
    report = json.loads(result.output)
    assert report["reference"] == "daf-exact"
    assert set(report["failed"]) == {"plain", "checkpoint"}
    assert [(each["method"], len(each["rounds"])) for each in report["methods"]] == [("daf-exact", 2), ("bf16", 2)]


@pytest.mark.usefixtures("in_process")
def test_where_nothing_exact_fits_the_first_round_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = Limited(monkeypatch, plain=0, checkpoint=0)
    result = bench("--methods", "bf16,checkpoint", "--rounds", "3")
    assert result.exit_code == 1
    output = " ".join(result.output.split())
    assert "could be compared with; add daf-exact to --methods, or pass a smaller --batch or --length" in output
    assert "checkpoint: memory ran out: OutOfMemoryError: tried to allocate 90 GiB" in output
    assert limited.measured == ["bf16"]


@pytest.mark.usefixtures("in_process")
def test_other_errors_of_plain_training_are_no_lack_of_memory() -> None:
    result = bench("--methods", "checkpoint", model="broken")
    assert isinstance(result.exception, RuntimeError)
    assert str(result.exception) == "boom"


@pytest.mark.usefixtures("in_process")
def test_a_model_that_is_not_there_is_told() -> None:
    result = bench(model="missing")
    assert result.exit_code == 1
    assert "has no function 'missing'" in " ".join(result.output.split())


def test_each_task_has_a_process_of_its_own() -> None:
    """What does not run says why in a sentence, and the others run."""
    result = bench("--methods", "daf-step@1kB", "--json", "-", model="alone")
    assert result.exit_code == 1, result.output
    report = json.loads(result.output)
    assert [each["method"] for each in report["methods"]] == ["plain"]
    assert report["failed"]["daf-step@1kB"].startswith("a training step takes")
    ended = bench("--methods", "plain", model="ending")
    assert ended.exit_code == 1
    assert "ended with code 7: no more of this\nCorrect what it says" in ended.output
    killed = bench("--methods", "plain", model="killed")
    assert killed.exit_code == 1
    assert "plain: the process for 'plain' was killed, as where memory runs out" in killed.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "plain,daf-3bit"], "got 'daf-3bit'; allowed are plain, checkpoint, offload, bf16"),
        (["--methods", "bf16,bf16"], "repeats a method; name each one once"),
        (["--methods", ""], "got ''; allowed are plain"),
        (["--rounds", "0"], "0 is not in the range x>=1"),
        (["--dtype", "fp8"], "'fp8' is not one of 'fp32', 'bf16'"),
        (["--json", "out.txt"], "give a file that ends in .json"),
        (["--lora", "4"], "--lora is for Hugging Face models"),
    ],
)
def test_wrong_options_are_refused_before_work(arguments: list[str], message: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_methods_are_listed() -> None:
    result = CliRunner().invoke(main, ["bench", "--list-methods"])
    assert result.exit_code == 0
    assert "classic-4bit" in result.output


def test_rounds_rotate() -> None:
    assert [rotated("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
