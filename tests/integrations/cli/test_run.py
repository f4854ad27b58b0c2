"""`daf run`: a program starts with an allocator that gives freed memory back, and is otherwise what it was."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, PackagePath
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from daf_integrations.cli import allocator, doctor
from daf_integrations.cli.main import main

Started = list[tuple[list[str], dict[str, str]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """The commands that would replace this process, with their variables; no allocator is installed."""
    found: Started = []
    monkeypatch.setattr(allocator.os, "execve", lambda _, command, environment: found.append((command, environment)))
    for name in ("tcmalloc", "jemalloc"):
        monkeypatch.setitem(allocator.LIBRARIES, name, lambda: None)
    for module in (allocator, doctor):
        monkeypatch.setattr(module, "installed_tcmalloc", lambda: None)
        monkeypatch.setattr(module, "installed_mimalloc", lambda: None)
    monkeypatch.setattr(allocator, "loaded_allocator", lambda: "glibc")
    monkeypatch.setattr(allocator.sys, "platform", "linux")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    return found


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", *arguments])


def test_options_after_the_program_are_the_programs(started: Started) -> None:
    assert run("train.py", "--allocator", "x", "-m", "--help").exit_code == 0
    ((command, _),) = started
    assert command == [sys.executable, "train.py", "--allocator", "x", "-m", "--help"]


def test_a_module_is_run_as_python_does(started: Started) -> None:
    run("-m", "package.train", "--epochs", "3")
    assert started[0][0] == [sys.executable, "-m", "package.train", "--epochs", "3"]


@pytest.mark.parametrize("first", ["installed_tcmalloc", "installed_mimalloc"])
def test_what_is_installed_is_loaded_before_all_else(
    started: Started, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setattr(allocator, first, lambda: "/lib/found.so")
    monkeypatch.setenv("LD_PRELOAD", "other.so")
    assert run("train.py").output == ""
    assert started[0][1]["LD_PRELOAD"] == "/lib/found.so other.so"


def test_without_any_the_program_runs_and_the_user_learns_what_to_type(started: Started) -> None:
    result = run("train.py")
    assert "pip install cmeel-mimalloc, then daf run train.py" in result.output
    assert "LD_PRELOAD" not in started[0][1]


def test_an_allocator_that_the_user_has_preloaded_stays(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "installed_tcmalloc", lambda: "/lib/found.so")
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so.2")
    assert run("train.py").output == ""
    assert started[0][1]["LD_PRELOAD"] == "libjemalloc.so.2"


def test_an_allocator_by_name_and_by_path(started: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(allocator.LIBRARIES, "jemalloc", lambda: "libjemalloc.so.2")
    monkeypatch.setattr(allocator, "installed_tcmalloc", lambda: "/lib/found.so")
    library = tmp_path / "libown.so"
    library.touch()
    for given in ("jemalloc", str(library), "glibc"):
        assert run(f"--allocator={given}", "train.py").exit_code == 0
    assert [environment.get("LD_PRELOAD") for _, environment in started] == ["libjemalloc.so.2", str(library), None]


@pytest.mark.parametrize(("set_before", "expected"), [(None, "20"), ("50", "50")])
def test_mimalloc_gives_memory_back_soon_unless_the_user_says_when(
    started: Started, monkeypatch: pytest.MonkeyPatch, set_before: str | None, expected: str
) -> None:
    monkeypatch.delenv("MIMALLOC_PURGE_DELAY", raising=False)
    if set_before is not None:
        monkeypatch.setenv("MIMALLOC_PURGE_DELAY", set_before)
    monkeypatch.setattr(allocator, "installed_mimalloc", lambda: "/lib/libmimalloc.so.3")
    run("train.py")
    assert started[0][1]["MIMALLOC_PURGE_DELAY"] == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [("jemalloc", "jemalloc is not installed"), ("hoard", "'hoard' is neither a file nor one of auto, tcmalloc, ")],
)
def test_what_is_not_there_is_refused(started: Started, given: str, message: str) -> None:
    result = run("--allocator", given, "train.py")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert started == []


def test_nothing_is_preloaded_where_the_loader_knows_no_such_variable(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator, "installed_tcmalloc", lambda: "/lib/found.so")
    monkeypatch.setattr(allocator.sys, "platform", "darwin")
    monkeypatch.setattr(allocator, "loaded_allocator", lambda: "unknown")
    assert run("train.py").output == ""
    assert "LD_PRELOAD" not in started[0][1]


def test_mimalloc_is_found_in_its_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Folder:
        def locate_file(self, path: Any) -> Path:
            return tmp_path / path

    listed = [PackagePath(name) for name in ("lib/libmimalloc.a", "lib/libmimalloc.so.3.4", "lib/libmimalloc.so.3")]
    for path in listed:
        path.dist = Folder()
    monkeypatch.setattr(doctor, "files", lambda _: listed)
    monkeypatch.setattr(doctor, "find_library", lambda _: None)
    assert doctor.installed_mimalloc() is None
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmimalloc.so.3").touch()
    assert doctor.installed_mimalloc() == str(tmp_path / "lib" / "libmimalloc.so.3")


def test_mimalloc_of_the_system_is_found_without_a_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> list[PackagePath]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "files", none)
    monkeypatch.setattr(doctor, "find_library", {"mimalloc": "libmimalloc.so.2"}.get)
    assert doctor.installed_mimalloc() == "libmimalloc.so.2"


def test_a_program_gets_its_arguments_and_its_status_is_returned(tmp_path: Path) -> None:
    """Nothing stands in for anything."""
    program = tmp_path / "train.py"
    program.write_text("import sys\nprint(sys.argv[1:])\nsys.exit(7)\n")
    command = [sys.executable, "-m", "daf_integrations", "run", "--allocator", "glibc", str(program), "--rate", "1"]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "['--rate', '1']\n"), done.stderr
