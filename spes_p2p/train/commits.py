"""What the trainer's machine needs to know of commits: the news, as the driver tells it, in the machine's words."""

from __future__ import annotations

from spes_p2p.consensus.messages import RENEWAL
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.surroundings import Applied
from spes_p2p.train.machine import TrainerMachine
from spes_p2p.train.stages import Committed, Switched


def news_of(
    machine: TrainerMachine, events: tuple[Applied, ...], chain: Chain, is_member: bool
) -> Committed | Switched:
    """Of commits that were applied one after the other, all at once."""
    first, last, turn = events[0], events[-1], machine.turn
    newest = last.commit.manifest
    if any(event.switched for event in events):
        return Switched(newest, is_member, sum(event.own_tokens for event in events))
    child = None if turn is None else chain.child_of(turn.manifest)  # none where another history came in this moment
    is_renewal = turn is not None and newest.parent == turn.tip_hash and last.commit.certificate.kind == RENEWAL
    return Committed(newest, is_member, first.counted, first.handed_in, first.uncounted, child, is_renewal)
