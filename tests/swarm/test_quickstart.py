"""The quickstart as a person runs it: one command, in processes of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests import oracle
from tests.swarm.micro import LOCAL, MICRO, config_of, dump_initial_state, marked_processes, nothing_left

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
TILES = 1024
WAIT_SECONDS = 60.0


@pytest.fixture
def mark() -> Iterator[dict[str, str]]:
    with nothing_left() as variables:
        yield variables


def quickstart(mark: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "spes_p2p.cli.main", "quickstart", *arguments, *MICRO, *LOCAL]
    return subprocess.Popen(command, env=os.environ | mark, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_one_command_from_text_to_a_model(tmp_path: Path, mark: dict[str, str]) -> None:
    output, dumps = tmp_path / "run", tmp_path / "dumps"
    running = quickstart(mark, "--peers", "2", "--rounds", "2", "-o", str(output), "--dump-rounds", str(dumps))
    said, _ = running.communicate(timeout=240)
    assert running.returncode == 0, said
    before, after = map(float, re.findall(r"held-out loss: ([\d.]+) before, ([\d.]+) after", said)[0])
    assert after < before
    hashes = {dump.about["model_hash"] for dump in oracle.read_dumps(dumps)[2].values()}
    assert all(f"│ {peer} │ 2 " in said for peer in ("peer-0", "peer-1"))
    dump_initial_state(tmp_path, config_of(), "run/peer-0")
    assert oracle.check_dumps(dumps, TILES, complete=False)[-1] == 2
    assert said.count(hashes.pop()[:10]) >= 2
    steps = {int(about["step"]) for about in (dump.about for dump in oracle.read_dumps(dumps)[2].values())}
    for peer in ("peer-0", "peer-1"):
        assert (output / peer / "checkpoints" / f"step-{steps.copy().pop():08d}").is_dir()


@pytest.mark.thorough
def test_a_lost_peer_is_a_failure(tmp_path: Path, mark: dict[str, str], tokens: Path) -> None:
    running = quickstart(mark, "--peers", "2", "--rounds", "99", "-o", str(tmp_path / "run"), "--data", str(tokens))
    until(lambda: peers_of(mark, "peer-1"), running)[0].kill()
    said, _ = running.communicate(timeout=WAIT_SECONDS)
    assert running.returncode == 1
    assert "peer-1 ended with -9" in said


def test_a_killed_quickstart_takes_its_swarm_with_it(tmp_path: Path, mark: dict[str, str], tokens: Path) -> None:
    running = quickstart(mark, "--peers", "2", "--rounds", "99", "-o", str(tmp_path / "run"), "--data", str(tokens))
    until(lambda: peers_of(mark, "peer-1"), running)
    running.send_signal(signal.SIGKILL)
    running.communicate(timeout=WAIT_SECONDS)  # and the fixture sees that nothing is left


def peers_of(mark: dict[str, str], name: str) -> list[psutil.Process]:
    """The process of a peer, by the folder that it was given."""
    found = []
    for process in marked_processes(mark):
        try:
            if "join" in process.cmdline() and any(word.endswith(f"/{name}") for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def until(found: Callable[[], list[psutil.Process]], running: subprocess.Popen[str]) -> list[psutil.Process]:
    end = time.monotonic() + WAIT_SECONDS
    while not (processes := found()):
        assert running.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    return processes
