"""Columns in a real swarm: the only owner is killed and others train on; a leaver hands over its optimizer moments."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from spes_p2p.consensus.manifest import Manifest
from spes_p2p.ids import PeerId
from spes_p2p.observe.events import Columns
from spes_p2p.ownership.assign import columns_of, orphans
from spes_p2p.sync.chain import Chain
from tests.simulation.faulty_swarm import FaultySwarm
from tests.swarm.micro import LOCAL, MICRO, local_swarm, peer_id_of

pytestmark = [pytest.mark.swarm, pytest.mark.thorough, pytest.mark.timeout(600)]
NAMES = ("p0", "p1", "p2")


def adopted(swarm: FaultySwarm, name: str) -> list[Columns]:
    process = swarm.processes[name]
    process.read_events()
    return [event for _, event in process.seen if isinstance(event, Columns)]


def manifests(swarm: FaultySwarm, name: str) -> Iterator[Manifest]:
    chain = Chain(swarm.folder / name / "run" / "chain")
    return (chain.commit(round).manifest for round in range(chain.length))


def test_columns_outlive_their_owners(tmp_path: Path, tokens: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        swarm.bootstrap("tiny", tokens, MICRO)
        for name in NAMES:
            swarm.peer(name, tokens, LOCAL)
        swarm.wait_for_round(2, NAMES, 180.0)
        ids = {name: PeerId(peer_id_of(swarm.processes[name])) for name in NAMES}

        swarm.processes["p2"].end()
        swarm.wait_until(lambda: bool(adopted(swarm, "p0")), "p2's columns are adopted", ("p0", "p1"), 180.0)
        (killed,) = adopted(swarm, "p0")
        swarm.wait_for_round(killed.round + 1, ("p0", "p1"))

        swarm.processes["p1"].send(signal.SIGTERM)
        assert swarm.processes["p1"].wait(30.0) == 0
        swarm.wait_until(lambda: len(adopted(swarm, "p0")) > 1, "p1's columns are adopted", ("p0",))
        _, left = adopted(swarm, "p0")
        swarm.wait_for_round(left.round + 1, ("p0",))
        chain = list(manifests(swarm, "p0"))

    last_with = max(made.round for made in chain if ids["p2"] in {member.peer for member in made.members})
    lost = columns_of(chain[last_with].ownership, ids["p2"])
    assert set(killed.adopted) & set(lost)
    assert killed.round == last_with + 1
    assert orphans(chain[killed.round].ownership) == ()
    for column in lost:  # trained again by whoever adopted it, in the first round that counts its work
        (owner,) = chain[killed.round].ownership[column]
        counted = next(m for m in chain[killed.round + 1 :] if owner in {entry.peer for entry in m.roster})
        assert counted.column_rounds[column] == counted.round
    assert left.adopted == columns_of(chain[left.round - 1].ownership, ids["p1"])
    assert columns_of(chain[left.round].ownership, ids["p0"]) == tuple(range(8))
