"""What the trainer's machine needs to know of commits: the news, as the driver tells it, in the machine's words."""

from __future__ import annotations

from spes_p2p.consensus.messages import DEGRADED
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.surroundings import Applied
from spes_p2p.train.machine import TrainerMachine
from spes_p2p.train.stages import Committed, Switched


def news_of(
    machine: TrainerMachine, events: tuple[Applied, ...], chain: Chain, is_member: bool
) -> Committed | Switched:
    """Of commits that were applied one after the other, all at once."""
    first, last, turn = events[0], events[-1], machine.turn
    newest, parent = last.commit.manifest, None if turn is None else turn.manifest
    if first.switched:
        parent = None if machine.parting is None else machine.parting.parent
    child = None if parent is None else chain.child_of(parent)  # none where another history won in this moment
    if any(event.switched for event in events):
        own = sum(event.own_tokens for event in events) if first.switched else 0
        return Switched(newest, is_member, child, own, at_once=not first.switched)
    is_degraded = last.commit.certificate.kind == DEGRADED
    return Committed(newest, is_member, first.counted, first.handed_in, first.uncounted, child, is_degraded)
