"""What the peers of a swarm on one machine are started with."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.errors import SpesError
from spes_p2p.observe.sinks import EventReader
from spes_p2p.quickstart.processes import LocalSwarm, Process
from tests.peer.real import make_tokens
from tests.swarm.micro import MICRO, local_swarm


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        ((), ["--device", "cpu"]),
        (("--until-round", "3"), ["--device", "cpu"]),
        (("--device", "cuda:1"), ["--device", "cuda:1"]),
        (("--device=cuda:1",), ["--device=cuda:1"]),
    ],
)
def test_peers_of_one_machine_leave_its_gpus_alone_unless_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], device: list[str]
) -> None:
    started: list[list[str]] = []

    def start(self: LocalSwarm, name: str, command: list[str], *rest: Any) -> None:
        started.append(command)

    monkeypatch.setattr(LocalSwarm, "_start", start)
    with LocalSwarm(tmp_path) as swarm:
        swarm.peer("anna", None, arguments, "/ip4/127.0.0.1")
    (command,) = started
    at = next(index for index, word in enumerate(command) if word.startswith("--device"))
    assert command[at : at + len(device)] == device
    assert sum(word.startswith("--device") for word in command) == 1


@pytest.mark.swarm
@pytest.mark.timeout(120)
def test_who_does_not_end_is_ended_and_says_what_it_was_doing(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        swarm.bootstrap("tiny", make_tokens(tmp_path / "tokens"), MICRO)
        process = swarm.processes["bootstrap"]
        with pytest.raises(SpesError, match=r"bootstrap did not end in 0.1 s; its last lines: (.|\n)*Thread 0x"):
            process.wait(0.1)
        assert process.exit_code is not None


class Unheard:
    """A process that is gone, of whose end nobody has been told yet: a fork server tells of it a moment later."""

    def __init__(self) -> None:
        with subprocess.Popen(["true"]) as gone:
            self.pid = gone.pid

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        return 0


def test_a_process_that_ends_before_it_gets_a_signal_is_no_error(tmp_path: Path) -> None:
    process = Process("gone", tmp_path, tmp_path / "log", Unheard(), EventReader(tmp_path / "metrics.jsonl"))
    process.send(signal.SIGTERM)
    process.freeze()
    process.thaw()
    process.end()
