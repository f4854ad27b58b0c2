"""The shape of the house: who may import whom, and what importing it costs."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "daf_kernels": ROOT / "kernels" / "daf_kernels",
    "daf_core": ROOT / "daf_core",
    "daf_integrations": ROOT / "daf_integrations",
}
# What a package may import beside itself and the standard library. daf_integrations may import any trainer.
ALLOWED = {
    "daf_kernels": {"torch", "numpy", "numba", "llvmlite", "triton"},
    "daf_core": {
        *("daf_kernels", "torch", "numpy", "typing_extensions"),
        *("sortedcontainers", "psutil", "humanfriendly", "yaml"),
    },
}
KERNEL_COMPILERS = {"numba", "llvmlite", "triton"}
HEAVY = KERNEL_COMPILERS | {"transformers", "lightning", "pytorch_lightning", "peft", "accelerate", "yaml"}
# The rooms of each package, those that others stand on first. A room may import from rooms before it alone.
ROOMS = {
    "daf_kernels": ["layout", "backend", "reference", "cpu", "triton", "host", "dispatch"],
    "daf_core": [
        *(
            "errors",
            "timing",
            "distributed",
            "state_checks",
            "config",
            "autograd",
            "snapshots",
            "readers",
            "model",
            "batch",
            "unsupported",
        ),
        *("memory", "rewrites", "telemetry", "codecs", "knapsack", "precision", "saved_tensors", "compiled"),
        *("engine", "plan", "elastic"),
    ],
    "daf_integrations": [
        *("environment", "session", "loop", "accelerate", "huggingface", "lightning", "pytorch_lightning", "_autoload"),
        *("cli", "__main__"),
    ],
}
MAX_LOOSE_FILES = {"daf_kernels": 5, "daf_core": 8, "daf_integrations": 5}
MAX_LINES = 400
MAX_EXTRA_MODULES = 129
UNLIMITED = {"tests", "build", "dist", "shared"}


def sources(package: str) -> list[Path]:
    return sorted(PACKAGES[package].rglob("*.py"))


def each_source(*packages: str) -> list[object]:
    return [
        pytest.param(package, path, id=f"{package}/{path.relative_to(PACKAGES[package]).as_posix()}")
        for package in packages
        for path in sources(package)
    ]


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that a file imports by its full name, at whatever depth and however late."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"importlib.import_module", "import_module"}:
            yield from (str(name.value) for name in node.args[:1] if isinstance(name, ast.Constant))


def foreign_imports(package: str, path: Path) -> set[str]:
    """The top-level modules that a file imports from outside its package and the standard library."""
    names = {name.partition(".")[0] for name in imported(ast.parse(path.read_text()))}
    return names - sys.stdlib_module_names - {package}


def in_fresh_python(code: str) -> str:
    """Runs code at the root of the repository, as a user would, and returns what it prints."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_sources_and_types(package: str) -> None:
    assert PACKAGES[package] / "__init__.py" in sources(package)
    assert (PACKAGES[package] / "py.typed").is_file()


@pytest.mark.parametrize(("package", "path"), each_source("daf_kernels", "daf_core"))
def test_imports_follow_the_arrows(package: str, path: Path) -> None:
    assert foreign_imports(package, path) <= ALLOWED[package]


@pytest.mark.parametrize(("package", "path"), each_source("daf_integrations"))
def test_only_kernels_know_the_kernel_compilers(package: str, path: Path) -> None:
    assert not foreign_imports(package, path) & KERNEL_COMPILERS


def room_of(module: str) -> str:
    """The part of a module's name after the package: a folder, or a file beside the folders."""
    return module.split(".")[1]


def rooms_imported(package: str, path: Path) -> set[str]:
    """The rooms that a file imports from, its own left out."""
    own = path.relative_to(PACKAGES[package]).parts[0].removesuffix(".py")
    tree = ast.parse(path.read_text())
    modules = {name for name in imported(tree) if name.startswith(f"{package}.")}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            modules |= {f"{package}.{alias.name}" for alias in node.names if alias.name in ROOMS[package]}
    return {room_of(module) for module in modules} - {own}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_listing_shows_rooms_and_few_files(package: str) -> None:
    entries = {
        path.name.removesuffix(".py") for path in PACKAGES[package].iterdir() if path.suffix == ".py" or path.is_dir()
    }
    assert entries - {"__init__", "__pycache__"} == set(ROOMS[package])
    assert len(list(PACKAGES[package].glob("*.py"))) <= MAX_LOOSE_FILES[package]


@pytest.mark.parametrize(("package", "path"), each_source(*PACKAGES))
def test_rooms_stand_on_rooms_before_them(package: str, path: Path) -> None:
    own = path.relative_to(PACKAGES[package]).parts[0].removesuffix(".py")
    order = ROOMS[package]
    before = order if own == "__init__" else order[: order.index(own)]
    assert rooms_imported(package, path) <= set(before)


@pytest.mark.parametrize(("package", "path"), each_source(*PACKAGES))
def test_tensors_are_made_on_a_device_that_is_named(package: str, path: Path) -> None:
    """Otherwise they lie on the user's default device, and kernels for others write to their addresses there."""
    assert not list(made_anywhere(ast.parse(path.read_text())))


def made_anywhere(tree: ast.AST) -> Iterator[str]:
    """Calls of torch that make a tensor on the default device."""
    names = {f"torch.{function.__name__}" for function in _device_constructors()}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in names:
            continue
        if not {"device", None} & {keyword.arg for keyword in node.keywords}:
            yield ast.unparse(node)


def test_tensors_on_the_default_device_are_seen() -> None:
    code = "torch.zeros(3)\ntorch.ones(3, device=x)\nx.new_zeros(3)\ntorch.tensor([1], **like)\ntorch.empty_like(x)\n"
    assert list(made_anywhere(ast.parse(code))) == ["torch.zeros(3)"]


def test_late_and_dynamic_imports_are_seen() -> None:
    code = "def f():\n    import a.b\n    from c.d import e\n    importlib.import_module('g.h')\n    from . import i\n"
    assert set(imported(ast.parse(code))) == {"a.b", "c.d", "g.h"}


def test_kernels_folder_is_no_package() -> None:
    # As a package it would hide the one that transformers looks for under this name.
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    in_fresh_python("import transformers.integrations.hub_kernels")


def test_importing_the_core_adds_little_to_torch() -> None:
    names = in_fresh_python(
        "import sys, torch, json; before = set(sys.modules); import daf_core;"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    extra = json.loads(names)
    assert "daf_core" in extra
    assert not {name.partition(".")[0] for name in extra} & HEAVY
    assert len(extra) < MAX_EXTRA_MODULES


def test_files_are_small() -> None:
    folders = [path for path in ROOT.iterdir() if path.name not in UNLIMITED and not path.name.startswith(".")]
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for folder in folders
        for path in folder.rglob("*.py")
    }
    assert lengths
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
