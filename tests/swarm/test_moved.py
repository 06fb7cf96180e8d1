"""The bootstrap node dies for good once the run goes: who is there invites others, and who was there comes back."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from spes_p2p.peer.kept_invite import kept_invite
from spes_p2p.swarm.invite import decode
from spes_p2p.testing.processes import LocalSwarm, Process
from tests.swarm.micro import LOCAL, MICRO, local_swarm, peer_id_of

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
AGREED = ("swarm.min_peers=2", "swarm.experts_per_peer=3")


def wait_until_named(swarm: LocalSwarm, by: Process, *named: Process) -> None:
    """Until the newest invitation of a node names these peers."""
    wanted = {peer_id_of(one) for one in named}

    def found() -> bool:
        return wanted <= {address.rpartition("/")[2] for address in decode(kept_invite(by.folder)).addresses}

    swarm.wait_until(found, f"an invitation by {by.name}", [by.name])


def test_the_run_goes_on_without_its_first_node(tmp_path: Path, tokens: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        node = swarm.bootstrap("tiny", tokens, [*MICRO, *AGREED])
        one, two = (swarm.peer(name, tokens, LOCAL) for name in ("one", "two"))
        swarm.wait_for_round(1, ["one", "two"])
        assert "others join with:\n  spes-p2p join spes1" in one.output()
        node.end()
        wait_until_named(swarm, one, one, two)
        word = swarm.ask("invite", "--output", str(one.folder)).strip()

        late = swarm.peer("late", tokens, LOCAL, initial_peer=word)
        swarm.wait_for_round(max(event.round for event in one.rounds()) + 2, ["one", "late"])
        assert f"others join with: spes-p2p join {word[:5]}" in swarm.ask("status", word)
        assert "genesis" in swarm.ask("run", "inspect", word)
        assert "genesis" in swarm.ask("run", "inspect", "--output", str(tmp_path / "late"))

        wait_until_named(swarm, two, one, two, late)
        two.send(signal.SIGTERM)
        assert two.wait(30.0) == 0
        two = swarm.peer("two", tokens, [*LOCAL, "--resume"])  # by the address of the node that is gone
        swarm.wait_for_round(max(event.round for event in one.rounds()) + 2, ["one", "two", "late"])
