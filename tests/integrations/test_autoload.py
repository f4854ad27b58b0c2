"""The entry point that torch runs: it never breaks an import, costs nothing unused, and reaches what it is for."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import daf_autoload
from daf_integrations import _autoload
from daf_integrations._autoload import ImportWatcher
from tests.integrations.hf_runs import daf_records

ROOT = Path(__file__).resolve().parents[2]
WATCHED = "any(type(finder).__name__ == 'ImportWatcher' for finder in sys.meta_path)"


@pytest.fixture(scope="module", autouse=True)
def entry_point() -> None:
    """An environment that was installed before there was the entry point would make every test here fail."""
    names = [point.name for point in entry_points(group="torch.backends")]
    assert "daf" in names, f"torch.backends has the entry points {names}, and not daf: reinstall with `make test`"


def in_fresh_python(code: str, folder: Path = ROOT, **variables: str) -> str:
    path = [str(folder), str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


class TestImportOfTorch:
    def test_loads_nothing_but_the_standard_library(self) -> None:
        loaded = in_fresh_python(
            "import sys, torch\n"
            f"assert {WATCHED}\n"
            "print(*sorted(name for name in sys.modules if name.startswith('daf_') or name in ('accelerate', 'yaml')))"
        )
        assert loaded.split()[-3:] == [
            "daf_integrations",
            "daf_integrations._autoload",
            "daf_integrations.environment",
        ]
        assert set(loaded.split()[:-3]) <= {"daf_autoload"}

    @pytest.mark.parametrize(
        "variables", [{"DAF_AUTOLOAD": "0"}, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}], ids=lambda v: next(iter(v))
    )
    def test_can_be_told_to_leave_daf_alone(self, variables: dict[str, str]) -> None:
        in_fresh_python(f"import sys, torch\nassert not {WATCHED}", ACCELERATE_USE_DAF="1", **variables)

    def test_works_where_daf_is_broken_and_was_asked_for(self, tmp_path: Path) -> None:
        """Then the first Accelerator fails, and says why: training without DAF is not what was asked for."""
        broken = tmp_path / "daf_integrations"
        broken.mkdir()
        for name in ("__init__.py", "_autoload.py", "environment.py"):
            shutil.copy(ROOT / "daf_integrations" / name, broken)
        (broken / "accelerate.py").write_text("raise RuntimeError('daf is broken')")
        said = in_fresh_python(
            "import torch\nprint(torch.ones(1).item())\n"
            "from accelerate import Accelerator\n"
            "for _ in range(2):\n"
            "    try:\n        Accelerator(cpu=True)\n"
            "    except RuntimeError as error:\n        print(error)",
            tmp_path,
            ACCELERATE_USE_DAF="1",
        )
        assert said.splitlines() == ["1.0", "daf is broken", "daf is broken"]

    def test_works_where_the_rest_of_daf_is_gone(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setitem(sys.modules, "daf_integrations._autoload", None)
        daf_autoload.register()
        [record] = daf_records(caplog)
        assert "pip uninstall daf-training" in record.message

    def test_survives_a_failure_of_its_own(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(_: object) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, ImportWatcher)])
        monkeypatch.setattr(_autoload, "ImportWatcher", fail)
        monkeypatch.setattr(_autoload, "isinstance", lambda *_: False, raising=False)
        _autoload.register()
        [record] = daf_records(caplog)
        assert "could not install its hooks" in record.message

    def test_installs_its_hooks_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, ImportWatcher)])
        for _ in range(2):
            _autoload.register()
        assert len([finder for finder in sys.meta_path if isinstance(finder, ImportWatcher)]) == 1

    def test_halfway_through_that_of_accelerate(self) -> None:
        """Accelerate imports torch, so its own modules are half there when the hooks are installed."""
        in_fresh_python(
            "import sys\nassert 'torch' not in sys.modules\n"
            "from accelerate import Accelerator\nAccelerator(cpu=True)\n"
            "from daf_integrations.accelerate.plugin import MARK\n"
            "assert hasattr(Accelerator.prepare, MARK)\n"
            "import accelerate.commands.config.config_args as files\n"
            "assert hasattr(files.BaseConfig.process_config, '__wrapped__')",
            ACCELERATE_USE_DAF="1",
        )

    def test_leaves_accelerate_alone_where_daf_is_off(self) -> None:
        in_fresh_python(
            "import sys, torch\nfrom accelerate import Accelerator\n"
            "assert not hasattr(Accelerator.__init__, '__wrapped__')\n"
            "assert 'daf_core' not in sys.modules",
            ACCELERATE_USE_DAF="0",
        )


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package whose __init__ imports its two modules, one of them in the middle of the other."""
    name = "watched_package"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("from . import first\n")
    (folder / "first.py").write_text("from . import second\nvalue = 1\n")
    (folder / "second.py").write_text("value = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield name
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


class TestImportWatcher:
    def test_acts_once_after_the_module_has_run(self, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
        values: list[int] = []
        watcher = ImportWatcher({f"{package}.first": lambda module: values.append(module.value)})
        monkeypatch.setattr(sys, "meta_path", [watcher, *sys.meta_path])
        first = importlib.import_module(f"{package}.first")
        importlib.import_module(f"{package}.second")
        assert values == [1]
        assert type(first.__loader__).__name__ == "SourceFileLoader"
        assert "exec_module" not in vars(first.__loader__)

    def test_acts_on_modules_that_were_there_before(self, package: str) -> None:
        importlib.import_module(package)
        values: list[int] = []
        ImportWatcher({f"{package}.second": lambda module: values.append(module.value)}).act_on_imported()
        assert values == [2]

    def test_waits_for_modules_whose_import_goes_on(self, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
        acted: list[ModuleType] = []
        watcher = ImportWatcher({f"{package}.first": acted.append})

        def halfway(module: ModuleType) -> None:
            """Installs the watcher as torch does: while the module is half initialised."""
            monkeypatch.setattr(sys, "meta_path", [watcher, *sys.meta_path])
            watcher.act_on_imported()
            assert acted == []

        monkeypatch.setattr(sys, "meta_path", [ImportWatcher({f"{package}.second": halfway}), *sys.meta_path])
        first = importlib.import_module(f"{package}.first")
        importlib.util.find_spec("another_module_of_no_interest")
        assert acted == [first]

    def test_a_failing_action_is_said_and_breaks_no_import(
        self, package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(_: ModuleType) -> None:
            raise AttributeError("no such thing")

        monkeypatch.setattr(sys, "meta_path", [ImportWatcher({f"{package}.second": fail}), *sys.meta_path])
        assert importlib.import_module(package).first.value == 1
        [record] = daf_records(caplog)
        assert f"does not know this version of {package}.second" in record.message

    def test_a_module_that_fails_is_tried_again(self, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
        acted: list[Any] = []
        monkeypatch.setattr(sys, "meta_path", [ImportWatcher({f"{package}.second": acted.append}), *sys.meta_path])
        monkeypatch.setattr(importlib.machinery.SourceFileLoader, "exec_module", _fail)
        with pytest.raises(RuntimeError, match="not today"):
            importlib.import_module(package)
        monkeypatch.undo()
        assert acted == []


def _fail(_self: object, _module: ModuleType) -> None:
    raise RuntimeError("not today")


class TestLightning:
    def test_knows_the_strategy_by_name_before_daf_is_loaded(self) -> None:
        in_fresh_python(
            "import importlib, sys\n"
            "for tree in ('lightning.pytorch', 'pytorch_lightning'):\n"
            "    assert 'daf' in importlib.import_module(tree).strategies.StrategyRegistry\n"
            "assert 'daf_core' not in sys.modules"
        )

    @pytest.mark.parametrize("tree", ["lightning.pytorch", "pytorch_lightning"])
    def test_makes_the_strategy_when_a_trainer_asks_for_it(self, tree: str) -> None:
        in_fresh_python(
            f"import {tree} as tree\n"
            "trainer = tree.Trainer(strategy='daf', accelerator='cpu', devices=1, logger=False, barebones=True)\n"
            "assert 'DAF' in type(trainer.strategy).__name__"
        )
