"""A bootstrap node inside the test's own process, for commands that are called there too: no start-up time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spes_p2p.cli.main import COMMANDS, build
from tests.peer.real import SMALL, make_tokens

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@dataclass
class Answer:
    """What a command printed, and how it ended."""

    exit_code: int
    output: str
    errors: str


def spes_p2p(*arguments: str) -> Answer:
    """Runs a command of the program here. A bug's traceback fails the test."""
    result = CliRunner().invoke(build(COMMANDS), arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


@dataclass
class Organiser:
    """A running bootstrap node."""

    address: str
    command: str
    data: Path
    folder: Path
    said: list[str]

    def join(self, output: Path, *arguments: str) -> Answer:
        """`spes-p2p join` with this node as initial peer."""
        common = ("--initial-peers", self.address, "--host-maddrs", LOOPBACK, "--output", str(output))
        return spes_p2p("join", *common, *arguments)


def serve(folder: Path, data: Path, *overrides: str) -> Iterator[Organiser]:
    """A bootstrap node of a small run, while the caller looks at it."""
    from spes_p2p.peer.bootstrap import BootstrapOptions, serve_until
    from spes_p2p.peer.options import NetworkOptions
    from spes_p2p.swarm.hivemind_backend import NetworkThread

    network = NetworkOptions((), (LOOPBACK,))
    options = BootstrapOptions(network, folder, Path("tiny"), str(data), (*SMALL, *overrides), metrics_port=0)
    ready, said, command = threading.Event(), list[str](), list[str]()

    def on_ready(text: str) -> None:
        command.append(text)
        ready.set()

    with NetworkThread() as thread:
        stop = asyncio.Event()
        serving = thread.submit(serve_until(stop, options, said.append, on_ready))
        while not ready.wait(0.05):
            if serving.done():
                serving.result()
        address = command[0].split("--initial-peers ")[1].split()[0]
        yield Organiser(address, command[0], data, folder, said)
        thread.loop.call_soon_threadsafe(stop.set)
        serving.result()


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def organiser(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Iterator[Organiser]:
    """Of a run that never begins, since nine peers do not come."""
    yield from serve(tmp_path_factory.mktemp("organiser"), tokens, "swarm.min_peers=9")
