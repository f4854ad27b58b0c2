"""Numbers of a saved state, checked when it is loaded: a wrong one would fail some steps later, or mislead them."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from daf_core.errors import StateError

MOST = 2**63 - 1  # the largest size and the largest number of steps: what files hold, and kernels count


DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What is raised where a state is read that is something else."""


@contextmanager
def as_a_whole(owner: object, names: Iterable[str], kind: str) -> Generator[None]:
    """Has a state loaded wholly or not at all: with an error inside, these attributes are what they were.

    Raises:
        StateError: What is loaded inside is no state of this kind.
    """
    before = {name: getattr(owner, name) for name in names}
    try:
        yield
    except BaseException as error:
        vars(owner).update(before)
        if isinstance(error, DAMAGED):
            raise StateError(f"this is no saved state of {kind}: {error!r}") from error
        raise


def count(value: Any, least: int = 0) -> int:
    """Returns a count or a size that was saved; a ValueError if it is something else, or below `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise ValueError(f"{value!r} is no count of {least} or more")
    return value


def number(value: Any) -> float:
    """Returns a finite number that was saved; a ValueError if it is something else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


def amount(value: Any) -> float:
    """Returns a finite number of 0 or more that was saved; a ValueError if it is something else."""
    if number(value) < 0:
        raise ValueError(f"{value!r} is below 0")
    return float(value)


def flag(value: Any) -> bool:
    """Returns a bool that was saved; a ValueError if it is something else."""
    if type(value) is not bool:
        raise ValueError(f"{value!r} is neither true nor false")
    return value
