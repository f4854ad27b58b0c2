"""Runs a step again that ran out of memory, with a tighter plan, so that its samples are not lost."""

from __future__ import annotations

import errno
import gc
import re
import sys
from collections.abc import Callable
from traceback import StackSummary, walk_tb
from typing import TYPE_CHECKING, TypeVar

import torch

from daf_core.distributed import any_rank_failed
from daf_core.errors import PeerMemoryError
from daf_core.memory.system.release import release_caches
from daf_core.snapshots.step import Snapshot

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TEXTS = re.compile(
    r"\bout of memory\b"  # CUDA, HIP, XPU, MPS; CUDA error: out of memory
    r"|can't allocate memory|not enough memory"  # the CPU's, on Windows
    r"|cannot allocate memory(?! in static TLS)"  # of mmap; libraries that load too late lack room of another kind
    r"|can't start new thread"  # of Python: there is no memory for its stack
    r"|std::bad_alloc|_ALLOC_FAILED\b",  # of C++; of cuBLAS, cuDNN and their like
    re.IGNORECASE,
)

Result = TypeVar("Result")


def is_out_of_memory(error: BaseException, handled: BaseException | None = None) -> bool:
    """Whether an error means that memory ran out, on any device, or was raised because of one that does.

    The error that was being handled before the code ran that raised this one, `handled`, is no reason for it.
    """
    seen = {id(None), id(handled)}
    following: BaseException | None = error if isinstance(error, Exception) else None
    while following is not None and id(following) not in seen:
        if _says_so(following):
            return True
        seen.add(id(following))
        context = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or context
    return False


def _says_so(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None


def with_retries(
    attempt: Callable[[], Result],
    snapshot: Snapshot,
    tighten: Callable[[str], bool],
    group: ProcessGroup | None = None,
    together: bool = True,
) -> Result:
    """Runs a step, and runs it again from the same state with tighter plans as long as it runs out of memory.

    With several processes, all run it again when one has to. So the attempt must not communicate: it runs inside of
    `unsynchronized`, and `reduce_gradients` follows. Any other error passes through at once.

    Args:
        attempt: Runs forward and backward, and changes nothing that the snapshot does not take back.
        snapshot: The state before the step.
        tighten: Gets the message of the error and makes the plan tighter, in the processes that have run out of
            memory; False if there is no tighter one.
        group: The processes; None for all.
        together: Otherwise each process is on its own.

    Raises:
        Exception: The first attempt's, with a note, when there is no tighter plan; other errors of an attempt.
        PeerMemoryError: There is no tighter plan, and only other processes have run out of memory.
    """
    outer = sys.exc_info()[1]
    first: Exception | None = None
    stack, messages = StackSummary(), list[str]()
    while True:
        outcome: tuple[Result] | None = None
        try:
            outcome = (attempt(),)
        except Exception as error:
            if not is_out_of_memory(error, outer):
                raise
            messages.append(str(error))
            if first is None:
                first, stack = error, StackSummary.extract(walk_tb(error.__traceback__), lookup_lines=False)
            _drop_frames(error, outer)  # they would keep the memory
        failed = outcome is None
        if not (any_rank_failed(failed, group) if together else failed):
            assert outcome is not None
            return outcome[0]
        if not failed:
            messages.append("another process ran out of memory")
        del outcome
        gc.collect()  # so that activations are gone when the engine counts what is left
        snapshot.restore()
        release_caches(snapshot.devices)
        stuck = failed and not tighten(messages[-1])
        if any_rank_failed(stuck, group) if together else stuck:
            raise _final_error(first, stack, messages)


def _drop_frames(error: BaseException, outer: BaseException | None) -> None:
    """Drops the frames of an error and of all that it was raised from; what was handled before keeps its own."""
    waiting: list[BaseException | None] = [error]
    seen = {id(None), id(outer)}
    while waiting:
        following = waiting.pop()
        if following is not None and id(following) not in seen:
            seen.add(id(following))
            following.__traceback__ = None
            waiting += [following.__cause__, following.__context__]


def _final_error(first: Exception | None, stack: StackSummary, messages: list[str]) -> Exception:
    if first is None:
        return PeerMemoryError(len(messages))
    note = (
        f"The step was run {len(messages)} time(s), each with a tighter plan than before, and ran out of memory each "
        f"time; no tighter plan is left. The last time: {messages[-1]}\nThe first time was in:\n"
        + "".join(stack.format())
    )
    if sys.version_info >= (3, 11):
        first.add_note(note)
    else:
        first.args = (f"{first}\n{note}", *first.args[1:])
    return first
