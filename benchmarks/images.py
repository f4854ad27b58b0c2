"""Training of ResNet-18 on small images, from random weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from transformers import AutoModelForImageClassification, ResNetConfig

from benchmarks.elastic_methods import open_trained
from benchmarks.loop import train
from benchmarks.rows import Row
from benchmarks.tasks import read_columns
from benchmarks.texts import on_device
from daf_integrations.cli.bench.methods import Method

TRAINING_FILE, TEST_FILE = "train10k.npz", "test2k.npz"
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.262)  # of CIFAR-10's channels
CLASSES = 10
EVALUATION_BATCH = 500


@dataclass(frozen=True, kw_only=True)
class ImageRecipe:
    """How the network is trained: stochastic gradient descent with momentum, one cycle of the learning rate."""

    batch: int = 128
    epochs: int = 8
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4


@dataclass(frozen=True)
class Images:
    """Normalized images, float32 of shape (rows, 3, 32, 32), and their classes."""

    pixels: Tensor
    labels: Tensor


def load_images(folder: Path, train_rows: int | None = None, test_rows: int | None = None) -> dict[str, Images]:
    """Returns the training and the test images.

    Args:
        folder: Where the two ``.npz`` files are, each with ``x``, uint8 of shape (rows, 32, 32, 3), and ``y``.
        train_rows: How many training images to keep; None keeps all.
        test_rows: How many test images to keep.

    Raises:
        FileNotFoundError: A file is missing.
    """
    return {"train": _read(folder / TRAINING_FILE, train_rows), "test": _read(folder / TEST_FILE, test_rows)}


def images_of_rows(rows: list[Row]) -> Images:
    """Returns the images of rows of the Hub's CIFAR-10, which have ``img``, a picture, and ``label``."""
    pictures, labels = zip(*(read_columns(row, ("img", "label")) for row in rows), strict=True)
    return _normalized(np.stack([np.asarray(picture) for picture in pictures]), np.array(labels))


def train_images(
    method_name: str,
    seed: int,
    splits: dict[str, Images],
    recipe: ImageRecipe,
    device: str = "cpu",
    on_step: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Trains ResNet-18 and returns its accuracy on the test images, and the method's figures.

    The seed fixes the initial weights, the order of the rows and how each is shifted and mirrored.
    """
    torch.manual_seed(seed)
    model = AutoModelForImageClassification.from_config(
        ResNetConfig(
            layer_type="basic",
            depths=[2, 2, 2, 2],
            hidden_sizes=[64, 128, 256, 512],
            num_labels=CLASSES,
            problem_type="single_label_classification",
        )
    )
    # The stem for images of 224 x 224 would leave 8 x 8 of 32 x 32 as well, but see them through 7 x 7.
    model.resnet.embedder.embedder.convolution = nn.Conv2d(3, 64, 3, padding=1, stride=2, bias=False)
    model.to(device)
    method = open_trained(method_name, model)
    _train(model, method, splits["train"], recipe, seed, on_step)
    figures = method.figures()
    method.close()
    return {"test": _accuracy(model, splits["test"])}, figures


def image_steps(rows: int, recipe: ImageRecipe) -> int:
    """Returns the number of training steps on so many images, whatever the method."""
    return recipe.epochs * (rows // recipe.batch)


def _train(
    model: nn.Module, method: Method, images: Images, recipe: ImageRecipe, seed: int, on_step: Callable[[], None]
) -> None:
    optimizer = SGD(
        model.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )
    schedule = OneCycleLR(optimizer, recipe.learning_rate, total_steps=image_steps(len(images.labels), recipe))
    batches = (on_device(batch, model) for batch in _batches(images, recipe, seed))
    train(model, method, batches, optimizer, schedule, on_step)


def _batches(images: Images, recipe: ImageRecipe, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yields whole batches of all epochs, each image mirrored at random and shifted by up to 4 pixels."""
    generator = torch.Generator().manual_seed(seed)
    padded = nn.functional.pad(images.pixels, (4, 4, 4, 4))
    for _ in range(recipe.epochs):
        order = torch.randperm(len(images.labels), generator=generator)
        for rows in order.split(recipe.batch)[: len(order) // recipe.batch]:
            top, left = torch.randint(9, (2,), generator=generator).tolist()
            pixels = padded[rows, :, top : top + 32, left : left + 32]
            mirrored = torch.rand(len(rows), generator=generator) < 0.5
            pixels[mirrored] = pixels[mirrored].flip(-1)
            yield {"pixel_values": pixels, "labels": images.labels[rows]}


@torch.no_grad()
def _accuracy(model: nn.Module, images: Images) -> float:
    model.eval()
    correct = 0
    for pixels, labels in zip(
        images.pixels.split(EVALUATION_BATCH), images.labels.split(EVALUATION_BATCH), strict=True
    ):
        logits = model(**on_device({"pixel_values": pixels}, model)).logits
        correct += int((logits.argmax(-1).cpu() == labels).sum())
    return correct / len(images.labels)


def _read(file: Path, rows: int | None) -> Images:
    with np.load(file) as content:
        return _normalized(content["x"][:rows], content["y"][:rows])


def _normalized(x: NDArray[np.uint8], y: NDArray[np.integer]) -> Images:
    pixels = torch.from_numpy(x).permute(0, 3, 1, 2).float().div(255)
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
    return Images((pixels - mean) / deviation, torch.from_numpy(y).long())
