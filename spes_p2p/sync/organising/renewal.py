"""Decides whether the organiser must name new members: no elector is left, and other peers are waiting.

Pure: news and time are passed in. An elector counts as left only if it says, in the incarnation that may vote, that it
can vote, and has the newest state. The silence must last as long as a minority waits before it goes on without a
majority (`Pace.degraded_wait_seconds`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import electors
from spes_p2p.consensus.messages import Status
from spes_p2p.consensus.timing import NEVER, Pace
from spes_p2p.ids import NO_HASH, PeerId

MOST_HEARD = 256
"""Strangers that are kept in mind."""
LONGER = 10
"""Factor on the wait if the newest state is lost: its work would be lost, too, and a peer that has it may return."""


@dataclass
class _Heard:
    """The newest word of a peer, when it came, and since when it has come without a break."""

    status: Status
    at: float
    since: float


class LivenessMonitor:
    """Whom the bootstrap node hears, and whether anybody of them can carry on the run on top of `tip`."""

    def __init__(self, pace: Pace, tip: Manifest, now: float) -> None:
        self._pace = pace
        self._heard: dict[PeerId, _Heard] = {}
        self._voting_at: dict[PeerId, float] = {}
        self._last_tick = now
        self._enter(tip, now)

    def enter(self, tip: Manifest, now: float) -> None:
        """There may be another manifest than before. Silence goes on over rounds."""
        if manifest_hash(tip) == manifest_hash(self.tip):
            return
        if tip.round == self.tip.round + 1 and self.has_live_elector(now):
            self._pace.observe_round(now - self._entered)
        self._enter(tip, now)

    def _enter(self, tip: Manifest, now: float) -> None:
        before = self._voting_at
        self.tip, self._entered = tip, now
        self._elector = {member.peer: member.incarnation for member in electors(tip.members)}
        self._voting_at = {peer: before.get(peer, now) for peer in self._elector}

    def hear(self, status: Status, now: float) -> None:
        """A peer itself has said this."""
        peer = status.peer
        known = self._heard.get(peer)
        if known is None and len(self._heard) >= MOST_HEARD and peer not in self._elector:
            self._forget_silent(now)
            if len(self._heard) >= MOST_HEARD:
                return
        kept = known is not None and self._is_fresh(known, now) and _waits(known.status)
        if known is not None:
            self._pace.observe_gap(now - known.at)
        self._heard[peer] = _Heard(status, now, known.since if known is not None and kept else now)
        if self._may_lead(status):
            self._voting_at[peer] = now

    def tick(self, now: float) -> None:
        """Time passed. After a sleep of this machine all waits begin anew: it was we who heard nobody."""
        if now - self._last_tick > self._pace.suspect_seconds:
            self._voting_at = dict.fromkeys(self._voting_at, now)
            self._heard.clear()
        self._last_tick = now

    def has_live_elector(self, now: float) -> bool:
        """Whether an elector that can vote was heard of late."""
        return self.silent_seconds(now) <= self._pace.suspect_seconds

    def has_newer_history(self, now: float, is_hollow: Callable[[PeerId], bool] = lambda peer: False) -> bool:
        """Whether somebody who is heard has gone on without our tip: a renewal of it would undo what they made.

        `is_hollow(peer)`: whether it says so, and could not show it time and again.
        """
        head = manifest_hash(self.tip)
        fresh = (h.status for peer, h in self._heard.items() if self._is_fresh(h, now) and not is_hollow(peer))
        return any(s.round > self.tip.round or (s.round == self.tip.round and s.head != head) for s in fresh)

    def silent_seconds(self, now: float) -> float:
        """How long no elector was heard that can vote."""
        return now - max(self._voting_at.values(), default=NEVER)

    def waiting(self, now: float) -> list[Status]:
        """Who would take part, by peer."""
        return [
            heard.status
            for _, heard in sorted(self._heard.items())
            if self._is_fresh(heard, now) and _waits(heard.status)
        ]

    def new_members(
        self, min_peers: int, is_state_lost: bool, now: float, is_banned: Callable[[PeerId], bool] = lambda peer: False
    ) -> list[Status]:
        """Peers that should become the members, since nobody who could name them was heard; none before that is due.

        They must have the newest state, unless it is lost; otherwise the first rounds would wait for the slowest
        download. Fewer than `min_peers` of them must have waited for as long as the electors were silent.
        """
        head = manifest_hash(self.tip)
        waiting = [status for status in self.waiting(now) if not is_banned(status.peer)]
        chosen = [status for status in waiting if is_state_lost or status.head == head]
        wait = self.wait_seconds(is_state_lost)
        if not chosen or any(now - at < wait for at in self._voting_at.values()):
            return []
        first = min(self._heard[status.peer].since for status in chosen)
        return chosen if len(chosen) >= min_peers or now - first >= wait else []

    def wait_seconds(self, is_state_lost: bool) -> float:
        """How long nobody may be heard."""
        return self._pace.degraded_wait_seconds() * (LONGER if is_state_lost else 1)

    def _may_lead(self, status: Status) -> bool:
        return (
            self._elector.get(status.peer) == status.incarnation
            and status.intent.can_vote
            and status.round >= self.tip.round
        )

    def _is_fresh(self, heard: _Heard, now: float) -> bool:
        return now - heard.at <= self._pace.suspect_seconds

    def _forget_silent(self, now: float) -> None:
        for peer in [peer for peer, heard in self._heard.items() if not self._is_fresh(heard, now)]:
            del self._heard[peer]


def _waits(status: Status) -> bool:
    intent = status.intent
    return intent.joining and not intent.leaving and not intent.serving and status.head != NO_HASH
