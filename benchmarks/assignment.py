"""What the options of the accuracy benchmark say is to be trained."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.finetune import finetune, step_count, tokenized
from benchmarks.images import (
    TRAINING_FILE,
    ImageRecipe,
    Images,
    image_steps,
    images_of_rows,
    load_images,
    train_images,
)
from benchmarks.rows import (
    TRAINING_SPLIT,
    HubData,
    Row,
    SourceError,
    hub_data,
    load_hub,
    read_file,
    read_folder,
)
from benchmarks.tasks import SHORT_TASK, TASKS, ImageTask, TextTask

Training = Callable[[str, int, Callable[[], None]], tuple[dict[str, float], dict[str, float]]]
"""Trains with a method and a seed, tells of each step, and returns scores and what was logged."""


def load_training(options: argparse.Namespace) -> tuple[Training, int]:
    """Returns what trains on the data that was asked for, and its number of steps.

    Raises:
        FileNotFoundError: A file is missing.
        SourceError: Data, the tokenizer or the pre-trained encoder cannot be had, or do not fit the task.
    """
    images = options.task is None and (Path(options.data) / TRAINING_FILE).exists()
    task = TASKS[options.task or "cifar10"] if options.task or images else SHORT_TASK
    return _image_training(options, task) if isinstance(task, ImageTask) else _text_training(options, task)


def _text_training(options: argparse.Namespace, task: TextTask) -> tuple[Training, int]:
    if options.model is not None:
        task = replace(task, model=options.model, tokenizer=None)
    tokenizer = options.tokenizer or task.tokenizer
    task = replace(task, tokenizer=tokenizer, recipe=replace(task.recipe, **_epochs(options)))
    splits = tokenized(_rows(options, task.hub), task, options.train_rows, options.evaluation_rows)

    def run(method: str, seed: int, on_step: Callable[[], None]) -> tuple[dict[str, float], dict[str, float]]:
        return finetune(method, seed, splits, task, options.device, on_step)

    return run, step_count(len(splits[TRAINING_SPLIT]), task.recipe)


def _image_training(options: argparse.Namespace, task: ImageTask) -> tuple[Training, int]:
    unused = [name for name in ("model", "tokenizer", "evaluation") if getattr(options, name) is not None]
    if unused:
        raise SourceError(f"got --{unused[0]}, and ResNet-18 is trained on images; leave it out")
    images, recipe = _images(options, task), ImageRecipe(**_epochs(options))

    def run(method: str, seed: int, on_step: Callable[[], None]) -> tuple[dict[str, float], dict[str, float]]:
        return train_images(method, seed, images, recipe, options.device, on_step)

    return run, image_steps(len(images[TRAINING_SPLIT].labels), recipe)


def _epochs(options: argparse.Namespace) -> dict[str, int]:
    return {} if options.epochs is None else {"epochs": options.epochs}


def _rows(options: argparse.Namespace, own: HubData) -> dict[str, list[Row]]:
    """Reads a folder, two files or a data set of the Hub, the task's own where none is named."""
    file = options.data is not None and Path(options.data).is_file()
    if file != (options.evaluation is not None):
        raise SourceError(
            f"got --dataset {options.data} and --evaluation {options.evaluation}; a file to train on needs one to "
            "evaluate on, and a folder or a name of the Hub has its own; pass both files, or leave --evaluation out"
        )
    if file:
        return {TRAINING_SPLIT: read_file(Path(options.data)), own.evaluation: read_file(options.evaluation)}
    return read_folder(Path(options.data)) if _is_folder(options.data) else load_hub(_named(options.data, own))


def _images(options: argparse.Namespace, task: ImageTask) -> dict[str, Images]:
    if _is_folder(options.data):
        return load_images(Path(options.data), options.train_rows, options.evaluation_rows)
    rows = load_hub(_named(options.data, task.hub))
    limits = {TRAINING_SPLIT: options.train_rows, task.hub.evaluation: options.evaluation_rows}
    return {split: images_of_rows(rows[split][:limit]) for split, limit in limits.items()}


def _is_folder(data: str | None) -> bool:
    return data is not None and Path(data).is_dir()


def _named(data: str | None, own: HubData) -> HubData:
    return own if data is None else hub_data(data, own)
