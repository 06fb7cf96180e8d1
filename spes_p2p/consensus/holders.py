"""Who is asked for a slice, the best first."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.manifest import Slice
from spes_p2p.consensus.part import Part
from spes_p2p.ids import PeerId


@dataclass(eq=False)
class Holders(Part):
    """By what the others say that they have staged."""

    _contacts: Contacts

    def sure(self, piece: Slice, now: float) -> tuple[PeerId, ...]:
        """Who has a slice of this round for certain: its reducer, and who says so; of those that we can ask."""
        index = self._state.round.index_of.get(piece.key)
        report = None if index is None else self._state.round.reports.get(index)
        reducer = piece.reducer if report is None else report.author
        found = [
            peer
            for peer, c in self._others.contacts.items()
            if index is not None and any(c.status.staged[index : index + 1])
        ]
        known = dict.fromkeys((reducer, *sorted(found)))
        return tuple(p for p in known if p != self._me and self._contacts.alive(p, now) and self._contacts.can_ask(p))

    def likely(self, piece: Slice, first: PeerId, now: float) -> tuple[PeerId, ...]:
        """Who may have a slice: its reducer, those who say so, then anybody of this round; a silent reducer after them.

        If we cannot be dialled, those who cannot either come last, since no stream between us can be opened.
        """
        index = self._state.round.index_of.get(piece.key)
        said: list[PeerId] = []
        others: list[PeerId] = []
        for peer, contact in self._others.contacts.items():
            staged = contact.status.staged
            if peer != first and self._contacts.alive(peer, now):
                has = index is not None and index < len(staged) and staged[index]
                (said if has else others).append(peer)
        likely = sorted(said) + sorted(others)
        reducer = [first] if first != self._me else []
        found = reducer + likely if self._contacts.alive(first, now) else likely + reducer
        return tuple(sorted(found, key=lambda peer: not self._contacts.can_ask(peer)))
