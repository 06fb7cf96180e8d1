"""What the peers of a swarm on one machine are started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spes_p2p.testing.processes import LocalSwarm


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        ((), ["--device", "cpu"]),
        (("--rounds", "3"), ["--device", "cpu"]),
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
