"""Compiles kernels, or loads them from numba's disk cache as long as nothing has changed that they are compiled from.

Numba itself looks for changes only in the file of the function that is called: a kernel would stay as it was where only
a function that it calls has changed, in another file. So the cache is stamped with all files of this package. Where it
cannot be written, or what is in it cannot be read, kernels are compiled: that takes time, and ends no run.
"""

import hashlib
import sys
from logging import getLogger
from pathlib import Path

import llvmlite
import numba
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target

log = getLogger("daf")


def _digest():
    """Returns a digest of all sources that kernels of this folder may take functions and constants from."""
    package = Path(__file__).parent.parent
    files = sorted(file for folder in (".", "cpu", "reference") for file in (package / folder).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


_SOURCES = _digest()  # when they are imported: they may change while this process runs
_CHECK_BYTES = hashlib.sha256().digest_size

_kernels = []
_not_kept = []


class _CheckedFile(IndexDataCacheFile):
    """Numba's files of a function, each with a digest at its end: damaged machine code may end the process."""

    def _dump(self, obj):
        content = super()._dump(obj)
        return content + hashlib.sha256(content).digest()  # unpickling stops before it

    def _load_data(self, name):
        content = Path(self._data_path(name)).read_bytes()
        if hashlib.sha256(content[:-_CHECK_BYTES]).digest() != content[-_CHECK_BYTES:]:
            raise ValueError(f"{name} is damaged")
        return super()._load_data(name)


class _KernelCache(FunctionCache):
    """Numba's disk cache of a function, with the stamp of the package instead of that of the function's file."""

    def __init__(self, function):
        super().__init__(function)
        self._cache_file = _CheckedFile(self.cache_path, self._impl.filename_base, _SOURCES)

    def load_overload(self, sig, target_context):
        """Returns a compiled function; None where there is none, or where it cannot be read, which is then removed."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # damaged bytes may be unpickled as anything
            log.info("DAF compiles %s anew, as it cannot be read in %s: %r", self._name, self.cache_path, error)
        try:
            self.flush()
        except OSError as error:
            _not_kept.append(str(error))
        return None

    def save_overload(self, sig, data):
        """Keeps a compiled function, if it can."""
        try:
            super().save_overload(sig, data)
        except Exception as error:  # what cannot be removed is read again
            _not_kept.append(str(error))


def _cache_of(function):
    try:
        return _KernelCache(function)
    except (RuntimeError, OSError) as error:  # numba has found no folder
        _not_kept.append(str(error))
        return NullCache()


def kernel(function):
    """Makes a function a kernel: compiled, or loaded from disk, when it is first called."""
    dispatcher = njit(nogil=True, error_model="numpy")(function)
    dispatcher._cache = _cache_of(function)
    _kernels.append(dispatcher)
    return dispatcher


def c_function(function, signature):
    """Returns a function as numba's C function of this signature: compiled, or loaded from disk."""
    callback = CFunc(function, (signature.args, signature.return_type), locals={}, options={})
    callback._cache = _cache_of(function)
    callback.compile()
    _kernels.append(callback)
    return callback


def folder():
    """Returns the folder that keeps compiled kernels; None where none can."""
    caches = [each._cache for each in _kernels]
    return None if _not_kept or not caches else caches[0].cache_path


def identity():
    """Returns all that compiled kernels depend on: sources, versions and the processor."""
    processor = cpu_target.target_context.codegen().magic_tuple()
    return _SOURCES, numba.__version__, llvmlite.__version__, sys.version, processor


def compilations():
    """Returns how many kernels this process has compiled, rather than loaded."""
    return sum(
        not each.cache_hits if isinstance(each, CFunc) else sum(each.stats.cache_misses.values()) for each in _kernels
    )


def known():
    """Returns how many kernels this process has, compiled or loaded."""
    return sum(1 if isinstance(each, CFunc) else len(each.overloads) for each in _kernels)


def why_not_compiled():
    """Returns why numba compiles nothing in this process, and what to do; None where it does."""
    return "NUMBA_DISABLE_JIT is set, so numba compiles nothing. Unset it" if numba.config.DISABLE_JIT else None


def why_not_kept():
    """Returns why the next run does not find compiled kernels on disk, and what to do; None where it does."""
    if not _not_kept:
        return None
    return f"they cannot be kept on disk ({_not_kept[0]}). Set NUMBA_CACHE_DIR to a folder that may be written to"
