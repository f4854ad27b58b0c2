"""When what DAF keeps dies, no Python code runs: an interrupt that came then would be lost, and bytes with it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

from daf_core import ActivationEngine, DAFConfig
from daf_core.codecs.base import EncodeContext, StoredActivation
from daf_core.codecs.bitmask import BitmaskActivation
from daf_core.codecs.byte_copy import ByteCopyActivation
from daf_core.codecs.planes import PlanesActivation
from daf_core.codecs.raw import KeptStorage
from daf_core.codecs.relu_signs import ReluSignsActivation
from daf_core.codecs.scaling_groups import Grouping
from daf_core.memory.lease import LeaseScope
from daf_core.memory.pager import Pager
from daf_core.memory.pages.pool import PagePool
from daf_core.memory.system.mortal import SWEPT, WeakValues
from daf_core.plan.observe.meter import TensorMeter
from daf_kernels import Backend, load_backend
from tests.core.books import check_pager
from tests.core.harness import LARGE, assert_empty, normal
from tests.core.interrupts import interrupted


@contextmanager
def called() -> Iterator[list[CodeType]]:
    """Lists the Python functions that are called inside."""
    codes: list[CodeType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            codes.append(frame.f_code)

    sys.setprofile(note)
    try:
        yield codes
    finally:
        sys.setprofile(None)


def at_deaths(codes: list[CodeType]) -> list[CodeType]:
    """Those that Python itself calls when something dies. A thread that ends is the business of `threading`."""
    of_weakref = ("remove", weakref.__file__)  # of WeakValueDictionary
    return [
        code
        for code in codes
        if code.co_name == "__del__"
        or (code.co_name, code.co_filename) == of_weakref
        or code is weakref.finalize.__call__.__code__
    ]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU())


@pytest.mark.parametrize("packing", ["device", "workers"])
@pytest.mark.parametrize("precision", ["exact", 4])
def test_step_calls_nothing_at_deaths(precision: Any, packing: Any) -> None:
    """Of the thread that trains; only it gets signals."""
    model = make_model()
    engine = ActivationEngine(model, DAFConfig(precision=precision, packing=packing))
    x = normal(*LARGE)
    for _ in range(2):
        with called() as codes:
            with engine.compress():
                model(x)  # a graph that dies in the pass
                loss = model(x).sum()
            loss.backward()
            del loss
            engine.finish_step()
        assert at_deaths(codes) == []
        assert_empty(engine)


def test_measured_tensors_die_in_silence() -> None:
    with TensorMeter() as meter:
        x = normal(1000)
        assert meter.level == 4000
        with called() as codes:
            del x
        assert at_deaths(codes) == []
        assert meter.level == 0


def test_dead_values_are_forgotten() -> None:
    """So that the table does not grow with every storage that there ever was."""
    values: WeakValues[int, Callable[[], None]] = WeakValues()
    kept = [lambda: None for _ in range(2)]
    for number in range(10 * SWEPT):
        values[number] = kept[number] if number < 2 else lambda: None
    assert values.items() == list(enumerate(kept))
    assert values.get(1) is kept[1]
    assert values.get(2) is None
    assert len(values._references) <= SWEPT


@pytest.mark.parametrize("stop", range(1, 50))
def test_interrupt_while_bytes_are_counted_loses_none(stop: int) -> None:
    """Python raises one where a function is called or has returned."""
    pager = Pager(PagePool(torch.device("cpu")), 1 << 20)

    def keep() -> None:
        kept = [KeptStorage(pager, 4096) for _ in range(2)]
        kept.clear()
        pager.settle()

    assert interrupted(stop, keep)
    keep()
    assert pager.settle() == 0
    check_pager(pager)


LEAVE = LeaseScope.__exit__.__code__

ENCODERS: dict[str, Callable[[Pager, Backend], StoredActivation | None]] = {
    "planes": lambda pager, backend: PlanesActivation.write(
        EncodeContext(normal(1 << 14), pager, backend, Grouping(256), precision=4)
    ),
    "bitmask": lambda pager, backend: BitmaskActivation.pack(normal(1 << 14) > 0, pager, backend),
    "signs": lambda pager, backend: ReluSignsActivation.pack(normal(1 << 14).relu(), pager, backend, 0),
    "verbatim": lambda pager, _: ByteCopyActivation.copy(normal(1 << 14), pager),
}


@pytest.mark.parametrize("encode", ENCODERS.values(), ids=ENCODERS)
def test_interrupt_while_encoding_loses_no_page(encode: Callable[[Pager, Backend], StoredActivation | None]) -> None:
    """Pages belong to the activation before its codes are written."""
    pager, backend = Pager(PagePool(torch.device("cpu"))), load_backend(torch.device("cpu"), "reference")

    def outside_of_the_pager(frame: FrameType) -> bool:
        code = frame.f_code
        return "/daf_core/codecs/" in code.co_filename or code in (LeaseScope.__enter__.__code__, LEAVE)

    event = 1
    while interrupted(event, lambda: encode(pager, backend), outside_of_the_pager):
        assert (pager.settle(), pager.leased_pages) == (0, 0)
        check_pager(pager)
        event += 1
    assert event > 10
