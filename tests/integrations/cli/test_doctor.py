"""`daf doctor`: what it finds, what it advises, and that a gap is a finding and never an exception."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numba
import pytest
import torch
from click.testing import CliRunner, Result
from packaging.requirements import Requirement

from daf_integrations.cli import doctor
from daf_integrations.cli.doctor import PACKAGES, Diagnosis
from daf_integrations.cli.main import main
from daf_kernels.dispatch import load_backend

ROOT = Path(__file__).resolve().parents[3]
READY = Diagnosis(
    python="3.11.7",
    packages={package.name: package.floor for package in PACKAGES},
    devices=("cpu: x86_64, AVX512",),
    torch_threads=2,
    cores=2,
    allocator="tcmalloc",
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def with_version(name: str, found: str | None) -> Diagnosis:
    """A machine that lacks nothing but the given package in a good version."""
    return replace(READY, packages=READY.packages | {name: found})


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Makes packages look as if they were not installed."""

    def find(name: str) -> str:
        if name in names:
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor, "version", find)


def test_kernels_that_cannot_be_kept_are_advice() -> None:
    found = replace(READY, kernels_not_kept="no room. Set NUMBA_CACHE_DIR")
    assert found.problems == []
    assert found.advice == ["each run compiles the CPU kernels, in a minute or two: no room. Set NUMBA_CACHE_DIR"]


