"""Which manifests are voted on for the next round, and which of them this peer stages or is bound to."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.content import Content
from spes_p2p.consensus.electorate import NIL
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.state import HOPELESS, Key
from spes_p2p.ids import Hash

MOST_CONTENTS = 32
"""Contents that are kept beside those that are needed."""


@dataclass(eq=False)
class Proposals(Part):
    """What is proposed in this round, and the contents that are known."""

    _contacts: Contacts
    _leadership: Leadership

    def named(self, name: Hash) -> Content | None:
        return self._state.round.contents.get(name)

    def wanted(self) -> list[Hash]:
        """The manifests that matter to us, the most urgent first.

        The decided one; else the proposal of this ballot, where our lock allows it, and what was nearly decided before.
        """
        current, vote = self._state.round, self._state.round.vote
        if current.decided is not None:
            return [current.decided.certificate.manifest]
        if vote.decided is not None:
            return [vote.decided.value]
        proposal, polka = vote.heard.proposal_at(self._leadership.ballot()), vote.heard.polka
        names = [proposal.value.value] if proposal and vote.record.allows(proposal.value) else []
        names += [polka.value] if polka else []
        return list(dict.fromkeys(name for name in (*names, vote.record.locked_value) if name != NIL))

    def lacks(self) -> tuple[Hash, ...]:
        """Manifests whose content we need from others."""
        contents = self._state.round.contents
        return tuple(name for name in self.wanted() if name not in contents and name not in self._state.round.refused)

    def target(self) -> Content | None:
        """What to stage: the first that is wanted and not hopeless."""
        known = [found for name in self.wanted() if (found := self.named(name)) is not None]
        hopeful = [content for content in known if not self.is_hopeless(content)]
        return next(iter(hopeful or known), None)

    def note_failed_staging(self, content: Content | None) -> None:
        if content is not None:
            self._state.round.in_vain[manifest_hash(content.manifest)] += 1

    def is_hopeless(self, content: Content) -> bool:
        """Whether staging it failed again and again (no tiles, or a wrong root); then another may replace it."""
        return self._state.round.in_vain.get(manifest_hash(content.manifest), 0) >= HOPELESS

    def stands_by_a_state(self) -> bool:
        """Whether what is staged serves a proposal, or one that we voted for: then plans no longer matter."""
        return bool(self._state.record.pinned) or self.target() is not None

    def verified_before(self) -> Content | None:
        """One whose state is here, of an earlier ballot: a free leader takes it up, which saves everybody's work."""
        return next((found for name in self._state.round.verified if (found := self.named(name)) is not None), None)

    def refuse_with(self, key: Key, hashes: bytes) -> None:
        """Refuses all manifests with these tiles: no honest peer votes for one, and a leader that lies may insist."""
        for name, content in list(self._state.round.contents.items()):
            pieces = zip(content.manifest.slices, content.wire_hashes, strict=True)
            if any(piece.key == key and own == hashes for piece, own in pieces):
                self.refuse(name)

    def refuse(self, name: Hash) -> None:
        """Refuses a manifest that is known, unless it is decided: too late then."""
        current = self._state.round
        if current.decided is None:
            del current.contents[name]
            current.refused.add(name)

    def take(self, content: Content, now: float) -> None:
        """Keeps a content; of too many the oldest goes that nobody needs."""
        current = self._state.round
        name = manifest_hash(content.manifest)
        needed = {name, *self.wanted(), *current.verified, *self._state.record.pinned}
        current.contents[name] = content
        for other in [at for at in current.contents if at not in needed][
            : max(0, len(current.contents) - MOST_CONTENTS)
        ]:
            del current.contents[other]
