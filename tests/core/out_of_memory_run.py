"""Trains a step in a process whose memory is limited, so that it runs out of it, and compares it with one that fits.

What glibc kept of freed blocks would add to the room, so it unmaps them.
"""

from __future__ import annotations

import ctypes
import resource

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from daf_core.plan.run.retry import with_retries
from daf_core.snapshots.step import Snapshot

M_MMAP_THRESHOLD = -3
"""Of malloc.h."""

ROOM = 380 << 20
"""Bytes that may be mapped beside what is when training begins: activations take 12 x 36 MB, their inputs 12 x 16."""


def main() -> None:
    unmap_freed_blocks()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)) for _ in range(12)))
    x = torch.randn(32_768, 128)
    plan = {"segments": 12}
    warm_up = step(model, x[:8], plan)
    torch.manual_seed(1)
    expected = step(model, x, plan)
    failures: list[str] = []

    def tighten(message: str) -> bool:
        failures.append(message)
        plan["segments"] = 12
        return len(failures) < 3  # a step that never fits would be run for ever

    plan["segments"] = 0
    limit(ROOM)
    torch.manual_seed(1)
    found = with_retries(lambda: step(model, x, plan), Snapshot(model), tighten)
    assert all("DefaultCPUAllocator: can't allocate memory" in failure for failure in failures), failures
    assert len(warm_up) == len(found)
    same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    print(len(failures), "retries, equal", same)


def step(model: nn.Sequential, x: Tensor, plan: dict[str, int]) -> list[Tensor]:
    """Returns copies of the gradients of one step; each of a model's segments is recomputed in backward."""
    model.zero_grad()
    segments = plan["segments"]
    output = checkpoint_sequential(model, segments, x, use_reentrant=False) if segments else model(x)
    output.square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def unmap_freed_blocks() -> None:
    process = ctypes.CDLL(None)
    if hasattr(process, "mallopt"):  # glibc
        process.mallopt(M_MMAP_THRESHOLD, 1 << 16)


def limit(room: int) -> None:
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + room, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
