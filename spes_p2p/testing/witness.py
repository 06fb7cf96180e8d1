"""What one simulated peer truly heard of the electors of its tip, worked out beside the protocol, for the judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.machine import Consensus
from spes_p2p.consensus.timing import NEVER, Moment, Seconds
from spes_p2p.ids import NO_HASH, Hash, PeerId
from spes_p2p.testing.judge import Guard, voters


@dataclass
class Heard:
    """What a peer last said of itself, and when; `newest` is its status's sequence."""

    at: Moment
    incarnation: int
    newest: int
    head: Hash
    round: int
    can_vote: bool


@dataclass
class Witness:
    """Looks on while one process runs. `quorum_at`: when a quorum of `quorum_head`'s electors lived."""

    awake_since: Moment
    quorum_head: Hash = NO_HASH
    quorum_at: Moment = 0.0
    wait_seconds: Seconds = 0.0
    heard: dict[PeerId, Heard] = field(default_factory=dict)

    def hear(self, core: Consensus, envelope: Envelope, now: float) -> None:
        """A message has come. One that waited while the machine slept says nothing of who lives."""
        at = NEVER if now == self.awake_since else now
        for signed in envelope.statuses:
            status, known = signed.value, self.heard.get(signed.value.peer)
            if status.peer == core.me:
                continue
            if known is None or (status.incarnation, status.sequence) > (known.incarnation, known.newest):
                self.heard[status.peer] = Heard(
                    at, status.incarnation, status.sequence, status.head, status.round, status.intent.can_vote
                )

    def live(self, core: Consensus, is_ours: Callable[[Hash, int], bool], now: float) -> frozenset[PeerId]:
        """The electors that live on our tip, or before it."""
        chosen, suspect = voters(core.tip), core.state.pace.suspect_seconds
        able = core.state.own.intent.can_vote and core.state.liveness.can_be_counted_on(core.state.pace, now)
        live = {core.me} if chosen.get(core.me) == core.state.own.incarnation and able else set()
        for peer, incarnation in chosen.items():
            heard = self.heard.get(peer)
            if heard is None or now - heard.at > suspect or heard.incarnation != incarnation or not heard.can_vote:
                continue
            if heard.head == core.tip_hash or (0 <= heard.round < core.tip.round and is_ours(heard.head, heard.round)):
                live.add(peer)
        return frozenset(live)

    def look(self, core: Consensus, is_ours: Callable[[Hash, int], bool], now: float) -> None:
        """Called after all that may have changed."""
        if self.quorum_head != core.tip_hash or 2 * len(self.live(core, is_ours, now)) > len(voters(core.tip)):
            self.quorum_at = now
        self.quorum_head = core.tip_hash
        self.wait_seconds = core.state.pace.degraded_wait_seconds()  # what an event teaches counts from the next on

    def guard(self, core: Consensus, is_ours: Callable[[Hash, int], bool], now: float) -> Guard:
        """What the judge is told when this peer makes or takes a degraded child."""
        wait, pace = self.wait_seconds, core.state.pace
        self.look(core, is_ours, now)
        since = max(self.quorum_at, self.awake_since)
        just_asked = now - self.awake_since <= 2.5 * pace.deadline_seconds(0)
        live = self.live(core, is_ours, now)
        return Guard(now - since, min(wait, self.wait_seconds) - 1e-6, just_asked, live)
