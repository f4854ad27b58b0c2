"""Rows of data sets, from local files or from the Hugging Face Hub."""

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TRAINING_SPLIT = "train"
EVALUATION_SPLITS = ("dev", "valid", "validation", "test")

Row = dict[str, Any]


class SourceError(RuntimeError):
    """Data or weights cannot be had, or are not what the task needs."""


@dataclass(frozen=True, kw_only=True)
class HubData:
    """A data set of the Hub and the split that a model is evaluated on."""

    name: str
    config: str | None = None
    revision: str | None = None
    evaluation: str = "validation"


def hub_data(text: str, own: HubData) -> HubData:
    """Returns the data set that a text names, as ``OWNER/NAME``, ``OWNER/NAME/CONFIG`` or either with ``@REVISION``.

    Args:
        text: The name; the owner of the task's own data set may be left out, as in ``glue/stsb``.
        own: The task's own data set. Its configuration and revision are those of its name.
    """
    path, _, revision = text.partition("@")
    owner, short_name = own.name.split("/")
    parts = path.split("/")
    parts = [owner, *parts] if parts[0] == short_name else parts
    name = "/".join(parts[:2])
    default = own if name == own.name else replace(own, config=None, revision=None)
    return replace(
        default, name=name, config="/".join(parts[2:]) or default.config, revision=revision or default.revision
    )


def load_hub(data: HubData) -> dict[str, list[Row]]:
    """Returns the rows of the training split and of the one for evaluation.

    Raises:
        SourceError: The package ``datasets`` is missing, or the data set or a split of it cannot be had.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise SourceError(
            f"{data.name} is a name of the Hub, and the package datasets, which reads from there, is not installed; "
            "run: pip install datasets; or pass local files as --dataset"
        ) from error
    with explained(
        f"{data.name!r} is no file or folder here, and cannot be had from the Hub",
        "pass local files with the same columns as --dataset, or run it where the Hub can be reached",
    ):
        found = load_dataset(data.name, data.config, revision=data.revision)
    missing = [split for split in (TRAINING_SPLIT, data.evaluation) if split not in found]
    if missing:
        raise SourceError(
            f"{data.name} has the splits {sorted(found)}, and {missing} are needed; pass another --dataset"
        )
    return {split: found[split].to_list() for split in (TRAINING_SPLIT, data.evaluation)}


@contextmanager
def explained(what: str, advice: str) -> Iterator[None]:
    """Tells what could not be had, why and what to do, where a library cannot read or fetch something.

    Raises:
        SourceError: Reading failed.
    """
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise SourceError(f"{what}: {' '.join(str(error).split())}; {advice}") from error


def read_folder(folder: Path) -> dict[str, list[Row]]:
    """Returns the rows of each split that the folder has a file of, such as ``train.jsonl.gz`` and ``dev.jsonl.gz``.

    Raises:
        FileNotFoundError: The training split or every evaluation split is missing.
        SourceError: A split has several files.
    """
    files = {
        split: file
        for split in (TRAINING_SPLIT, *EVALUATION_SPLITS)
        if (file := _split_file(folder, split)) is not None
    }
    if TRAINING_SPLIT not in files or len(files) == 1:
        raise FileNotFoundError(
            f"{folder} has the splits {sorted(files)}; train.jsonl.gz and dev.jsonl.gz or test.jsonl.gz are "
            f"needed, or such files as {', '.join(READERS)}; pass the folder that has them with --data"
        )
    return {split: read_file(file) for split, file in files.items()}


def read_file(file: Path) -> list[Row]:
    """Returns the rows of a file, in the format that its name says.

    Raises:
        SourceError: It has another format.
    """
    suffix = next((suffix for suffix in READERS if file.name.endswith(suffix)), None)
    if suffix is None:
        raise SourceError(f"got {file}; allowed are files that end in {', '.join(READERS)}; convert it to one of them")
    return READERS[suffix](file)


def _split_file(folder: Path, split: str) -> Path | None:
    found = [file for suffix in READERS if (file := folder / f"{split}{suffix}").exists()]
    if len(found) > 1:
        raise SourceError(
            f"{folder} has {[file.name for file in found]}; one file a split is needed, remove the others"
        )
    return found[0] if found else None


def _read_lines(file: Path) -> list[Row]:
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _read_csv(file: Path) -> list[Row]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _read_tsv(file: Path) -> list[Row]:
    """Quotes are text, as in the files of GLUE."""
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


def _read_parquet(file: Path) -> list[Row]:
    try:
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise SourceError(f"reading {file} takes the package pyarrow; run: pip install pyarrow") from error
    return read_table(file).to_pylist()


READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl.gz": _read_lines,
    ".jsonl": _read_lines,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}
