"""The bootstrap node dies for good once the run goes: who is there invites others, and a mirror takes its place."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from spes_p2p.data.manifest import Dataset
from spes_p2p.data.trees import FolderPieces
from spes_p2p.peer.kept_invite import kept_invite
from spes_p2p.quickstart.processes import Process
from spes_p2p.swarm.invite import decode
from tests.simulation.faulty_swarm import FaultySwarm
from tests.swarm.micro import LOCAL, MICRO, local_swarm, peer_id_of

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
AGREED = ("swarm.min_peers=2", "swarm.experts_per_peer=3")


def wait_until_named(swarm: FaultySwarm, by: Process, *named: Process) -> None:
    """Until the newest invitation of a node names these peers."""
    wanted = {peer_id_of(one) for one in named}

    def found() -> bool:
        return wanted <= {address.rpartition("/")[2] for address in decode(kept_invite(by.folder)).addresses}

    swarm.wait_until(found, f"an invitation by {by.name}", [by.name])


def has_data(mirror: Path, tokens: Path) -> bool:
    """Whether every piece of the data is there."""
    whole = FolderPieces.open(Dataset.open(tokens), mirror.parent / "own", lambda text: None)
    numbers = mirror / "data" / "numbers.bin"
    held = numbers.stat().st_size // 8 if numbers.exists() else 0
    return held == whole.held


def archived(archive: Path) -> int:
    """The newest round whose state is there."""
    return max((int(path.name.removeprefix("round-")) for path in (archive / "state").glob("round-*")), default=0)


def reached(peer: Process) -> int:
    """The newest round whose state a peer has; 0 before it has any."""
    return max((event.round for event in peer.rounds()), default=0)


def test_the_run_goes_on_without_its_first_node(tmp_path: Path, tokens: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        node = swarm.bootstrap("tiny", tokens, [*MICRO, *AGREED])
        one, two = (swarm.peer(name, tokens, LOCAL) for name in ("one", "two"))
        swarm.wait_for_round(1, ["one", "two"])
        assert "others join with this invitation:\n  spes1" in one.output()
        node.end()
        wait_until_named(swarm, one, one, two)
        word = swarm.ask("invite", "--folder", str(one.folder)).strip()

        late = swarm.peer("late", None, LOCAL, initial_peer=word)
        swarm.wait_for_round(max(event.round for event in one.rounds()) + 2, ["one", "late"])
        assert f"others join with: spes-p2p join {word[:5]}" in swarm.ask("status", word)
        assert "genesis" in swarm.ask("run", "inspect", word)
        assert "genesis" in swarm.ask("run", "inspect", "--folder", str(tmp_path / "late"))

        wait_until_named(swarm, two, one, two, late)
        two.send(signal.SIGTERM)
        assert two.wait(30.0) == 0
        mirror = swarm.mirror("mirror", word, ["--archive", str(tmp_path / "archive")])
        two = swarm.peer("two", tokens, LOCAL)  # by the address of the node that is gone
        swarm.wait_for_round(max(event.round for event in one.rounds()) + 2, ["one", "two", "late"])
        swarm.wait_until(lambda: has_data(mirror.folder, tokens), "the data at the mirror", ["mirror"])

        for peer in (one, two, late):  # they all go home
            peer.send(signal.SIGTERM)
        assert [peer.wait(30.0) for peer in (one, two, late)] == [0, 0, 0]
        newest = max(map(reached, (one, two, late)))
        swarm.wait_until(lambda: archived(tmp_path / "archive") >= newest, "the newest state there", ["mirror"], 30.0)
        mirror.send(signal.SIGTERM)
        assert mirror.wait(30.0) == 0
        mirror = swarm.mirror("mirror", word, ["--archive", str(tmp_path / "archive")])  # nobody else is there
        swarm.wait_until(lambda: mirror.output().count("volunteers join") == 2, "the mirror is there again", ["mirror"])
        word = kept_invite(mirror.folder)
        lone = swarm.peer("lone", None, LOCAL, initial_peer=word)
        swarm.wait_until(lambda: reached(lone) > 0, "all that a newcomer needs, from the mirror alone", ["lone"])
        for peer in (one, two, late):  # whoever was the last has the vote
            swarm.peer(peer.name, tokens, LOCAL, initial_peer=word)
        swarm.wait_for_round(reached(lone) + 2, ["one", "two", "late", "lone"])
