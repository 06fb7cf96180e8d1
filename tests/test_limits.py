"""The limits of a process, raised by itself."""

from __future__ import annotations

import resource
import subprocess
import sys

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


def test_threads_and_processes_keep_to_the_cores_that_were_allowed() -> None:
    program = (
        "import os, subprocess, sys, threading\n"
        "from spes_p2p.limits import use_cores\n"
        "print(use_cores(1))\n"
        "def tell(): print(len(os.sched_getaffinity(0)), flush=True)\n"
        "thread = threading.Thread(target=tell); thread.start(); thread.join()\n"
        "subprocess.run([sys.executable, '-c', 'import os; print(len(os.sched_getaffinity(0)))'], check=True)\n"
        "print(use_cores(1000)); tell()\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["1"] * 5
