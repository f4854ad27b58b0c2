"""Interrupts such as Ctrl-C, at any moment at which Python may raise one."""

from __future__ import annotations

import _weakrefset
import gc
import sys
from collections.abc import Callable
from types import FrameType


def interrupted(event: int, run: Callable[[], object], counts: Callable[[FrameType], bool] = lambda _: True) -> bool:
    """Runs a function and raises KeyboardInterrupt in it, at one of the moments at which Python may.

    Args:
        event: Number of the event that raises, from 1: a call of a Python function, or a return of any. Before it calls
            a function in C Python raises none, and so none before a `with` statement has given its lock back.
        run: The function.
        counts: Whether an event in a frame counts. Callbacks of collections and weak sets never do: Python prints what
            they raise, and goes on.

    Returns:
        Whether that event came.
    """
    left = event

    def count(frame: FrameType, kind: str, _: object) -> None:
        nonlocal left
        ignored = frame.f_code is interrupted.__code__ or frame.f_code.co_filename == _weakrefset.__file__
        # Before Python 3.11 what is raised as a generator goes on passes its handlers, which no interrupt does.
        goes_on = kind == "call" and frame.f_lasti >= 0 and sys.version_info < (3, 11)
        if kind != "c_call" and not ignored and not goes_on and counts(frame):
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