def test_kernels_that_do_not_load_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba is there, and does not work with this numpy."""
    monkeypatch.setitem(sys.modules, "daf_kernels.cpu.backend", None)
    assert doctor.examine().problems[0].startswith("the CPU kernels do not load: ModuleNotFoundError")


def test_kernels_that_numba_does_not_compile_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    load_backend(torch.device("cpu"))  # what is imported from here on is not compiled, for later tests neither
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    (problem,) = doctor.examine().problems
    assert problem == "the CPU kernels do not load: NUMBA_DISABLE_JIT is set, so numba compiles nothing. Unset it"
    broken = replace(with_version("numba", None), kernel_error="no numba")
    assert ["numba is missing" in problem for problem in broken.problems] == [True]


def test_help_lists_the_command() -> None:
    assert "doctor" in CliRunner().invoke(main, ["--help"]).output


def test_table_names_every_package_and_its_version() -> None:
    output = run().output
    assert all(package.name in output for package in PACKAGES)
    assert version("torch") in output


def test_json_agrees_with_what_is_installed() -> None:
    import torch

    report = json.loads(run("--json").output)
    assert report["packages"]["torch"] == version("torch")
    assert report["torch_threads"] == torch.get_num_threads()
    assert report["devices"][0].startswith("cpu")
    assert report["cores"] >= 1


def test_missing_frameworks_are_reported_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "transformers", "lightning")
    result = run("--json")
    report = json.loads(result.output)
    assert result.exit_code == 0
    assert report["packages"]["transformers"] is None
    assert any("pip install 'transformers>=5.12'" in line for line in report["advice"])
    assert any("pip install 'lightning>=2.6'" in line for line in report["advice"])


def test_missing_requirement_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "numba")
    result = run()
    assert result.exit_code == 1
    assert "numba is missing (for CPU kernels): pip install 'numba>=0.61'" in result.output
    assert "DAF is ready" not in result.output


def test_torch_that_does_not_load_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run()
    assert result.exit_code == 1
    assert "torch does not load" in result.output
    assert "unknown" in result.output


def test_the_command_works_where_torch_is_broken(tmp_path: Path) -> None:
    """All commands were loaded with it, and ended with a traceback."""
    (tmp_path / "torch.py").write_text('raise OSError("libcudart.so.12: cannot open shared object file")')
    found = subprocess.run(
        [sys.executable, "-m", "daf_integrations", "doctor"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert found.returncode == 1
    assert "torch does not load" in found.stdout
    assert "Traceback" not in found.stderr


def test_a_machine_that_lacks_nothing_gets_no_advice() -> None:
    assert READY.problems == []
    assert READY.advice == []


@pytest.mark.parametrize(
    ("found", "status"),
    [(None, "missing"), ("5.11.0", "too old"), ("5.12", "ok"), ("5.100.1", "ok"), ("6.0.0.dev0+cpu", "ok")],
)
def test_status_compares_versions(found: str | None, status: str) -> None:
    [package] = [each for each in PACKAGES if each.name == "transformers"]
    assert package.status(found) == status


def test_too_old_framework_is_advice_and_too_old_torch_is_a_problem() -> None:
    assert with_version("peft", "0.1").advice == [
        "peft is too old (for LoRA with the HF Trainer): pip install 'peft>=0.19'"
    ]
    assert with_version("torch", "2.1").problems == ["torch is too old (for everything): pip install 'torch>=2.10'"]


def test_triton_is_missed_on_a_gpu_only() -> None:
    assert with_version("triton", None).advice == []
    gpu = replace(with_version("triton", None), devices=("cpu: x86_64", "cuda:0: H200"))
    assert len(gpu.advice) == 1


def test_more_threads_than_cores_is_advised_against() -> None:
    (line,) = replace(READY, cores=1).advice
    assert "export OMP_NUM_THREADS=1" in line


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("/usr/lib/libtcmalloc_minimal.so.4.5.10", "tcmalloc"),
        ("/opt/libjemalloc.so.2", "jemalloc"),
        ("/opt/libmimalloc.so.3.0", "mimalloc"),
        ("/home/me/tcmalloc-notes.txt", "glibc"),
    ],
)
def test_allocator_is_read_from_the_memory_map(tmp_path: Path, library: str, name: str) -> None:
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 0 08:01 1 /usr/lib/libc.so.6\n7f02-7f03 r-xp 0 08:01 2 {library}\n")
    assert doctor.loaded_allocator(maps) == name


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("/usr/lib/aarch64-linux-gnu/libc-2.31.so", "glibc"),
        ("/lib/ld-musl-x86_64.so.1", "musl"),
        ("/usr/lib/libcap.so.2", "unknown"),
    ],
)
def test_c_library_is_read_from_the_memory_map(tmp_path: Path, library: str, name: str) -> None:
    (tmp_path / "maps").write_text(f"7f00-7f01 r-xp 0 08:01 1 {library}\n")
    assert doctor.loaded_allocator(tmp_path / "maps") == name


def test_allocator_is_unknown_without_a_memory_map(tmp_path: Path) -> None:
    assert doctor.loaded_allocator(tmp_path / "absent") == "unknown"


INSTALLED = "libtcmalloc_minimal.so.4"


@pytest.mark.parametrize(
    ("programs", "library", "command"),
    [
        (["apt-get", "sudo"], None, f"sudo apt-get install libtcmalloc-minimal4, then LD_PRELOAD={INSTALLED} python"),
        (["apt-get"], None, f": apt-get install libtcmalloc-minimal4, then LD_PRELOAD={INSTALLED} python"),
        (["dnf"], None, f"dnf install gperftools-libs, then LD_PRELOAD={INSTALLED} python"),
        ([], None, f"install gperftools, then LD_PRELOAD={INSTALLED} python"),
        (["apt-get"], INSTALLED, f": LD_PRELOAD={INSTALLED} python train.py"),
    ],
)
def test_glibc_advice_fits_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, programs: list[str], library: str | None, command: str
) -> None:
    a_machine(monkeypatch, tmp_path, programs, library)
    assert command in glibc_advice()


def test_glibc_advice_in_conda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_machine(monkeypatch, tmp_path, ["apt-get"])
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path))
    path = f"LD_PRELOAD=$CONDA_PREFIX/lib/{INSTALLED} python train.py"
    assert f"conda install -c conda-forge gperftools, then {path}" in glibc_advice()
    written(tmp_path / "lib" / INSTALLED)
    assert f": LD_PRELOAD={tmp_path}/lib/{INSTALLED} python train.py" in glibc_advice()


def test_tcmalloc_is_found_where_nothing_lists_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_machine(monkeypatch, tmp_path, [])
    library = written(tmp_path / "aarch64-linux-gnu" / INSTALLED)
    assert f"LD_PRELOAD={library} python train.py" in glibc_advice()


def test_an_installed_mimalloc_is_what_programs_run_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_machine(monkeypatch, tmp_path, ["apt-get"])
    assert "or pip install cmeel-mimalloc, then daf run train.py" in glibc_advice()
    monkeypatch.setattr(doctor, "find_library", {"mimalloc": "libmimalloc.so.2"}.get)
    assert glibc_advice().endswith(": daf run train.py")


def test_where_nothing_can_be_installed_glibc_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_machine(monkeypatch, tmp_path, ["apt-get"])
    assert "MALLOC_MMAP_THRESHOLD_=65536 python train.py" in glibc_advice()


@pytest.mark.parametrize(
    ("name", "threshold", "described", "advised"),
    [
        ("glibc", "65536", "glibc, MALLOC_MMAP_THRESHOLD_=65536", False),
        ("glibc", "33554432", "glibc", True),
        ("glibc", "", "glibc", True),
        ("glibc", "\u00b2", "glibc", True),
        ("glibc", "9" * 5000, "glibc", True),
        ("tcmalloc", "65536", "tcmalloc", False),
    ],
)
def test_glibc_that_gives_blocks_back_gets_no_advice(
    monkeypatch: pytest.MonkeyPatch, name: str, threshold: str, described: str, advised: bool
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", threshold)
    monkeypatch.setattr(doctor, "loaded_allocator", lambda: name)
    report = json.loads(run("--json").output)
    assert report["allocator"] == described
    assert any("glibc" in line for line in report["advice"]) == advised


def a_machine(monkeypatch: pytest.MonkeyPatch, folder: Path, programs: list[str], library: str | None = None) -> None:
    """A machine outside of conda with these programs, and libraries in a folder alone."""
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.setattr(sys, "prefix", str(folder / "environment"))
    monkeypatch.setattr(doctor, "_LIBRARIES", (folder,))
    monkeypatch.setattr(doctor, "find_library", lambda name: library if name == "tcmalloc_minimal" else None)
    monkeypatch.setattr(doctor, "files", lambda _name: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name if name in programs else None)


def glibc_advice() -> str:
    (line,) = replace(READY, allocator="glibc").advice
    return line


def written(file: Path) -> Path:
    file.parent.mkdir()
    file.touch()
    return file


def test_oldest_versions_are_those_of_the_package_metadata() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 is the first that reads TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {(wanted.name, str(wanted.specifier)) for wanted in map(Requirement, lines)}
    for package in PACKAGES:
        specifiers = {specifier for name, specifier in declared if name == package.name}
        assert specifiers == {f">={package.floor}"}
