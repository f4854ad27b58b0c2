"""Training of ResNet-18 on small images, from random weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from transformers import AutoModelForImageClassification, ResNetConfig

from benchmarks.loop import train
from benchmarks.methods import Method, open_method

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


def load_images(folder: Path, train_rows: int | None = None) -> dict[str, Images]:
    """Returns the training and the test images.

    Args:
        folder: Where the two ``.npz`` files are, each with ``x``, uint8 of shape (rows, 32, 32, 3), and ``y``.
        train_rows: How many training images to keep; None keeps all.

    Raises:
        FileNotFoundError: A file is missing.
    """
    splits = {"train": _read(folder / TRAINING_FILE), "test": _read(folder / TEST_FILE)}
    train = splits["train"]
    splits["train"] = Images(train.pixels[:train_rows], train.labels[:train_rows])
    return splits


def train_images(
    method_name: str,
    seed: int,
    splits: dict[str, Images],
    recipe: ImageRecipe,
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
    method = open_method(method_name, model)
    _train(model, method, splits["train"], recipe, seed, on_step)
    figures = method.figures()
    method.close()
    return {"test": _accuracy(model, splits["test"])}, figures


def image_steps(rows: int, recipe: ImageRecipe) -> int:
    """Returns the number of training steps on so many images."""
    return recipe.epochs * (rows // recipe.batch)


def _train(
    model: nn.Module, method: Method, images: Images, recipe: ImageRecipe, seed: int, on_step: Callable[[], None]
) -> None:
    optimizer = SGD(
        model.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )
    schedule = OneCycleLR(optimizer, recipe.learning_rate, total_steps=image_steps(len(images.labels), recipe))
    train(model, method, _batches(images, recipe, seed), optimizer, schedule, on_step)


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
        correct += int((model(pixel_values=pixels).logits.argmax(-1) == labels).sum())
    return correct / len(images.labels)


def _read(file: Path) -> Images:
    with np.load(file) as content:
        pixels = torch.from_numpy(content["x"]).permute(0, 3, 1, 2).float().div(255)
        labels = torch.from_numpy(content["y"]).long()
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
    return Images((pixels - mean) / deviation, labels)
