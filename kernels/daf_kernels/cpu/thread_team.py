"""Runs kernels on the threads that torch's own operators run on.

Those wait for the next operator in a loop, for a millisecond or so, on every core there is. A second pool of threads
would take turns with them: below 4 million elements that cost more than it gained. So a kernel is handed to the same
team, by the function that compilers call for a parallel region of OpenMP (``GOMP_parallel`` of libgomp, which LLVM's
and Intel's runtimes on Linux have as well). Where torch has none that can be called, as on macOS, or only one thread,
kernels run on the calling thread alone.

A kernel's *job* is a C function of one argument, the address of its words of 64 bits: `WORDS` that say which elements
are whose, and the kernel's own arguments. The threads take parts until none is left, so a thread that is late, or never
comes, leaves its work to the others.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from daf_kernels.cpu.bits import I64, INLINE, i64_at
from daf_kernels.cpu.compile_cache import kernel

JOB = types.void(types.CPointer(types.int64))
"""Signature of a job."""

PART, THREAD, FIRST, STOP, STEP, SCRATCH, STRIDE, RESULT, PAGES, _, WORDS = range(11)
"""Words of every job: the part to be taken next, the number of the next thread, the first element and the end of all
parts, elements in a part, address of the first thread's scratch memory and its bytes for each thread, the sum of what
parts return, address and number of the pages' addresses; the kernel's own arguments follow."""


@intrinsic
def take(_typing, _address, _amount):
    """Adds to the word at an address, as one step among threads; returns what was there before."""

    def build(_context, builder, _signature, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], ir.IntType(64).as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), build


@intrinsic
def call_job(_typing, _job, _words):
    """Calls a job by its address."""

    def build(_context, builder, _signature, args):
        byte = ir.IntType(8).as_pointer()
        function = builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [byte]).as_pointer())
        builder.call(function, [builder.inttoptr(args[1], byte)])
        return args[1]

    return types.int64(types.int64, types.int64), build


@intrinsic
def _call_team(_typing, _parallel, _job, _words, _threads):
    """Calls ``GOMP_parallel(job, words, threads, 0)``: the job runs on so many threads, this one among them."""

    def build(_context, builder, _signature, args):
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        signature = ir.FunctionType(ir.VoidType(), [byte, byte, number, number])
        function = builder.inttoptr(args[0], signature.as_pointer())
        job, words = (builder.inttoptr(arg, byte) for arg in args[1:3])
        builder.call(function, [job, words, builder.trunc(args[3], number), number(0)])
        return args[2]

    return types.int64(types.int64, types.int64, types.int64, types.int64), build


WORDS_BYTES = 256
"""Bytes for the words of a job, 32 of them, before its scratch memory."""


class Scratch(threading.local):
    """Memory of one thread, grown to the largest job met: `size` bytes from `address` on, which is aligned to 64."""

    def __init__(self) -> None:
        self.size = self.address = 0
        self._buffer = np.empty(0, np.uint8)

    def reserve(self, size: int) -> int:
        """Returns the address of `size` bytes; they stay valid until the thread's next call."""
        if self.size < size:
            self._buffer, self.size = np.empty(size + 64, np.uint8), size
            self.address = -(-self._buffer.ctypes.data // 64) * 64
        return self.address


@kernel
def launch(parallel, job, threads, given, count, origin, shift, first, stop, step, scratch, stride, pages):
    """Runs a job and returns the sum of what its parts return.

    Args:
        parallel: Address of ``GOMP_parallel``; 0 without: the job runs on the calling thread alone.
        job: Address of the job.
        threads: Threads to run it on.
        given: Address of the job's words, of which those that are known are filled in: they serve any number of calls.
        count: How many words there are.
        origin: Address of element 0.
        shift: Binary logarithm of the page size.
        first: First element.
        stop: End of the elements.
        step: Elements in a part.
        scratch: Address of `WORDS_BYTES` and the scratch memory of all threads.
        stride: Bytes of it for each.
        pages: int64 array whose address and length become the words `PAGES`, which takes Python several times as long.
    """
    words, source = i64_at(scratch), i64_at(given)
    for index in range(count):
        words[index] = source[index]
    words[FIRST], words[STOP], words[STEP] = first, stop, step
    words[SCRATCH], words[STRIDE] = scratch + WORDS_BYTES, stride
    words[PAGES], words[PAGES + 1] = pages.ctypes.data, pages.size
    words[WORDS], words[WORDS + 2] = origin, shift
    if parallel != 0 and threads > 1:
        _call_team(parallel, job, scratch, I64(threads))
    else:
        call_job(job, scratch)
    return words[RESULT]


@njit(**INLINE)
def parts(words):
    """Yields the first element and the end of parts that no other thread has taken, until none is left.

    Args:
        words: Pointer to the job's words.
    """
    while True:
        first = words[FIRST] + words[STEP] * take(words_address(words, PART), I64(1))
        if first >= words[STOP]:
            return
        yield first, min(first + words[STEP], words[STOP])


@intrinsic
def words_address(_typing, _words, _index):
    """Returns the address of a word."""

    def build(_context, builder, _signature, args):
        return builder.ptrtoint(builder.gep(args[0], [args[1]]), ir.IntType(64))

    return types.int64(types.CPointer(types.int64), types.int64), build


@njit(**INLINE)
def own_scratch(words):
    """Returns the address of scratch memory that no other thread of the job has."""
    return words[SCRATCH] + words[STRIDE] * take(words_address(words, THREAD), I64(1))


@njit(**INLINE)
def add_result(words, number):
    """Adds to what the job returns."""
    take(words_address(words, RESULT), I64(number))


@njit(**INLINE)
def array_at(words, index):
    """Returns the int64 array whose address and length are words `index` and `index` + 1."""
    return carray(i64_at(words[index]), (words[index + 1],))


@lru_cache(maxsize=1)
def parallel_function() -> int:
    """Returns the address of ``GOMP_parallel`` in the library that torch calls; 0 where there is none."""
    libraries = Path(torch.__file__).parent / "lib"
    if sys.platform != "linux" or "OpenMP" not in torch.__config__.parallel_info():
        return 0
    try:
        # A symbol is looked for in the libraries that this one is linked to, so it is torch's own runtime.
        library = ctypes.CDLL(str(libraries / "libtorch_cpu.so"), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


_PROCESS = os.getpid()  # not when a team is made: a child may make one, too


class Team:
    """Torch's threads.

    Args:
        threads: How many to use at most; torch's number at each call by default.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads
        self._own = threading.local()

    def limit(self, threads: int) -> None:
        """Uses so many at most for the jobs of the calling thread."""
        self._own.threads = threads

    @property
    def threads(self) -> int:
        """Threads that a job may run on now. In a forked child one: the parent's others are not there."""
        if not parallel_function() or os.getpid() != _PROCESS:
            return 1
        return getattr(self._own, "threads", None) or self._threads or torch.get_num_threads()
