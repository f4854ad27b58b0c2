"""A text-classification task as plain values, and how texts are held out for its test set."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class LabelledTexts:
    """Texts and, for each, the index of its label."""

    texts: list[str]
    labels: list[int]


@dataclass(frozen=True)
class TextTask:
    """The labels' names, and two sets that share no text."""

    label_names: list[str]
    train: LabelledTexts
    test: LabelledTexts


def hold_out(texts_by_label: dict[str, list[str]], test_share: float, seed: int) -> TextTask:
    """Splits distinct texts into a training and a test set with the same mix of labels.

    Args:
        texts_by_label: label names, in the order of their indices, each with its distinct texts.
        test_share: share of every label's texts that goes to the test set; at least one does.
        seed: decides which texts are held out, and the order of the training texts.
    """
    train: list[tuple[str, int]] = []
    test: list[tuple[str, int]] = []
    for label, (name, texts) in enumerate(texts_by_label.items()):
        shuffled = random.Random(f"{seed} {name}").sample(texts, len(texts))
        held_out = max(1, round(len(texts) * test_share))
        test += [(text, label) for text in shuffled[:held_out]]
        train += [(text, label) for text in shuffled[held_out:]]
    random.Random(seed).shuffle(train)
    return TextTask(list(texts_by_label), _labelled(train), _labelled(test))


def _labelled(pairs: list[tuple[str, int]]) -> LabelledTexts:
    return LabelledTexts([text for text, _ in pairs], [label for _, label in pairs])
