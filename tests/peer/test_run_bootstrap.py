"""bootstrap/run_bootstrap.sh: environment variables to one exec."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.peer.shell import run_script

run = partial(run_script, "run_bootstrap.sh")


def test_port_identity_and_folder_are_fixed(tmp_path: Path) -> None:
    result = run(tmp_path, SPES_CONFIG="tiny")
    assert result.stdout.split() == [
        *("bootstrap", "--config", "tiny", "--output", "bootstrap-node"),
        *("--identity-path", "bootstrap-node/identity.key", "--port", "31337"),
    ]


def test_everything_can_be_set_and_overrides_go_through(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        "swarm.min_peers=4",
        SPES_CONFIG="my run.yaml",
        SPES_DATA="/srv/my tokens",
        SPES_FOLDER="/var/lib/node",
        SPES_PORT="4001",
        SPES_ARCHIVE="/srv/state",
        SPES_ANNOUNCE="/dns4/a.example.org/tcp/1 /ip4/203.0.113.7/tcp/2",
    )
    assert result.stdout.splitlines() == [
        *("bootstrap", "--config", "my run.yaml", "--output", "/var/lib/node"),
        *("--identity-path", "/var/lib/node/identity.key", "--port", "4001"),
        *("--data", "/srv/my tokens", "--archive", "/srv/state"),
        *("--announce-maddrs", "/dns4/a.example.org/tcp/1", "--announce-maddrs", "/ip4/203.0.113.7/tcp/2"),
        "swarm.min_peers=4",
    ]


def test_a_node_that_serves(tmp_path: Path) -> None:
    assert "--serve" in run(tmp_path, SPES_CONFIG="tiny", SPES_SERVE="1").stdout.splitlines()
    assert "--serve" not in run(tmp_path, SPES_CONFIG="tiny", SPES_SERVE="0").stdout.splitlines()


def test_a_mirror_needs_no_config(tmp_path: Path) -> None:
    lines = run(tmp_path, SPES_MIRROR="spes1abc").stdout.splitlines()
    assert lines[:5] == ["bootstrap", "--mirror", "spes1abc", "--output", "bootstrap-node"]
    assert "--config" not in lines


def test_without_a_config_it_says_what_to_set(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.returncode != 0
    assert "set SPES_CONFIG to the YAML file of the run" in result.stderr
