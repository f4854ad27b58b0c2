"""The pages that follow from the code: they are up to date, complete, and quote what is said."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import types
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from daf_core import DAFConfig, ElasticConfig, errors
from tests.pages.blocks import PAGES, inline_code
from tests.pages.commands import DAF

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"daf_core": "daf_core", "daf_integrations": "daf_integrations", "daf_kernels": "kernels/daf_kernels"}
FOLDERS = (*PACKAGES.values(), "benchmarks", "docs", "examples", "tests")
ROOTS = {*FOLDERS, "kernels"}
FILE = re.compile(r"[\w./-]+\.(py|sh)|docs/[\w/-]+\.md|examples/[\w-]+\.yaml")
SECTIONS = ("guides", "concepts", "reference", "benchmarks")
COMMANDS = [pytest.param(command, id=name) for name, command in DAF.items()]


@cache
def generate() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def in_pages() -> frozenset[str]:
    """Every word that is set as code in a sentence or a table of a page, with the dots and slashes in it."""
    return frozenset(word for _, code in inline_code() for word in re.findall(r"[\w./-]+", code))


def test_generated_pages_are_what_the_code_says() -> None:
    for file, text in generate().PAGES.items():
        assert file.read_text() == text(), "run: python docs/generate.py"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_documented(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not generate().meaning(module, name)] == []
    assert [name for name in module.__all__ if name not in in_pages()] == []


def test_every_error_is_public() -> None:
    kinds = [name for name, _ in inspect.getmembers(errors, inspect.isclass)]
    assert len(kinds) > 10
    assert set(kinds) <= set(importlib.import_module("daf_core").__all__)


def test_every_module_that_pages_name_is_documented() -> None:
    named = {word for word in in_pages() if re.match(r"daf_(core|integrations|kernels)(\.\w+)*$", word)}
    modules = {name for name in named if _is_module(name)}
    assert {"daf_integrations.lightning", "daf_core"} <= modules
    assert [name for name in modules if not importlib.import_module(name).__doc__] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_is_documented(command: click.Command) -> None:
    assert command.help
    assert f"daf {command.name}" in {" ".join(code.split()[:2]) for _, code in inline_code()}
    options = [each for each in command.params if isinstance(each, click.Option)]
    assert [option.name for option in options if not option.help] == []
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    reference = page.partition(f"\n## `daf {command.name}")[2].partition("\n## ")[0]
    assert [name for option in options for name in option.opts if f"`{name}`" not in reference] == []


@pytest.mark.parametrize("config", [DAFConfig, ElasticConfig])
def test_every_option_of_training_is_documented(config: type[Any]) -> None:
    assert [field.name for field in fields(config) if field.name not in in_pages()] == []


def test_every_figure_is_documented() -> None:
    figures = {figure for tree in _trees() for text in _constants(tree) for figure in re.findall(r"^daf/\w+$", text)}
    assert len(figures) > 10
    assert sorted(figures - in_pages()) == []


def test_every_variable_of_the_environment_is_documented() -> None:
    trees = _trees()
    named = {name: value for tree in trees for name, value in _named_constants(tree)}
    variables = {named.get(each, each.strip("'")) for tree in trees for each in _looked_up(tree)}
    assert {"DAF_AUTOLOAD", "ACCELERATE_USE_DAF", "CONDA_PREFIX"} <= variables
    assert sorted(variables - in_pages()) == []
    assert variables == set(generate().ENVIRONMENT)


def test_troubleshooting_quotes_what_the_code_says() -> None:
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", (ROOT / "docs" / "guides" / "troubleshooting.md").read_text())
    assert len(quoted) > 10
    said = "\n".join(text for tree in _trees() for text in _constants(tree))
    assert [quote for quote in quoted if quote not in said] == []


def test_pages_are_short() -> None:
    most = {ROOT / "README.md": 150}
    lines = {page: len(page.read_text().splitlines()) for page in [ROOT / "README.md", *_docs()]}
    assert [f"{page.name}: {count}" for page, count in lines.items() if count > most.get(page, 250)] == []


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / link).resolve() for link in _links(index)}
    assert {folder.name for page in _docs() for folder in [page.parent]} == {"docs", *SECTIONS}
    assert sorted(page.name for page in _docs() if page not in {index, *listed}) == []


def test_links_between_pages_lead_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in _links(page)]
    assert len(links) > 20
    assert [f"{page.name}: {link}" for page, link in links if not _leads_somewhere(page, link)] == []


def test_files_that_pages_name_exist() -> None:
    """Pages may leave out the beginning of a path."""
    named = {(place, code) for place, code in inline_code() if FILE.fullmatch(code)}
    assert len(named) > 50
    assert sorted(f"{place}: {code}" for place, code in named if not _is_file(code)) == []


def test_folders_that_pages_name_exist() -> None:
    named = {(place, code) for place, code in inline_code() if code.partition("/")[0] in ROOTS and "/" in code}
    named = {(place, code) for place, code in named if re.fullmatch(r"[\w./-]+", code)}
    assert len(named) > 20
    assert sorted(f"{place}: {code}" for place, code in named if not (ROOT / code).exists()) == []


def test_tables_name_files_by_their_names() -> None:
    """A module in a table of what to change has its suffix, so that the test above sees it."""
    stems = {path.stem for folder in PACKAGES.values() for path in (ROOT / folder).rglob("*.py")}
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to change what")[2].partition("\n## ")[0]
    codes = re.findall(r"`([^`]+)`", text)
    assert len([code for code in codes if FILE.fullmatch(code)]) > 40
    assert [code for code in codes if re.fullmatch(r"[a-z_]+", code) and code in stems] == []


def test_terms_of_the_glossary_are_names_in_the_code() -> None:
    glossary = ROOT / "docs" / "concepts" / "glossary.md"
    lines = [line for line in glossary.read_text().splitlines() if line.startswith("- **")]
    assert len(lines) > 40
    assert [line for line in lines if not re.match(r"- \*\*[A-Z][a-z -]+\*\*( \(`[^)]+`\))?: ", line)] == []
    words = {code for place, code in inline_code() if place.startswith("docs/concepts/glossary.md")}
    known = {name for tree in _trees() for name in _identifiers(tree)} | {path.stem for path in _sources()}
    known |= {text for tree in _trees() for text in _constants(tree)}
    assert sorted(word for word in words if word.strip('"') not in known) == []


def _docs() -> list[Path]:
    return [page for page in PAGES if page.is_relative_to(ROOT / "docs")]


def _links(page: Path) -> list[str]:
    """The links of a page that do not leave the repository."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if not link.startswith("http")]


