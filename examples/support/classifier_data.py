"""Where the classifier's texts come from: the standard library, a GLUE task on the Hub, or one's own file."""

import json
from pathlib import Path
from typing import Any

from support.command_line import InputError
from support.stdlib_text import stdlib_task
from support.text_task import LabelledTexts, TextTask, hold_out

GLUE_TASKS = ("glue/sst2", "glue/cola")  # the tasks of GLUE with one sentence a row
_TEST_SHARE = 0.25


def load_task(dataset: str | None, file: Path | None, seed: int) -> TextTask:
    """Loads the task that the user named, by default the standard library's docstrings.

    Args:
        dataset: one of `GLUE_TASKS`, or None.
        file: a JSON-lines file with "text" and "label" in every row, or None.
        seed: decides the split where the source has none.

    Raises:
        InputError: the source is missing, unreachable or malformed.
    """
    if dataset is not None:
        return _glue_task(dataset.removeprefix("glue/"))
    if file is not None:
        return _own_task(file, seed)
    return stdlib_task(test_share=_TEST_SHARE, seed=seed)


def _glue_task(name: str) -> TextTask:
    try:
        import datasets  # optional: only this source needs it
    except ImportError as error:
        raise InputError(
            "--dataset needs the package `datasets`: pip install datasets, or train on your own file with --data"
        ) from error
    try:
        splits = datasets.load_dataset("nyu-mll/glue", name)
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot load glue/{name} from the Hugging Face Hub ({error}): check the connection, "
            "or leave --dataset out to train on text that needs no network"
        ) from error
    train, test = (_labelled_rows(splits[split]) for split in ("train", "validation"))  # test labels are secret
    return TextTask(splits["train"].features["label"].names, train, test)


def _labelled_rows(rows: Any) -> LabelledTexts:
    return LabelledTexts(list(rows["sentence"]), list(rows["label"]))


def _own_task(file: Path, seed: int) -> TextTask:
    if not file.is_file():
        raise InputError(f'--data {file}: no such file; give a JSON-lines file of rows {{"text": ..., "label": ...}}')
    texts_by_label: dict[str, dict[str, None]] = {}
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                text, label = _row(line, f"--data {file}, line {number}")
                texts_by_label.setdefault(label, {})[text] = None
    _check_labels(file, texts_by_label)
    return hold_out({label: list(texts_by_label[label]) for label in sorted(texts_by_label)}, _TEST_SHARE, seed)


def _row(line: str, place: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: not JSON ({error}); every line must be one JSON object") from error
    if not isinstance(row, dict) or not {"text", "label"} <= row.keys():
        found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise InputError(f'{place}: found {found or "no keys"}; a row needs the keys "text" and "label"')
    if not isinstance(row["text"], str) or not isinstance(row["label"], str | int):
        raise InputError(f'{place}: "text" must be a string and "label" a string or a whole number')
    return row["text"], str(row["label"])


def _check_labels(file: Path, texts_by_label: dict[str, dict[str, None]]) -> None:
    if len(texts_by_label) < 2:
        raise InputError(f"--data {file}: {len(texts_by_label)} label(s) found; classifying needs at least 2")
    rare = [label for label, texts in texts_by_label.items() if len(texts) < 2]
    if rare:
        raise InputError(
            f"--data {file}: only one text for {', '.join(rare)}; every label needs at least 2 distinct texts"
        )
