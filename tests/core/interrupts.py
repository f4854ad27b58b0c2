"""Interrupts such as Ctrl-C, at any moment at which Python may raise one."""

from __future__ import annotations

import _weakrefset
import gc
import sys
from collections.abc import Callable
from types import FrameType


def interrupted(event: int, run: Callable[[], object], counts: Callable[[FrameType], bool] = lambda _: True) -> bool:
    """Runs a function and raises KeyboardInterrupt in it, where a function is called or returns.

    Args:
        event: Number of the call or return that raises, from 1.
        run: The function.
        counts: Whether an event in a frame counts. Callbacks of collections and weak sets never do: Python prints what
            they raise, and goes on.

    Returns:
        Whether that event came.
    """
    left = event

    def count(frame: FrameType, *_: object) -> None:
        nonlocal left
        ignored = frame.f_code is interrupted.__code__ or frame.f_code.co_filename == _weakrefset.__file__
        if not ignored and counts(frame):
            left -= 1
            if not left:
                raise KeyboardInterrupt

    collects = gc.isenabled()
    gc.disable()
    try:
        sys.setprofile(count)
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return False
