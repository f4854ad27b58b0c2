"""Tests of the examples: their text, the options they refuse, and one tiny run of each."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.integrations.elastic_runs import count_time
from tests.integrations.quantized import needs

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
Load = Callable[[str], ModuleType]

TWO_LABELS = [
    *({"text": f"a warm and funny film, number {number}", "label": "good"} for number in range(8)),
    *({"text": f"two dull hours, number {number}", "label": "bad"} for number in range(8)),
]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Imports a module of examples/, which a script there finds in its own folder."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return written(tmp_path / "data.jsonl", *map(json.dumps, TWO_LABELS))


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def stdlib_task() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return importlib.import_module("support.stdlib_text").stdlib_task(families=8, seed=3)


class TestStdlibText:
    def test_the_same_seed_builds_the_same_task(self, load: Load, stdlib_task: Any) -> None:
        assert load("support.stdlib_text").stdlib_task(families=8, seed=3) == stdlib_task

    def test_another_seed_holds_other_texts_out(self, load: Load) -> None:
        texts = {"a": list("abcdefgh"), "b": list("ijklmnop")}
        one, other = (load("support.text_task").hold_out(texts, test_share=0.5, seed=seed) for seed in (0, 1))
        assert set(one.test.texts) != set(other.test.texts)
        assert one.train.texts != sorted(one.train.texts)

    def test_every_label_has_equally_many_texts(self, stdlib_task: Any) -> None:
        assert len(stdlib_task.label_names) == 8
        for part in (stdlib_task.train, stdlib_task.test):
            assert len(part.texts) == len(part.labels)
            assert len({part.labels.count(label) for label in range(8)}) == 1
        assert len(stdlib_task.train.texts) > 2 * len(stdlib_task.test.texts) > 400

    def test_training_and_test_texts_do_not_overlap(self, stdlib_task: Any) -> None:
        distinct = {*stdlib_task.train.texts, *stdlib_task.test.texts}
        assert len(distinct) == len(stdlib_task.train.texts) + len(stdlib_task.test.texts)
        assert all(5 <= len(text.split()) <= 60 for text in distinct)

    def test_a_docstring_of_two_families_is_left_out(self, load: Load, tmp_path: Path) -> None:
        for family in ("alpha", "beta"):
            written(tmp_path / f"{family}.py", f'"""This one text is only in {family}."""', "def f():")
            with (tmp_path / f"{family}.py").open("a") as source:
                source.write('    """This text is in both of the families."""\n')
        assert load("support.stdlib_text").docstrings_by_family(stdlib=tmp_path) == {
            "alpha": ["This one text is only in alpha."],
            "beta": ["This one text is only in beta."],
        }

    def test_a_python_without_sources_is_refused(self, load: Load, tmp_path: Path) -> None:
        with pytest.raises(load("support.command_line").InputError, match="no docstrings found"):
            load("support.stdlib_text").docstrings_by_family(stdlib=tmp_path)


class TestOwnFile:
    def test_every_label_is_in_both_sets_and_no_text_is(self, load: Load, data: Path) -> None:
        task = load("support.classifier_data").load_task(None, data, seed=0)
        assert task.label_names == ["bad", "good"]
        assert set(task.train.labels) == set(task.test.labels) == {0, 1}
        assert not set(task.train.texts) & set(task.test.texts)
        assert len(task.train.texts) + len(task.test.texts) == len(TWO_LABELS)

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            ([], r"0 label\(s\) found; classifying needs at least 2"),
            (["{"], "line 1: not JSON"),
            (["[1]"], 'line 1: found list; a row needs the keys "text" and "label"'),
            (['{"text": "a", "label": 1}', "", '{"sentence": "b"}'], "line 3: found sentence; a row needs the keys"),
            (['{"text": 1, "label": 1}'], 'line 1: "text" must be a string'),
            (['{"text": "a", "label": null}'], 'line 1: "text" must be a string and "label"'),
            (['{"text": "a", "label": 0}', '{"text": "b", "label": 1}'], "only one text for 0, 1"),
        ],
    )
    def test_a_malformed_file_is_refused(self, load: Load, tmp_path: Path, lines: list[str], message: str) -> None:
        file = written(tmp_path / "data.jsonl", *lines)
        with pytest.raises(load("support.command_line").InputError, match=message):
            load("support.classifier_data").load_task(None, file, seed=0)


COMMON_ERRORS = [
    (["--precision", "3"], "3 is not supported; choose one of exact, 8, 4, 2, 1"),
    (["--steps", "0"], "0 is not allowed; give a whole number above 0"),
    (["--batch", "1.5"], "1.5 is not allowed; give a whole number above 0"),
    (["--learning-rate", "nan"], "nan is not allowed; give a number above 0"),
    (["--model", "no/such/folder"], "--model no/such/folder: cannot be loaded"),
    (["--seq", "100000"], "--seq 100000: the model"),
    (["--seq", "1"], "--seq 1: the model"),
]
CLASSIFIER_ERRORS = [
    (["--steps", "1", "--epochs", "1"], "not allowed with argument --steps"),
    (["--dataset", "glue/mnli"], "choose from"),
    (["--data", "missing.jsonl"], "--data missing.jsonl: no such file"),
    (["--output", "picture.txt"], "--output picture.txt: the name must end in one of .png, .pdf, .svg"),
    (["--output", "missing/picture.png"], "--output missing/picture.png: its folder does not exist"),
    (["--role", "daf"], "--role daf needs --result FILE"),
]


class TestCommandLine:
    @pytest.mark.parametrize(
        ("script", "arguments", "message"),
        [
            *(("finetune_text_classifier", *case) for case in COMMON_ERRORS + CLASSIFIER_ERRORS),
            *(("finetune_gpt2", ["--layers", "1", *arguments], message) for arguments, message in COMMON_ERRORS),
            *(
                pytest.param("finetune_qlora", ["--layers", "1", *arguments], message, marks=needs("bitsandbytes"))
                for arguments, message in COMMON_ERRORS
            ),
            ("finetune_qlora", ["--bits", "2"], "choose from"),
            *(("finetune_preferences", *case) for case in COMMON_ERRORS),
            ("finetune_preferences", ["--method", "ppo"], "choose from"),
        ],
    )
    def test_what_cannot_work_is_refused_with_its_reason(
        self, load: Load, capsys: pytest.CaptureFixture[str], script: str, arguments: list[str], message: str
    ) -> None:
        with pytest.raises(SystemExit) as stopped:
            load(script).main(arguments)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err

    def test_a_missing_datasets_package_is_named(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(load("support.command_line").InputError, match="pip install datasets"):
            load("support.classifier_data").load_task("glue/sst2", None, seed=0)


class TestRuns:
    def test_a_failing_child_ends_the_demo_with_its_own_status(self, load: Load, tmp_path: Path) -> None:
        script = written(tmp_path / "child.py", "import sys", "sys.exit(len(sys.argv))")
        with pytest.raises(SystemExit) as stopped:
            load("support.child_runs").run_in_child(script, ["--role", "daf"], library=None)
        assert stopped.value.code == 3

    def test_one_role_measures_what_daf_holds(self, load: Load, data: Path, tmp_path: Path) -> None:
        result = tmp_path / "daf.json"
        small = ["--data", str(data), "--steps", "3", "--seeds", "2", "--batch", "4", "--seq", "16"]
        load("finetune_text_classifier").main([*small, "--role", "daf", "--result", str(result)])
        measured = load("support.comparison").RunResult.load(result)
        assert 0 < measured.held_mb < 0.4 * measured.raw_mb
        assert len(measured.accuracies) == 2
        assert all(0 <= accuracy <= 1 for accuracy in measured.accuracies)
        assert measured.total_bytes > measured.loaded_bytes > 0
        assert measured.step_seconds > 0
        assert len(measured.curve) > 1

    def test_the_comparison_shows_a_table_and_a_picture(
        self,
        load: Load,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
        data: Path,
        tmp_path: Path,
    ) -> None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "kernels")]))
        picture = tmp_path / "step.png"
        small = ["--data", str(data), "--steps", "2", "--seeds", "2", "--batch", "4", "--seq", "16"]
        load("finetune_text_classifier").main([*small, "--precision", "exact", "--output", str(picture)])
        shown = capfd.readouterr().out
        assert "saved activations, held" in shown
        assert "+0.0 points ± 0.0" in shown  # exact: the same weights, so the same accuracy
        assert "Saved activations take " in shown
        assert str(picture) in shown
        assert picture.read_bytes().startswith(b"\x89PNG")

    def test_gpt2_logs_its_loss_and_what_daf_holds(self, load: Load, capsys: pytest.CaptureFixture[str]) -> None:
        load("finetune_gpt2").main(["--layers", "1", "--steps", "2", "--batch", "1", "--seq", "16"])
        shown = capsys.readouterr().out
        assert shown.count("'loss'") == shown.count("'daf/held_mb'") == 2

    @needs("bitsandbytes")
    def test_qlora_logs_its_loss_and_what_daf_holds(self, load: Load, capsys: pytest.CaptureFixture[str]) -> None:
        load("finetune_qlora").main(["--layers", "1", "--steps", "2", "--batch", "1", "--seq", "16"])
        shown = capsys.readouterr().out
        assert shown.count("'loss'") == shown.count("'daf/held_mb'") == 2
        assert "'grad_norm': '0'" not in shown

    @pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # TRL's, of its own interface
    @pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
    def test_preferences_log_a_loss_and_what_daf_holds(
        self, load: Load, capsys: pytest.CaptureFixture[str], method: str
    ) -> None:
        load("finetune_preferences").main(["--method", method, "--steps", "2", "--batch", "2", "--seq", "16"])
        shown = capsys.readouterr().out
        assert shown.count("'loss'") == shown.count("'daf/held_mb'") == 2
        assert "'grad_norm': '0'" not in shown

    def test_long_texts_are_trained_by_a_plan(
        self, load: Load, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "daf")  # as the example does for its process; this puts it back
        options = ["--layers", "1", "--steps", "1", "--length", "64", "--budget", "200MB"]
        load("finetune_long_text").main(options)
        assert capsys.readouterr().out.count("'loss'") == 1
        assert any("DAF plans the whole batch" in record.getMessage() for record in caplog.records)

    def test_long_texts_need_a_model_that_is_there(
        self, load: Load, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        caplog.set_level(logging.INFO, "daf")
        with pytest.raises(SystemExit):
            load("finetune_long_text").main(["--length", "8", "--model", str(tmp_path / "none")])
        assert "--model" in capsys.readouterr().err

    def test_elastic_training_takes_more_steps(
        self, load: Load, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        count_time(monkeypatch)  # on a loaded machine no step may be as short as is asked
        example = load("finetune_elastic")
        monkeypatch.setattr(example, "BATCH", 4)
        monkeypatch.setattr(example, "SEQ", 16)
        load_task = example.load_task

        def few(*arguments: Any) -> Any:
            task = load_task(*arguments)
            return replace(task, test=replace(task.test, texts=task.test.texts[:16], labels=task.test.labels[:16]))

        monkeypatch.setattr(example, "load_task", few)
        example.main(["--steps", "6", "--time", "0.75"])
        shown = capsys.readouterr().out
        assert "'daf/elastic_depth'" in shown
        rows = [line.split("│") for line in shown.splitlines() if line.startswith("│")]
        assert [steps.strip() for _, _, steps, *_ in rows[-2:]] == ["6", "8"]

    @pytest.mark.filterwarnings("ignore:.*does not have many workers")
    @pytest.mark.parametrize(("strategy", "tables"), [("daf", 1), ("auto", 0)])
    def test_lightning_logs_what_daf_holds(
        self,
        load: Load,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        strategy: str,
        tables: int,
    ) -> None:
        monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # seed_everything leaves them behind
        monkeypatch.setenv("PL_SEED_WORKERS", "0")
        small = ["--strategy", strategy, "--steps", "2", "--batch", "2", "--seq", "16"]
        trainer = load("finetune_lightning").main(small)
        shown = capsys.readouterr().out
        assert shown.count("┃ saved activations") == tables
        assert ("daf/ratio" in trainer.callback_metrics) == bool(tables)
        assert trainer.callback_metrics["loss"] > 0
