"""The systemd units that come with the project: what they start is a command line that the program takes."""

from __future__ import annotations

import shlex
from pathlib import Path

import typer

from spes_p2p.cli.main import COMMANDS, EXIT_PERMANENT, build

FOLDER = Path(__file__).parents[2] / "bootstrap"


def values(unit: str) -> dict[str, str]:
    lines = (FOLDER / unit).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_a_peer_is_started_as_join_takes_it() -> None:
    program, command, *arguments = shlex.split(values("spes-p2p-peer.service")["ExecStart"])
    assert (Path(program).name, command) == ("spes-p2p", "join")
    join = typer.main.get_command(build({"join": COMMANDS["join"]}, {}))
    found = getattr(join, "commands", {}).get("join", join).make_context("join", arguments).params
    assert (found["words"], found["output"]) == (["spes1..."], Path("peer"))


def test_what_no_restart_mends_ends_the_service() -> None:
    for unit in ("spes-p2p-peer.service", "spes-p2p-bootstrap.service"):
        assert str(EXIT_PERMANENT) in values(unit)["RestartPreventExitStatus"].split()
