"""The blocks of code in the pages, and the names that those of Python may use without making them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from markdown_it import MarkdownIt
from torch import nn
from transformers import Trainer, TrainingArguments

import daf_core
import daf_integrations
from benchmarks import preferences
from tests.integrations.hf_runs import QUICK, lora, rows_for
from tests.integrations.lightning_runs import Classifier, loader
from tests.integrations.loop_runs import adam

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))

INDENTED = "indented"
"""The kind of a block that has no fence."""


@dataclass(frozen=True)
class Block:
    """A block of code: where it is, the word after its fence, and what is in it."""

    place: str
    kind: str
    text: str


def all_blocks() -> list[Block]:
    """Every block of code in the pages."""
    return [block for page in PAGES for block in blocks_of(page.read_text(), page.relative_to(ROOT).as_posix())]


def blocks_of(text: str, name: str) -> list[Block]:
    """The blocks of code of one page."""
    tokens = [token for token in MarkdownIt().parse(text) if token.type in ("fence", "code_block") and token.map]
    return [
        Block(f"{name}:{token.map[0] + 1}", token.info if token.type == "fence" else INDENTED, token.content)
        for token in tokens
        if token.map
    ]


def inline_code() -> list[tuple[str, str]]:
    """Every `piece of code` in a sentence of the pages, and where it is."""
    return [
        (f"{page.relative_to(ROOT).as_posix()}:{token.map[0] + 1}", piece.content)
        for page in PAGES
        for token in MarkdownIt().enable("table").parse(page.read_text())
        if token.type == "inline" and token.map
        for piece in token.children or []
        if piece.type == "code_inline"
    ]


def versions_of(text: str) -> list[str]:
    """The text before and after, of a block that shows a difference."""
    lines = text.splitlines()
    return ["\n".join(line[1:] for line in lines if line[:1] != other) for other in "+-"]


class Tracker:
    """Something that takes a step's figures, as trackers of experiments do."""

    def log(self, figures: dict[str, float]) -> None:
        assert figures


def names_for_blocks() -> dict[str, Any]:
    """What a block of Python may use: all public names of DAF, and a small model with what trains it.

    `model`, `args` and `data` are for a Trainer of transformers, `module` and `loader` for one of Lightning; `loader`,
    `batch`, `optimizer` and `tracker` for loops; `policy`, `pairs` and `tokenizer` for trainers of TRL.
    """
    model = lora()
    batches = loader(model, count=16)
    return {
        **{name: getattr(module, name) for module in (daf_core, daf_integrations) for name in module.__all__},
        **{"daf": daf_integrations, "daf_integrations": daf_integrations, "lightning": lightning},
        **{"torch": torch, "nn": nn, "Trainer": Trainer, "TrainingArguments": TrainingArguments},
        **{"model": model, "data": rows_for(model, 16), "args": TrainingArguments("out", **QUICK)},
        **{"module": Classifier(model), "loader": batches, "batch": next(iter(batches))},
        **{"optimizer": adam(model), "tracker": Tracker()},
        **{"policy": preferences.llama(), "pairs": preferences.preferences(16), "tokenizer": preferences.tokenizer()},
    }
