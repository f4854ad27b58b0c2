"""Runs a script once for each role in a process of its own, so that their memory peaks do not mix."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from daf_integrations.cli.allocator import preloading

# transformers warns of the new classifier head, and peft of an old name, in every run.
_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore::FutureWarning"}


def run_in_child(script: Path, arguments: Iterable[str], library: str | None) -> None:
    """Runs a Python script with this interpreter, its output on the same terminal.

    Args:
        script: the script to run.
        arguments: its command line.
        library: what the child allocates memory with, see `daf_integrations.cli.allocator`; None for the default.

    Raises:
        SystemExit: the child failed (it has said why), with the child's own exit status.
    """
    child = subprocess.run([sys.executable, str(script), *arguments], env=preloading(library) | _QUIET, check=False)
    if child.returncode != 0:
        raise SystemExit(child.returncode)
