"""Runs a script once for each role in a process of its own, so that their memory peaks do not mix."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# transformers warns of the new classifier head, and peft of an old name, in every run.
_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore::FutureWarning"}


def run_in_child(script: Path, arguments: Iterable[str], tcmalloc: str | None) -> None:
    """Runs a Python script with this interpreter, its output on the same terminal.

    Args:
        script: the script to run.
        arguments: its command line.
        tcmalloc: library that the child allocates with, see `installed_tcmalloc`; None for the default.

    Raises:
        SystemExit: the child failed (it has said why), with the child's own exit status.
    """
    environment = {**os.environ, **_QUIET}
    if tcmalloc is not None:
        environment["LD_PRELOAD"] = f"{tcmalloc} {environment.get('LD_PRELOAD', '')}".strip()
    child = subprocess.run([sys.executable, str(script), *arguments], env=environment, check=False)
    if child.returncode != 0:
        raise SystemExit(child.returncode)
