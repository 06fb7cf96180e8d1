"""Whether a quorum of our tip's electors is heard, and what a person is told where none is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.members import Members
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.proposals import Proposals
from spes_p2p.ids import PeerId, short

MOST_NAMED = 6
"""Missing electors, in a line."""


@dataclass(eq=False)
class Quorum(Part):
    """Keeps `Liveness` up to date."""

    _contacts: Contacts
    _members: Members
    _proposals: Proposals

    def listen(self, now: float) -> bool:
        """Looks who is heard; whether what may be done has changed."""
        live = self._liveness
        others = (
            {member.peer for member in self._state.tip.members} - {self._me} if live.asking_since is not None else ()
        )
        changed = live.note(others, self._pace, now)
        if live.failing_since is not None and not self._is_wanting(now):
            live.failing_since = None
        heard = self._members.live_electors(now)
        live.hears_quorum = len(heard) >= self._state.electorate.quorum
        if live.hears_quorum or live.asking_since is not None or not self._waits():
            live.missed_since = None
            if live.is_told and live.hears_quorum:
                live.is_told = False
                self._state.notify("quorum", "enough electors are heard again: the run goes on")
        elif live.missed_since is None:
            live.missed_since = now
        elif now - live.missed_since > self._pace.deadline_seconds(0) and not live.is_told:
            live.is_told = True
            self._state.notify("waiting", self._waiting_text(heard))
        return changed

    def _waiting_text(self, heard: list[PeerId]) -> str:
        electorate = self._state.electorate
        missing = sorted({*electorate.order} - {*heard})
        return waiting_text(self._state.tip.round, len(electorate.order), electorate.quorum, missing)

    def _waits(self) -> bool:
        """Whether this peer has done its part of the round, and no other history is coming here."""
        intent = self._own.intent
        if self._state.round.heavier is not None:
            return False
        return self._state.round.work.ready or (intent.joining and not self._state.is_member())

    def _is_wanting(self, now: float) -> bool:
        """Whether others have what is to be staged here, or are further than we are, or what we build fails."""
        target, current = self._proposals.target(), self._state.round
        if target is None:
            return self._others.ahead_since is not None or current.failed_builds > 1
        is_here = manifest_hash(target.manifest) in current.verified
        voters = (status for status in self._contacts.electors_here() if self._contacts.alive(status.peer, now))
        have_it = any(status.ballots.prevoted >= 0 for status in voters)
        return self._others.ahead_since is not None or (not is_here and have_it)


def waiting_text(round: int, electors: int, quorum: int, missing: Sequence[PeerId]) -> str:
    """Who is missing where a round after `round` cannot be committed, and what brings the run on."""
    names = ", ".join(short(peer) for peer in missing[:MOST_NAMED])
    more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
    return (
        f"round {round + 1} needs {quorum} of {electors} electors; missing: {names}{more}. It goes on when enough are "
        "back, or the organiser's node runs (its key, on any machine). If neither comes: spes-p2p export, then "
        "spes-p2p bootstrap --init-from"
    )
