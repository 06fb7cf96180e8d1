"""Raises the operating system's resource limits of this process as far as an unprivileged user may."""

from __future__ import annotations

import contextlib

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
