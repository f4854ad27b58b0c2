"""Compiles kernels, or loads them from numba's disk cache as long as nothing has changed that they are compiled from.

Numba itself looks for changes only in the file of the function that is called: a kernel would stay as it was where only
a function that it calls has changed, in another file. So the cache is stamped with all files of this package.
"""

import hashlib
from pathlib import Path

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc


def _digest():
    """Returns a digest of all sources of this package."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


_SOURCES = _digest()  # when they are imported: they may change while this process runs


class _KernelCache(FunctionCache):
    """Numba's disk cache of a function, with the stamp of the package instead of that of the function's file."""

    def __init__(self, function):
        super().__init__(function)
        self._cache_file = IndexDataCacheFile(self.cache_path, self._impl.filename_base, _SOURCES)


def kernel(function):
    """Makes a function a kernel: compiled, or loaded from disk, when it is first called."""
    dispatcher = njit(nogil=True, error_model="numpy")(function)
    dispatcher._cache = _KernelCache(function)
    return dispatcher


def c_function(function, signature):
    """Returns a function as numba's C function of this signature: compiled, or loaded from disk."""
    callback = CFunc(function, (signature.args, signature.return_type), locals={}, options={})
    callback._cache = _KernelCache(function)
    callback.compile()
    return callback
