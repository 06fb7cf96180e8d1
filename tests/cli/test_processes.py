"""What only a process of its own can show: a clock that is off, signals, what is left behind, torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import LOOPBACK, Organiser, serve
from tests.peer.real import until_lines
from tests.swarm.micro import wait_for_ends

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
REPOSITORY = Path(__file__).parents[2]
SKEWED = "import time\nreal = time.time\ntime.time = lambda: real() + 3600.0\n"


@pytest.fixture
def begun(tmp_path: Path, tokens: Path) -> Iterator[Organiser]:
    """Of a run that begins with its first peer, in rounds that take a while."""
    overrides = ("swarm.min_peers=1", "swarm.experts_per_peer=8", "sync.steps_per_round=40")
    yield from serve(tmp_path / "organiser", tokens, *overrides)


def start(*arguments: str, path: Path | None = None, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """The program as a process; a `sitecustomize` in `path` goes before everything."""
    paths = [*([str(path)] if path else []), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "spes_p2p.cli.main", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def join(organiser: Organiser, output: Path, *arguments: str) -> tuple[str, ...]:
    common = ("join", "--initial-peers", organiser.address, "--host-maddrs", LOOPBACK, "-o", str(output))
    return (*common, "--data", str(organiser.data), "--device", "cpu", *arguments)


def test_a_clock_that_is_off_is_refused_with_how_far_and_how_to_mend_it(tmp_path: Path, organiser: Organiser) -> None:
    (tmp_path / "sitecustomize.py").write_text(SKEWED)
    process = start(*join(organiser, tmp_path / "peer"), path=tmp_path)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    (at,) = [at for at, line in enumerate(output.splitlines()) if line.startswith("Error")]
    told = re.search(r"(\d+\.\d) s ahead of", output.splitlines()[at])
    assert told is not None, output
    assert 3500.0 < float(told[1]) <= 3600.0  # at least: what the greeting took is not in it
    assert "Traceback" not in output
    assert output.splitlines()[at + 1].startswith("Fix: ")


def test_ctrl_c_in_the_middle_of_a_round_leaves_nothing_running(tmp_path: Path, begun: Organiser) -> None:
    """SIGTERM: tests/swarm/test_life_of_a_swarm.py."""
    process = start(*join(begun, tmp_path / "peer", "--local-ranks", "2"))
    until_lines(process, "step 5 ")
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 2, family  # the libp2p daemon and the other rank
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert "leaving" in output
    assert wait_for_ends(family) == []


def test_status_watch_follows_a_run_until_ctrl_c(tmp_path: Path, begun: Organiser) -> None:
    process = start("status", "--initial-peers", begun.address, "--watch", "--json")
    before = json.loads(until_lines(process, '"run_id"')[-1])
    assert (before["certificate"], before["round"]) == ("", 0)
    joined = begun.join(tmp_path / "peer", "--data", str(begun.data), "--until-round", "1")
    assert joined.exit_code == 0, joined
    after = json.loads(until_lines(process, '"certificate": "quorum"')[-1])
    assert (after["run_id"], after["checked"], after["round"] > 0) == (before["run_id"], True, True)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert "Traceback" not in output
    assert (len(family), wait_for_ends(family)) == (1, [])


def test_status_watch_outlives_the_node_that_it_asks(tmp_path: Path, tokens: Path) -> None:
    """It says so in one line each time, and goes on looking."""
    node = start("bootstrap", "--config", "tiny", "--data", str(tokens), "-o", str(tmp_path), "--host-maddrs", LOOPBACK)
    line = until_lines(node, "spes-p2p join --initial-peers ")[-1]
    process = start("status", "--initial-peers", line.split("--initial-peers ")[1].split()[0], "--watch")
    until_lines(process, "the run has not begun: 0 peers waiting")
    node.send_signal(signal.SIGKILL)
    node.wait()
    told = until_lines(process, "; trying again")
    told += until_lines(process, "; trying again")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert "Traceback" not in "".join(told) + output


def test_under_torchrun_rank_0_talks_to_the_network(tmp_path: Path, begun: Organiser) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = start(*join(begun, tmp_path / "peer", "--until-round", "1"), launcher=launcher)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    events = [json.loads(line) for line in (tmp_path / "peer" / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 41))
    assert [event["roster_size"] for event in events if event["event"] == "round"] == [1]
