"""bootstrap/run_peer.sh: environment variables to one exec; and the Containerfile, whose steps name what is there."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

from tests.peer.shell import run_script

ROOT = Path(__file__).parents[2]
CONTAINERFILE = (ROOT / "bootstrap" / "Containerfile").read_text()


run = partial(run_script, "run_peer.sh")


def test_an_invitation_is_enough(tmp_path: Path) -> None:
    assert run(tmp_path, SPES_INVITE="spes1abc").stdout.splitlines() == ["join", "spes1abc", "--output", "peer"]


def test_a_folder_that_holds_an_invitation_needs_none(tmp_path: Path) -> None:
    (tmp_path / "invite.txt").write_text("spes1abc")
    result = run(tmp_path, SPES_FOLDER=str(tmp_path))
    assert result.stdout.splitlines() == ["join", "--output", str(tmp_path)]


def test_an_address_is_enough(tmp_path: Path) -> None:
    result = run(tmp_path, SPES_INITIAL_PEERS="/ip4/1.2.3.4/tcp/1/p2p/Qm")
    wanted = ["join", "--output", "peer", "--initial-peers", "/ip4/1.2.3.4/tcp/1/p2p/Qm"]
    assert result.stdout.splitlines() == wanted


def test_everything_can_be_set(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        *("--max-experts", "4", "output.tensorboard=true"),
        SPES_INITIAL_PEERS="/a /b",
        SPES_DATA="/srv/my tokens",
        SPES_FOLDER="/node",
        SPES_RUN_ID="small",
        SPES_FINGERPRINT="ab12",
        SPES_PORT="4001",
        SPES_ANNOUNCE="/c /d",
        SPES_CLIENT_MODE="1",
    )
    assert result.stdout.splitlines() == [
        *("join", "--output", "/node", "--initial-peers", "/a", "--initial-peers", "/b"),
        *("--data", "/srv/my tokens", "--run-id", "small", "--fingerprint", "ab12"),
        *("--port", "4001", "--announce-maddrs", "/c", "--announce-maddrs", "/d"),
        *("--client-mode", "--max-experts", "4", "output.tensorboard=true"),
    ]


def test_without_an_invitation_it_says_what_to_set(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.returncode != 0
    assert "set SPES_INVITE to the invitation" in result.stderr


def test_what_the_container_is_made_of_is_there() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", CONTAINERFILE, re.MULTILINE)
    assert copied
    for name in (name for line in copied for name in line.split()):
        assert (ROOT / name).exists(), name
    for program in re.findall(r'^ENTRYPOINT \["(.+)"\]$', CONTAINERFILE, re.MULTILINE):
        assert os.access(ROOT / "bootstrap" / program, os.X_OK), program
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", CONTAINERFILE, re.MULTILINE)
    assert [name for _, name in stages] == ["program", "peer", "bootstrap"]  # the last one is the default
    assert {source for source, _ in stages[1:]} == {"program"}
