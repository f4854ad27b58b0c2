"""Launches kernels on a GPU that is not there, and prints as JSON what it was given. For `test_launches.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton import JITFunction

from daf_kernels.triton import launch
from daf_kernels.triton.launch import launch_over_blocks
from daf_kernels.triton.masks import encode_nonzero
from daf_kernels.triton.reduction import group_ranges, range_fused
from tests.kernels_compile.fake_driver import FakeDriver, Launch, pretend

FAR_BYTES = 2**31
VALUES, TABLE = torch.zeros(4096, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)
BLOCKS = {"BLOCKS": 8, "SHIFT": 12, "MASKED": False}


class OnDevice:
    """As much of a tensor of some GPU as a launch looks at."""

    def __init__(self, tensor: Tensor, index: int) -> None:
        self._tensor = tensor
        self.device = torch.device("cuda", index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


class Machine:
    """A machine with fake GPUs, and how often Triton's slow way of launching was taken."""

    def __init__(self, target: str) -> None:
        self.driver: FakeDriver = pretend(target)
        self.slow = 0

    def count(self, launch_some: Callable[[], object]) -> dict[str, Any]:
        """Says how often the slow way was taken, and what the driver was given."""
        slow, given = self.slow, len(self.driver.launches)
        launch_some()
        launches = [described(given) for given in self.driver.launches[given:]]
        return {"slow": self.slow - slow, "launches": launches}

    def watched(self, run: Callable[..., object]) -> Callable[..., object]:
        def watching(*arguments: Any, **named: Any) -> object:
            self.slow += 1
            return run(*arguments, **named)

        return watching


def described(given: Launch) -> dict[str, Any]:
    """A launch as JSON takes it: tensors are their addresses."""
    arguments = [value.data_ptr() if hasattr(value, "data_ptr") else value for value in given.arguments]
    return {"grid": given.grid, "stream": given.stream, "function": given.function, "arguments": arguments}


def nonzero(values: Any = VALUES, numbers: tuple[int, int] = (4096, 0), **constants: int | bool) -> Callable[[], None]:
    """A launch of one kernel, for two programs."""
    return lambda: launch.launch(encode_nonzero, 2, (values, TABLE), numbers, **{**BLOCKS, **constants})


def scenarios(machine: Machine) -> Iterator[tuple[str, dict[str, Any]]]:
    """Gives names of launches and what they led to, in an order that matters."""
    yield "first", machine.count(nonzero())
    yield "second", machine.count(nonzero())
    for number in (0, 1, 16, 2**31 + 5):
        yield f"number {number}", machine.count(nonzero(numbers=(number, number)))
    yield "unaligned", machine.count(nonzero(VALUES[1:]))
    yield "type", machine.count(nonzero(VALUES.view(torch.float16)))
    yield "constant", machine.count(nonzero(BLOCKS=16))
    yield "device", machine.count(nonzero(OnDevice(VALUES, 1)))
    yield "device again", machine.count(nonzero(OnDevice(VALUES, 1)))
    yield "far", machine.count(nonzero(torch.empty(FAR_BYTES // 2, dtype=torch.bfloat16)))
    yield "none of them", machine.count(nonzero())
    yield "prepared", machine.count(partial(_prepared(VALUES), 100, VALUES.data_ptr(), TABLE.data_ptr()))
    yield "no programs", machine.count(lambda: launch.launch(encode_nonzero, 0, (VALUES, TABLE), (0, 0), **BLOCKS))
    # Of bfloat16, a program takes 32 blocks.
    few = launch.FEW_PROGRAMS
    sizes = {
        "full": 2.0,
        "few": 2.25,
        "end": 0.25,
        "most of few": few - 0.75,
        "many": few + 0.25,
        "many full": few + 1.0,
    }
    for name, programs in sizes.items():
        values = torch.zeros(int(programs * 32 * 256), dtype=torch.bfloat16)
        over_blocks = partial(launch_over_blocks, encode_nonzero, (values, TABLE), (), 4096, 1)
        machine.count(over_blocks)
        yield name, machine.count(over_blocks)
    yield "other kernel", machine.count(lambda: group_ranges(VALUES, 64, "fused"))
    yield "other kernel again", machine.count(lambda: group_ranges(VALUES, 64, "fused"))


def _prepared(values: Tensor, **constants: Any) -> launch.Launch:
    dtypes = (values.dtype, TABLE.dtype)
    found = launch.prepared(
        encode_nonzero, 2, values.device, dtypes, values.nbytes, (4096, 0), **{**BLOCKS, **constants}
    )
    assert found is not None
    return found


def compiled_codes() -> list[dict[str, Any]]:
    """What each kept kernel assumes of its arguments."""
    codes = []
    for kernel in launch._compiled.values():
        names = kernel.src.fn.arg_names
        assumed = {names[path[0]]: [name for name, _ in facts] for path, facts in kernel.src.attrs.items() if facts}
        codes.append({"types": kernel.src.signature, "assumed": assumed, "warps": kernel.metadata.num_warps})
    return codes


def main() -> None:
    """Prints what the scenarios led to, on the GPU that the command line names."""
    machine = Machine(sys.argv[1])
    with mock.patch.object(JITFunction, "run", _method(machine)):
        found = dict(scenarios(machine))
    values = {"address": VALUES.data_ptr(), "table": TABLE.data_ptr(), "names": range_fused.arg_names}
    print(json.dumps({**found, "values": values, "codes": compiled_codes()}))


def _method(machine: Machine) -> Callable[..., object]:
    run = machine.watched(JITFunction.run)
    return lambda self, *arguments, **named: run(self, *arguments, **named)


if __name__ == "__main__":
    main()
