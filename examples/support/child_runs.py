"""Runs a script once for each role in a process of its own, so that their memory peaks do not mix."""

import ctypes.util
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# The new classifier head and a name that peft still uses the old way are worth no page of warnings in every run.
_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore::FutureWarning"}
_TCMALLOC_PLACES = ("/usr/lib", "/usr/local/lib", f"{sys.prefix}/lib")


def run_in_child(script: Path, arguments: Iterable[str], tcmalloc: str | None) -> None:
    """Runs a Python script with this interpreter, its output on the same terminal.

    Args:
        script: the script to run.
        arguments: its command line.
        tcmalloc: the library `find_tcmalloc` found; the child then allocates with it.

    Raises:
        SystemExit: the child failed (it has said why), with the child's own exit status.
    """
    environment = {**os.environ, **_QUIET}
    if tcmalloc is not None:
        environment["LD_PRELOAD"] = f"{tcmalloc} {environment.get('LD_PRELOAD', '')}".strip()
    child = subprocess.run([sys.executable, str(script), *arguments], env=environment, check=False)
    if child.returncode != 0:
        raise SystemExit(child.returncode)


def find_tcmalloc() -> str | None:
    """Returns the name or path of an installed tcmalloc, or None. Only Linux can preload one."""
    if sys.platform != "linux":
        return None
    for name in ("tcmalloc_minimal", "tcmalloc"):
        found = ctypes.util.find_library(name) or _search(f"lib{name}.so*")
        if found is not None:
            return found
    return None


def _search(pattern: str) -> str | None:
    for place in map(Path, _TCMALLOC_PLACES):
        for path in [*place.glob(pattern), *place.glob(f"*/{pattern}")]:
            return str(path)
    return None
