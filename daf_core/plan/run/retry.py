"""Runs a step again that ran out of memory, or whose activations had another reader than before.

So its samples are not lost: the plan is tighter then, or the reader known.
"""

from __future__ import annotations

import errno
import gc
import re
import sys
from collections.abc import Callable, Iterator
from logging import getLogger
from traceback import StackSummary, walk_tb
from typing import NamedTuple, TypeVar

import torch

from daf_core.errors import PeerMemoryError, ReaderError
from daf_core.memory.system.release import release_caches
from daf_core.snapshots.step import Snapshot

_TEXTS = re.compile(
    r"\bout of memory\b"  # CUDA, HIP, XPU, MPS; CUDA error: out of memory
    r"|can't allocate memory|not enough memory"  # the CPU's, on Windows
    r"|cannot allocate memory(?! in static TLS)"  # of mmap; libraries that load too late lack room of another kind
    r"|can't start new thread"  # of Python: there is no memory for its stack
    r"|std::bad_alloc|_ALLOC_FAILED\b",  # of C++; of cuBLAS, cuDNN and their like
    re.IGNORECASE,
)

Result = TypeVar("Result")

log = getLogger("daf")


def is_out_of_memory(error: BaseException, handled: BaseException | None = None) -> bool:
    """Whether an error means that memory ran out, on any device, or was raised because of one that does.

    The error that was being handled before the code ran that raised this one, `handled`, is no reason for it.
    """
    return isinstance(error, Exception) and any(map(_says_so, _chain(error, handled)))


def _chain(error: BaseException, handled: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set() if handled is None else {id(handled)}
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        context = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or context


def _says_so(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None


class Failure(NamedTuple):
    """An attempt that may be made again: its error without its frames, which would keep memory, and their stack."""

    error: Exception
    stack: StackSummary


def with_retries(
    attempt: Callable[[], Result],
    snapshot: Snapshot,
    tighten: Callable[[str], bool],
    anywhere: Callable[[bool], bool] = bool,
    look_again: Callable[[], None] | None = None,
) -> Result:
    """Runs a step, and runs it again from the same state with tighter plans as long as it runs out of memory.

    It is run again as well, once, where something has asked for a tensor that was not stored for it: the next attempt
    looks at all that it saves as if it was the first one.

    Processes that train together all run it again when one has to, of which `anywhere` tells. So the attempt must not
    communicate: it runs inside of `unsynchronized`, and `reduce_gradients` follows. Any other error passes through at
    once.

    Args:
        attempt: Runs forward and backward, and changes nothing that the snapshot does not take back.
        snapshot: The state before the step.
        tighten: Gets the message of the error and makes the plan tighter, in the processes that have run out of
            memory; False if there is no tighter one.
        anywhere: Says whether something has failed here, or in a process that runs the step again together with this.
        look_again: Has the next attempt look at all readers; without it, none follows a `ReaderError`.

    Raises:
        Exception: The first attempt's, with a note, when there is no tighter plan; other errors of an attempt.
        PeerMemoryError: There is no tighter plan, and only other processes have run out of memory.
        ReaderError: The second one.
    """
    outer = sys.exc_info()[1]
    first: Failure | None = None
    messages: list[str] = []
    while True:
        outcome = _run(attempt, outer, ReaderError if look_again is not None else ())
        failed = isinstance(outcome, Failure)
        if not anywhere(failed):
            assert not isinstance(outcome, Failure)
            return outcome[0]
        message = str(outcome.error) if isinstance(outcome, Failure) else "another process could not finish it"
        misread = isinstance(outcome, Failure) and isinstance(outcome.error, ReaderError)
        if not misread:
            messages.append(message)
            first = first or (outcome if isinstance(outcome, Failure) else None)
        del outcome
        gc.collect()  # so that activations are gone when the engine counts what is left
        snapshot.restore()
        release_caches(snapshot.devices)
        if misread and look_again is not None:
            log.warning("DAF runs a step again, from the state before it: %s", message)
            look_again()
            look_again, stuck = None, False
        else:
            stuck = failed and not tighten(message)
        if anywhere(stuck):
            raise _final_error(first, messages)


def _run(
    attempt: Callable[[], Result], outer: BaseException | None, others: type[Exception] | tuple[()]
) -> tuple[Result] | Failure:
    """Runs an attempt, after which another one may follow lack of memory, and errors of `others`."""
    try:
        return (attempt(),)
    except Exception as error:
        if not (isinstance(error, others) or is_out_of_memory(error, outer)):
            raise
        stack = StackSummary.extract(walk_tb(error.__traceback__), lookup_lines=False)
        _drop_frames(error, outer)
        return Failure(error, stack)


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


def _final_error(first: Failure | None, messages: list[str]) -> Exception:
    if first is None:
        return PeerMemoryError(len(messages))
    note = (
        f"The step was run {len(messages)} time(s), each with a tighter plan than before, and ran out of memory each "
        f"time; no tighter plan is left. The last time: {messages[-1]}\nThe first time was in:\n"
        + "".join(first.stack.format())
    )
    if sys.version_info >= (3, 11):
        first.error.add_note(note)
    else:
        first.error.args = (f"{first.error}\n{note}", *first.error.args[1:])
    return first.error
