"""The limits of a process, raised by itself."""

from __future__ import annotations

import resource

from spes_p2p.limits import OPEN_FILES, allow_open_files


def test_a_process_may_open_as_many_files_as_the_system_lets_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 256), hard))
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        allow_open_files()  # never lowers it
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