def _leads_somewhere(page: Path, link: str) -> bool:
    file, _, heading = link.partition("#")
    target = page.parent / file if file else page
    return target.exists() and (not heading or heading in _anchors(target.read_text()))


def _anchors(text: str) -> set[str]:
    """The names that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _is_file(name: str) -> bool:
    return any(file.endswith(f"/{name}") for file in _files())


@cache
def _files() -> tuple[str, ...]:
    paths = [*ROOT.glob("*.*"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*"))]
    return tuple("/" + path.relative_to(ROOT).as_posix() for path in paths)


def _sources() -> list[Path]:
    return [path for folder in PACKAGES.values() for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def _trees() -> tuple[ast.Module, ...]:
    return tuple(ast.parse(path.read_text()) for path in _sources())


def _identifiers(tree: ast.Module) -> Iterator[str]:
    """What a file names: classes, functions, parameters, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _constants(tree: ast.Module) -> Iterator[str]:
    """All text in a file: that of parts of f-strings, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _named_constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield ast.unparse(node.targets[0]), node.value.value


def _looked_up(tree: ast.Module) -> Iterator[str]:
    """What a file looks up in the environment: names of constants, and texts in quotes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv", "os.environ.pop"):
            yield ast.unparse(node.args[0])
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            yield ast.unparse(node.slice)
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
            yield ast.unparse(node.left)
