"""Processes that are forked from a server: what they leave behind is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fork_server import ForkServer

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(120)]
LEAVES_A_CHILD = "import subprocess; subprocess.Popen(['sleep', '{seconds}'], start_new_session=True)"


@pytest.mark.parametrize(("seconds", "left"), [(60, 1), (0, 0)])
def test_what_a_process_leaves_behind_is_found_as_long_as_it_runs(tmp_path: Path, seconds: int, left: int) -> None:
    fork_server = ForkServer(os.environ, None)
    try:
        program = ["-n", "1", "-r", "1", LEAVES_A_CHILD.format(seconds=seconds)]
        child = fork_server.start("timeit", program, os.environ, tmp_path / "log")
        assert child.wait(60.0) == 0, (tmp_path / "log").read_text()
        while len(found := fork_server.running()) > left:  # a sleep of no time is about to end
            pass
        assert len(found) == left
        for pid in found:
            os.kill(pid, 9)
    finally:
        fork_server.close()
