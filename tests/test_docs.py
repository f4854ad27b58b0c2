"""The pages that follow from the code."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import yaml

from daf_core import DAFConfig

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_the_configuration_page_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.PAGE.read_text() == generate.page(), "run: python docs/generate.py"


def test_its_yaml_is_a_configuration() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / "configuration.md").read_text(), re.DOTALL)
    assert [DAFConfig.from_dict(yaml.safe_load(block)["daf_config"]).precision for block in blocks] == [4]


def test_troubleshooting_quotes_what_the_code_says() -> None:
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", (DOCS / "troubleshooting.md").read_text())
    assert len(quoted) > 10
    said = "\n".join(_texts(folder) for folder in ("daf_core", "daf_integrations", "kernels/daf_kernels"))
    assert [quote for quote in quoted if quote not in said] == []


def _texts(folder: str) -> str:
    """All text in the code of a folder: that of parts of f-strings, too."""
    trees = [ast.parse(path.read_text()) for path in sorted((DOCS.parent / folder).rglob("*.py"))]
    constants = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return "\n".join(value for value in constants if isinstance(value, str))
