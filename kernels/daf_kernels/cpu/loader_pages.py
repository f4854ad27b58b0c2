"""Gives back the memory that holds the compiler once kernels are loaded.

Loading kernels from disk runs code of LLVM, 70 MB of llvmlite's library, which no kernel calls afterwards. The system
counts these pages to the process until memory gets scarce.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

_MAPPINGS = Path("/proc/self/smaps")
_COMPILER = "libllvmlite"
_HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.*)$")


def give_back_compiler() -> int:
    """Has the system forget the pages of the compiler, which it reads from its file again if they are needed.

    Returns:
        Bytes of the address space that were given back; 0 on systems other than Linux.
    """
    if not _MAPPINGS.exists():
        return 0
    libc = ctypes.CDLL(None)
    given = 0
    for start, end in _unchanged_mappings(_MAPPINGS.read_text()):
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED) == 0:
            given += end - start
    return given


def _unchanged_mappings(smaps: str) -> list[tuple[int, int]]:
    """Returns where the compiler's read-only mappings lie that equal its file.

    A mapping that the dynamic linker has written to, before it made it read-only, would lose what was written.
    """
    found: dict[tuple[int, int], bool] = {}
    mapping = None
    for line in smaps.splitlines():
        if head := _HEAD.match(line):
            start, end, access, file = head.groups()
            is_code = "w" not in access and _COMPILER in file
            mapping = (int(start, 16), int(end, 16)) if is_code else None
        elif mapping and line.startswith("Private_Dirty:"):
            found[mapping] = line.split()[1] == "0"
    return [each for each, unchanged in found.items() if unchanged]
