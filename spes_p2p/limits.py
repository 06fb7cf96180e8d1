"""The limits that the operating system sets to this process: more open files, or fewer processor cores."""

from __future__ import annotations

import contextlib
import os
import sys

OPEN_FILES = 65_536
"""More than that no peer needs; some systems give a million, and closing them all takes time."""


def allow_open_files() -> None:
    """Raises the soft limit of open files: 1,024 or even 256 by default, and each connection of a peer is one."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower one that it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def use_cores(most: int) -> int:
    """From now on this thread, and all threads and processes that come of it, run on that many cores at most; how many.

    To be called before there are others, and before PyTorch is loaded, which takes as many threads as there are cores.
    """
    if sys.platform.startswith("linux"):
        cores = sorted(os.sched_getaffinity(0))[-most:]
        os.sched_setaffinity(0, cores)
        return len(cores)
    os.environ["OMP_NUM_THREADS"] = str(most)
    return min(most, os.cpu_count() or most)
