"""Parts of a peer that crash: its libp2p daemon, one of its ranks, the whole of it; and nothing is left of them."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.ids import PeerId
from spes_p2p.observe.events import Warning
from spes_p2p.quickstart.processes import Process, children
from spes_p2p.state.store import StateStore
from spes_p2p.sync.chain import Chain
from tests.simulation.faulty_swarm import FaultySwarm
from tests.swarm.micro import LOCAL, MICRO, config_of, is_daemon, layout_of, local_swarm, peer_id_of

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
TWO = ("swarm.min_peers=2",)
NAMES = ("p0", "p1")
LEAVE_SECONDS = 30.0


@dataclass
class Story:
    """What happened to two peers, p0 with two ranks, and what was left."""

    folder: Path
    processes: dict[str, Process] = field(default_factory=dict)
    ids: dict[str, PeerId] = field(default_factory=dict)
    daemons: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Process ids before and after."""
    damaged: str = ""
    rank_code: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    """Shared memory that the peers had while they ran."""
    left: list[str] = field(default_factory=list)

    def warnings(self, name: str) -> list[str]:
        return [event.message for _, event in self.processes[name].seen if isinstance(event, Warning)]


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """The temporary folder of the processes: short, since sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="crash-", dir="/tmp") as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", name)
        yield Path(name)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, tokens: Path, temporary: Path) -> Story:
    told = Story(tmp_path_factory.mktemp("crashes"))
    with local_swarm(told.folder) as swarm:
        told.processes = swarm.processes
        swarm.bootstrap("tiny", tokens, [*MICRO, *TWO])
        for name in NAMES:
            swarm.peer(name, tokens, [*LOCAL, *(["--local-ranks", "2"] if name == "p0" else [])])
        swarm.wait_for_round(2, NAMES, 180.0)
        told.ids = {name: PeerId(peer_id_of(swarm.processes[name])) for name in NAMES}

        for name in ("p1", "bootstrap"):
            crash_daemon(swarm, told, name)
        swarm.wait_for_round(last_round(swarm.processes["p0"]) + 3, NAMES, 180.0)

        swarm.processes["p1"].end()
        told.damaged = damage(told.folder / "p1")
        away = last_round(swarm.processes["p0"])
        swarm.peer("p1", tokens, LOCAL)
        swarm.wait_until(lambda: lives(swarm.processes["p1"]) == 2, "p1 again", NAMES, 180.0)
        # a newcomer votes from its second round on: before that p0 may commit what nobody else has, and take it along
        swarm.wait_until(lambda: has_vote(swarm.processes["p1"], away), "a round with both", NAMES, 180.0)

        for process in swarm.processes.values():
            told.shared |= shared_memory_of(process.pid, told.folder.parent)
        kill_a_rank(swarm.processes["p0"])
        told.rank_code = swarm.processes["p0"].wait(60.0)
        swarm.wait_for_round(last_round(swarm.processes["p1"]) + 2, ["p1"], 180.0)

        for name, number in (("p1", signal.SIGINT), ("bootstrap", signal.SIGTERM)):
            swarm.processes[name].send(number)
            told.codes[name] = swarm.processes[name].wait(LEAVE_SECONDS)
        for process in swarm.processes.values():
            process.read_events()
    told.left = [path.name for path in temporary.iterdir() if path.name.startswith("spes-")]
    return told


def last_round(process: Process) -> int:
    return max((event.round for event in process.rounds()), default=0)


def has_vote(process: Process, since: int) -> bool:
    """Whether it went through a round after `since` that counts the work of both."""
    return any(event.round > since and event.roster_size == len(NAMES) for event in process.rounds())


def daemon_of(process: Process) -> int:
    """The one p2pd that runs below it."""
    (daemon,) = filter(is_daemon, psutil.Process(process.pid).children())
    return int(daemon.pid)


def crash_daemon(swarm: FaultySwarm, told: Story, name: str) -> None:
    process = swarm.processes[name]
    before = daemon_of(process)
    os.kill(before, signal.SIGKILL)
    words = "a new one with the same identity has replaced it"
    swarm.wait_until(lambda: words in process.output(), f"another daemon of {name}", [name], 180.0)
    told.daemons[name] = (before, daemon_of(process))


def kill_a_rank(process: Process) -> None:
    (rank,) = [child for child in psutil.Process(process.pid).children() if "spes_p2p.train.worker" in child.cmdline()]
    rank.kill()


def shared_memory_of(pid: int, folder: Path) -> set[str]:
    """Files in memory, and semaphores, that a process and all below it have mapped or open outside `folder`."""
    found: set[str] = set()
    for process in (pid, *children(pid)):
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
        paths = [line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line]
        paths += [file.path for file in psutil.Process(process).open_files()]
        found.update(path for path in paths if path.startswith("/dev/shm/") and Path(path).exists())
    return {path for path in found if not Path(path).is_relative_to(folder)}


def damage(folder: Path) -> str:
    """Flips a bit in the newest state of a peer that is down; the name of the file."""
    version = StateStore(folder / "run" / "state", layout_of(config_of(TWO)), read_only=True).latest()
    assert version is not None
    path = version.block_path(0)
    with open(path, "r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 4]))
    return str(path)


def lives(process: Process) -> int:
    """How often it came in."""
    return process.output().count("this is peer ")


def newest_manifest(story: Story) -> Manifest:
    commit = Chain(story.folder / "p1" / "run" / "chain").newest
    assert commit is not None
    return commit.manifest


def test_a_daemon_that_was_killed_is_replaced_and_the_peer_goes_on(story: Story) -> None:
    for before, after in story.daemons.values():
        assert before != after
    assert any("a new one with the same identity has replaced it" in text for text in story.warnings("p1"))


@pytest.mark.parametrize("name", ["p1", "bootstrap"])
def test_what_it_leaves_on_the_screen_is_one_line(story: Story, name: str) -> None:
    said = story.processes[name].output()
    assert said.count("the libp2p daemon ended") == 1
    assert not any(words in said for words in ("Traceback", "never retrieved", "child process pid"))


def test_a_killed_rank_ends_its_peer_with_the_reason(story: Story) -> None:
    assert story.rank_code == 1
    assert "local rank 1 was killed by SIGKILL" in story.processes["p0"].output()
    assert "Traceback" not in story.processes["p0"].output()
    members = {member.peer for member in newest_manifest(story).members}
    assert members == {story.ids["p1"]}


def test_a_damaged_state_is_named_and_fetched_again(story: Story) -> None:
    output = story.processes["p1"].output()
    assert f"{story.damaged}: tile 0 " in output.replace("\n", "")
    folder, layout = story.folder / "p1" / "run" / "state", layout_of(config_of(TWO))
    latest = StateStore(folder, layout, read_only=True).latest()
    assert latest is not None
    latest.verify()
    assert latest.root == newest_manifest(story).state_root


def test_everybody_else_ends_well(story: Story) -> None:
    assert story.codes == {"p1": 0, "bootstrap": 0}


def test_nothing_is_left(story: Story) -> None:
    """No process, of which the fixture has made sure, no temporary folder, and no shared memory."""
    assert story.left == []
    assert [path for path in story.shared if Path(path).exists()] == []
