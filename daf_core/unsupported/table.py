"""The table of features that some models or batches do not support; any package adds its own features to it.

A predicate takes the feature's context and returns what it finds: something false where the limitation does not apply,
else a value, or a tuple of values, for the fields of the sentence. A predicate never raises: each is asked, whatever
the others have found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from daf_core.errors import ConfigError

Limitation = tuple[Callable[[Any], object], str]
"""A predicate and the sentence that says what it has found, with the fields of `str.format`."""


@dataclass(frozen=True)
class Feature:
    """A feature and its limitations.

    `error` is the message of the `ConfigError` where the user has asked for the feature; the reason takes the place of
    ``{}``. The error or each sentence says what the user can do.
    """

    limitations: tuple[Limitation, ...]  # errors name the first that applies
    error: str = "{}"

    def error_for(self, reason: str) -> ConfigError:
        """Returns the error for a reason."""
        return ConfigError(self.error.format(reason))


@dataclass(frozen=True)
class Context:
    """What most predicates look at: the model as the user calls it, and inside its wrappers, the batch, and blocks."""

    model: nn.Module
    inner: nn.Module | None = None
    batch: Any = None
    blocks: int = 0


def unsupported_reasons(feature: Feature, context: Any) -> list[str]:
    """Returns why a feature does not work in a context; an empty list where it works."""
    found = [(predicate(context), sentence) for predicate, sentence in feature.limitations]
    return [sentence.format(*(each if isinstance(each, tuple) else (each,))) for each, sentence in found if each]


def check_supported(feature: Feature, context: Any) -> None:
    """Checks that a feature works in a context; a ConfigError if it does not."""
    for reason in unsupported_reasons(feature, context):
        raise feature.error_for(reason)
