"""What holds for every feature in the table of what is unsupported."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from daf_core import ConfigError
from daf_core.unsupported.table import Feature, check_supported, unsupported_reasons

REMEDY = re.compile(r"\b(set|leave|leaves|use|give|wrap|have|make|record|run one|turns)\b", re.IGNORECASE)
"""The verb of what a user can do."""

Made = Callable[[], Any]


def features_in(folder: Path) -> set[str]:
    """Returns the names of all features that a package makes."""
    nodes = [node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    made = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Feature")]
    named = [ast.unparse(node.targets[0]) for node in nodes if isinstance(node, ast.Assign) and node.value in made]
    assert len(set(named)) == len(made)
    return set(named)


def check_works(feature: Feature, context: Any) -> None:
    """Checks a context in which a feature works."""
    assert unsupported_reasons(feature, context) == []
    check_supported(feature, context)


def check_limitations(feature: Feature, trips: Sequence[tuple[Made, str]]) -> None:
    """Checks that each limitation has a context that trips it, and names what it has found there.

    Args:
        feature: The feature.
        trips: For each limitation in order: what makes a context, and what the sentence names.
    """
    assert len(trips) == len(feature.limitations)
    for (predicate, sentence), (made, named) in zip(feature.limitations, trips, strict=True):
        context = made()
        found = predicate(context)
        assert found, sentence
        reason = sentence.format(*(found if isinstance(found, tuple) else (found,)))
        assert named in reason
        assert reason in unsupported_reasons(feature, context)
        first = unsupported_reasons(feature, context)[0]
        with pytest.raises(ConfigError) as raised:
            check_supported(feature, context)
        assert str(raised.value) == feature.error.format(first)
        if feature.error != "{}":
            assert REMEDY.search(feature.error.format(reason)), reason
