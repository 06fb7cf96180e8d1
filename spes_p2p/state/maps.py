"""Read-only memory maps of files that cost no open file.

A map of Python's (and so of numpy's) keeps a descriptor of its own until it ends; a store holds one map a block of each
version, and what a round handed out besides: hundreds, where a process may open 1,024 files. The kernel needs none once
the map is made, so here the C library is asked for it. Leaves out what is in the files.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FAILED = ctypes.c_void_p(-1).value


class _Mapped:
    """The memory of one map, for numpy; unmapped when no array looks at it any more."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, True)}
        # not at exit: others may still look then, and the process ends the map anyway
        weakref.finalize(self, _c_library().munmap, address, size).atexit = False


def map_file(path: Path, size: int) -> NDArray[np.uint8]:
    """The first `size` bytes of a file, read-only, shape [size]; stays good when the file is unlinked.

    Raises OSError where it cannot be read, ValueError where it is shorter.
    """
    if size == 0:  # nothing cannot be mapped
        return np.empty(0, np.uint8)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if (found := os.fstat(descriptor).st_size) < size:
            raise ValueError(f"{path} has {found} bytes, not {size}")
        address = _c_library().mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    finally:
        os.close(descriptor)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return np.asarray(_Mapped(address, size))


@cache
def _c_library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_int
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_int64]
    library.mmap.restype = ctypes.c_void_p
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library
