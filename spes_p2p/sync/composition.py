"""Puts one peer's driver together: the only place that does, for peers, nodes that serve, and swarms in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from spes_p2p.consensus.machine import Consensus, Start
from spes_p2p.consensus.messages import Commit
from spes_p2p.consensus.state import Identity
from spes_p2p.consensus.timing import Pace
from spes_p2p.exchange.requests import DataRequest
from spes_p2p.files import storing
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync.driver import Driver
from spes_p2p.sync.fraud import PROOFS, ProofFolder
from spes_p2p.sync.guests import Bases
from spes_p2p.sync.inputs import Inputs
from spes_p2p.sync.joining import JoinedRun
from spes_p2p.sync.node import Node, Run
from spes_p2p.sync.residuals import Residuals
from spes_p2p.sync.surroundings import Disk, Hooks, Role


def open_disk(place: JoinedRun, run: Run, folder: Path, data: Callable[[DataRequest], Blob] | None = None) -> Disk:
    """The `Disk` of a peer that has joined a run at `place`; its own values go to `folder`. Raises StorageFull."""
    layout = run.layout
    with storing(folder, 0):
        inputs = Inputs(folder / "inputs", layout, run.rules.audited_work > 0)
        residuals = Residuals(folder / "residuals", layout, run.rules.audited_share > 0)
    bases, proofs = Bases(folder / "guests", layout), ProofFolder(folder / PROOFS, run.info)
    return Disk(place.store, place.chain, place.votes, inputs, residuals, bases, proofs, data=data)


def build_driver(run: Run, node: Node, tip: Commit, disk: Disk, role: Role, hooks: Hooks) -> Driver:
    """A driver that stands on `tip`, the newest commit whose state is on `disk`; it is yet to be started."""
    identity = Identity(node.me, run.rules, node.sealer, node.checker.check)
    votes = disk.votes
    start = Start(
        votes.incarnation, tip.manifest, tip, votes.record, role.intent, node.first_sequence, role.seeds, node.secret,
        disk.chain.ledger(tip.manifest.round),
    )  # fmt: skip
    core = Consensus.begin(identity, start, Pace(run.heartbeat_seconds), node.clock.now())
    return Driver(core, run, node, disk, role, hooks)
