"""Real text without a network: the docstrings of the running Python's own standard library."""

import ast
import functools
import random
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from support.command_line import InputError
from support.text_task import TextTask, hold_out

STDLIB = Path(sysconfig.get_paths()["stdlib"])
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = ("body", "cases", "handlers", "orelse", "finalbody")
"""Parts of a statement that are statements, in their order."""
_FEWEST_WORDS = 5


def docstrings_by_family(words: int | None = None, stdlib: Path = STDLIB) -> dict[str, list[str]]:
    """Returns every distinct docstring under the top-level package or module it comes from.

    Args:
        words: only this many words of a docstring are kept; None keeps all.
        stdlib: folder of the standard library's sources.

    Returns:
        Families in alphabetical order, each with its docstrings in source order. A text that two families
        share tells neither, and is left out.

    Raises:
        InputError: the folder has no Python sources, as in some embedded Pythons.
    """
    families: dict[str, dict[str, None]] = {}
    for family, text in _documented_texts(stdlib):
        families.setdefault(family, {})[" ".join(text.split()[:words])] = None
    if not families:
        raise InputError(
            f"no docstrings found under {stdlib}: the examples read the standard library's own sources. "
            "Use a Python that ships them, as python.org, conda, pyenv and the distributions do."
        )
    owners = Counter(text for texts in families.values() for text in texts)
    return {family: [text for text in texts if owners[text] == 1] for family, texts in sorted(families.items())}


def stdlib_task(families: int = 8, words: int = 60, test_share: float = 0.25, seed: int = 0) -> TextTask:
    """Builds the task "which part of the standard library does this docstring come from?".

    Args:
        families: number of labels; the packages with the most docstrings are taken.
        words: only this many words of a docstring are kept.
        test_share: share of every label's texts that is held out.
        seed: decides which texts are held out, and the order of the training texts.

    Returns:
        A task with equally many texts for every label, the same for the same Python version and seed.
    """
    texts = docstrings_by_family(words)
    largest = sorted(texts, key=lambda family: len(texts[family]), reverse=True)[:families]
    fewest = min(len(texts[family]) for family in largest)
    balanced = {family: random.Random(f"{seed} {family}").sample(texts[family], fewest) for family in sorted(largest)}
    return hold_out(balanced, test_share, seed)


def stdlib_corpus() -> list[str]:
    """Returns all distinct docstrings of the standard library at full length, for language modelling."""
    return [text for texts in docstrings_by_family().values() for text in texts]


@functools.cache
def _documented_texts(stdlib: Path) -> list[tuple[str, str]]:
    """Returns the docstrings with their families; to read all sources takes seconds, and some examples ask twice."""
    found: list[tuple[str, str]] = []
    for path in sorted(stdlib.rglob("*.py")):
        inside = path.relative_to(stdlib)
        if _SKIPPED_FOLDERS.isdisjoint(inside.parts):
            family = inside.parts[0].removesuffix(".py")
            found += [(family, text) for text in _docstrings(path)]
    return found


def _docstrings(path: Path) -> Iterator[str]:
    with tokenize.open(path) as source:
        nodes: list[ast.AST] = [ast.parse(source.read())]
    # Not `ast.walk`: nine of ten nodes are parts of expressions, which have no docstrings.
    for node in nodes:  # which grows meanwhile
        if isinstance(node, _DOCUMENTED):
            words = (ast.get_docstring(node) or "").split()
            if len(words) >= _FEWEST_WORDS:
                yield " ".join(words)
        for block in _BLOCKS:
            nodes += getattr(node, block, ())
