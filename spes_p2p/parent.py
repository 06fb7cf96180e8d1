"""A process that ends when its parent does, however that ends. On Linux alone: elsewhere it goes on."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

_IS_LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1
# loaded before any fork: nothing may be imported between fork and exec
_LIBC = ctypes.CDLL(None) if _IS_LINUX else None


def end_with(parent: int, by: signal.Signals) -> None:
    """The kernel sends this process `by` when the thread of `parent` that started it ends; it ends now if that has."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)


def ending_with_us(by: signal.Signals) -> Callable[[], None] | None:
    """That as `preexec_fn` of a child of this process; None where the kernel does not do it."""
    return partial(end_with, os.getpid(), by) if _IS_LINUX else None
