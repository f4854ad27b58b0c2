"""Packing in the background that is fast, slow, or waits for a gate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from daf_core.codecs.saved_tensor import SavedTensor
from daf_core.saved_tensors.background import BackgroundPacker
from daf_core.saved_tensors.pending import PackJob, PendingActivation

Pace = Callable[[pytest.MonkeyPatch], None]


def _as_it_comes(patch: pytest.MonkeyPatch) -> None:
    return


def late(patch: pytest.MonkeyPatch) -> None:
    """The thread that saves is always ahead, as far as it may."""
    pack = BackgroundPacker._pack

    def pack_late(self: BackgroundPacker, flight: PackJob) -> None:
        time.sleep(0.003)
        pack(self, flight)

    patch.setattr(BackgroundPacker, "_pack", pack_late)


def _at_once(patch: pytest.MonkeyPatch) -> None:
    """Everything has landed before the thread that saves goes on."""
    send = BackgroundPacker.send

    def send_and_wait(self: BackgroundPacker, saved: SavedTensor) -> PendingActivation:
        sent = send(self, saved)
        sent._job.done.wait()
        return sent

    patch.setattr(BackgroundPacker, "send", send_and_wait)


PACES: dict[str, Pace] = {"as-it-comes": _as_it_comes, "late": late, "at-once": _at_once}


class Gate:
    """Inside, nothing lands until the event is set; `reached` says that something would."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._event = threading.Event()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> threading.Event:
        pack = BackgroundPacker._pack

        def gated(background: BackgroundPacker, flight: PackJob) -> None:
            self.reached.set()
            assert self._event.wait(30)
            pack(background, flight)

        self._patch.setattr(BackgroundPacker, "_pack", gated)
        return self._event

    def __exit__(self, *_: object) -> None:
        self._event.set()
        self._patch.undo()
