"""Compiles the CPU kernels in a process of their own, so that a training process only loads them.

Compiling leaves 250 MB in the process that compiles, which no allocator gives back: LLVM keeps what it has built. A
marker beside the compiled kernels says that they are complete. It has the sources, numba's version and the processor in
its name, so that a change of one of them asks for another compilation.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path

from daf_kernels.cpu import compile_cache

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

log = getLogger("daf")


def compile_ahead() -> None:
    """Compiles the kernels in another process where they are not on disk, and waits for it.

    A second process that needs them waits for the first one. Where no process can be started or none can keep what it
    compiles, nothing happens: the caller compiles the kernels when it calls them.
    """
    marker = _marker()
    if marker is None or marker.exists() or not _may_start_processes():
        return
    try:
        with _locked(marker.with_suffix(".lock")):
            if not marker.exists():
                _compile(marker)
    except OSError as error:  # a folder that takes no files, a system that starts no process
        log.info("DAF compiles its CPU kernels in this process: %r", error)


def main() -> None:
    """Compiles the kernels, and prints how many; exits with 1 if they cannot be kept."""
    from daf_kernels.cpu.backend import warm_up

    if compile_cache.why_not_kept() is None:
        warm_up()
    print(compile_cache.compilations())
    sys.exit(compile_cache.why_not_kept() is not None)


def _compile(marker: Path) -> None:
    log.warning("DAF prepares its CPU kernels in a process of its own, once; compiling takes up to two minutes")
    started = time.perf_counter()
    path = os.pathsep.join(filter(None, sys.path))  # the other process imports what this one would
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        log.info("DAF compiles its CPU kernels in this process: %s", done.stderr.strip() or "they cannot be kept")
        return
    marker.touch()
    if done.stdout.split()[-1] != "0":
        seconds = time.perf_counter() - started
        log.warning("DAF compiled its CPU kernels in %.1f s; the next run finds them on disk.", seconds)


def _marker() -> Path | None:
    """Returns the file that says that the kernels are on disk; None where they cannot be kept."""
    folder = compile_cache.folder()
    if folder is None:
        return None
    name = hashlib.sha256(repr(compile_cache.identity()).encode()).hexdigest()[:16]
    return Path(folder, f"kernels-{name}.complete")


def _may_start_processes() -> bool:
    is_frozen = getattr(sys, "frozen", False)  # sys.executable is the program then, and no Python
    return bool(sys.executable) and not is_frozen


@contextmanager
def _locked(path: Path) -> Generator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)  # the system opens the lock of a process that ends
        yield
