"""What has to come to this peer's disk: slices by hash, then the whole state that a proposal names."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from spes_p2p.consensus.actions import Fetch, Verify
from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.holders import Holders
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.messages import Report, Signed
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.proposals import Proposals
from spes_p2p.consensus.state import MAX_FAILED_FETCHES, Key, SliceToStage
from spes_p2p.ids import NO_HASH, Hash


@dataclass(eq=False)
class Staging(Part):
    """What is wanted, what is missing, and what is staged."""

    _contacts: Contacts
    _holders: Holders
    _proposals: Proposals

    def missing(self) -> dict[Key, SliceToStage]:
        """Slices that are wanted and not staged."""
        staged = self._state.round.staged
        return {w.piece.key: w for w in self._wanted() if staged.get(w.piece.key) != w.hashes}

    def _wanted(self) -> list[SliceToStage]:
        """Slices to be staged here, with their hashes and who has them surely."""
        current = self._state.round
        proposal = self._proposals.target()
        if proposal is not None and manifest_hash(proposal.manifest) in current.verified:
            return []
        if proposal is not None:
            pairs = zip(proposal.manifest.slices, proposal.wire_hashes, strict=True)
            return [SliceToStage(piece, hashes, piece.reducer) for piece, hashes in pairs]
        if current.plan is None or self._proposals.stands_by_a_state():
            return []
        slices = current.plan.value.slices
        return [
            SliceToStage(slices[index], b"".join(report.value.wire_hashes), report.value.reducer)
            for index, report in current.reports.items()
        ]

    def has_staged(self, key: Key, report: Report) -> bool:
        """Whether the very tiles that a report promises are on our disk."""
        return self._state.round.staged.get(key) == b"".join(report.wire_hashes)

    def stage(self, key: Key, hashes: bytes, now: float) -> None:
        """Notes what is on disk. Writing undoes a state that was finished; a tile has one version there."""
        current = self._state.round
        current.verified.clear()
        if current.staged.get(key, hashes) != hashes:
            current.building = None
            current.outcome = None
        current.staged[key] = hashes

    def forget(self) -> None:
        current = self._state.round
        current.staged.clear()
        current.fetching.clear()
        current.reducing.clear()
        current.verified.clear()
        current.failed.clear()
        current.verifying = NO_HASH
        current.building = None
        current.outcome = None
        current.adopting = current.following = False
        current.heavier = None
        current.close_asked = current.close_asked and current.work.ready
        for index in [index for index, report in current.reports.items() if report.author == self._me]:
            del current.reports[index]

    def _note_empty_report(self, index: int, report: Signed[Report]) -> None:
        """After a few of them the reducer's turn is over, and we remember it."""
        current, reducer = self._state.round, report.author
        if not self._contacts.can_ask(reducer):  # it comes from others, as soon as they have it
            return
        current.failed_fetches[index, reducer] += 1
        tries = 1 if reducer in self._others.withholding_peers else MAX_FAILED_FETCHES
        if current.failed_fetches[index, reducer] >= tries and not self._contacts.is_staged_elsewhere(index, reducer):
            current.empty_reports.setdefault(index, {})[reducer] = report
            if reducer not in self._others.withholding_peers:
                self._state.notify("left out", "it reported a reduced slice that nobody can fetch", reducer)
            self._others.withholding_peers.add(reducer)

    def fetch(self, now: float) -> bool:
        """Get every slice that is wanted and not here."""
        current, started = self._state.round, False
        for key, wanted in self.missing().items():
            if current.fetching.get(key) == wanted.hashes or key in current.failed:
                continue
            current.fetching[key] = wanted.hashes
            self._state.out.append(
                Fetch(wanted.piece, wanted.hashes, self._holders.likely(wanted.piece, wanted.first, now))
            )
            started = True
        return started

    def refetch(self, now: float) -> bool:
        """What could not be fetched is tried again with the next heartbeat."""
        current = self._state.round
        if not current.failed or now < self._state.next_heartbeat:
            return False
        self._proposals.note_failed_staging(self._proposals.target())
        current.failed.clear()
        return True

    def verify(self, now: float) -> bool:
        """All slices of the proposal at hand are staged: compute the state that it names."""
        current = self._state.round
        content = self._proposals.target()
        if content is None or current.verifying != NO_HASH or now < current.verify_after:
            return False
        name = manifest_hash(content.manifest)
        if name in current.verified or self.missing():
            return False
        current.verifying = name
        current.reducing.clear()
        current.fetching.clear()
        self._state.out.append(Verify(content))
        return True

    def staged(self, key: Key, hashes: bytes, now: float) -> None:
        """The tiles of a slice are on disk."""
        self._state.round.fetching.pop(key, None)
        wanted = self.missing().get(key)
        if wanted is not None and wanted.hashes == hashes:
            self._others.withholding_peers.discard(wanted.first)
        self.stage(key, hashes, now)
        if self._note_progress(now):
            self._liveness.failing_since = None

    def bytes_moved(self, now: float) -> None:
        """Some of what is fetched has come."""
        self._state.round.heavier_at = now
        if self._note_progress(now):
            self._state.round.moved += 1

    def _note_progress(self, now: float) -> bool:
        """Whether it is any: what did not come out even from fresh tiles could be fetched for ever."""
        target, current = self._proposals.target(), self._state.round
        in_vain = current.failed_builds if target is None else current.unfit.get(manifest_hash(target.manifest), 0)
        is_new = in_vain <= 1
        if is_new:
            self._state.note_progress(now)
        return is_new

    def staging_failed(self, key: Key, now: float) -> None:
        """Our own disk could not take the tiles: they are fetched again with the next heartbeat."""
        self._state.round.fetching.pop(key, None)
        self._liveness.failed(now)
        self._state.round.failed.add(key)

    def fetch_failed(self, key: Key, now: float, is_unfit: bool = False) -> None:
        """No holder could provide the tiles: forgets the report of them until somebody repeats it.

        Only peers that have the tiles repeat a report, so that of a lost reducer is gone for good and its slice is
        reduced again; likewise if a reducer repeats a report but never serves the tiles. A report of tiles other than a
        proposal wants is kept, since hearing it again would count as progress. A reducer whose tiles are unfit has had
        its turn in this round, whoever says that they are staged elsewhere; and nobody votes for a state with them.
        """
        current = self._state.round
        tried = current.fetching.pop(key, None)
        current.failed.add(key)
        if is_unfit and tried is not None:
            self._proposals.refuse_with(key, tried)
        else:  # the other is no fault of our own
            self._liveness.failed(now)
        index = self._state.round.index_of.get(key)
        report = None if index is None else current.reports.get(index)
        if index is not None and report is not None and tried == b"".join(report.value.wire_hashes):
            del current.reports[index]
            if is_unfit:
                current.empty_reports.setdefault(index, {})[report.author] = report
            else:
                self._note_empty_report(index, report)

    def unstaged(self, keys: Iterable[Key], now: float) -> None:
        """These slices are not on disk any more and nobody gave them: they are fetched, or done, again."""
        current = self._state.round
        for key in keys:
            current.staged.pop(key, None)
        if current.building is not None:
            current.failed_builds += 1
            self._liveness.failed(now)
        current.building = current.outcome = None

    def verified(self, manifest: Hash, now: float) -> None:
        """The state that `manifest` names is on disk here, with equal roots."""
        self._state.round.verified.add(manifest)
        self._state.round.verifying = NO_HASH
        self._liveness.failing_since = None
        self._state.note_progress(now)

    def verify_failed(self, now: float) -> None:
        """The state could not be brought to the proposed root: tried again later, the second time from fresh tiles."""
        current = self._state.round
        name, current.verifying = current.verifying, NO_HASH
        self._liveness.failed(now)
        current.verify_after = now + self._pace.heartbeat_seconds
        current.unfit[name] = current.unfit.get(name, 0) + 1
        content = self._proposals.named(name)
        self._proposals.note_failed_staging(content)
        if current.unfit[name] > 1 and content is not None:
            for piece in content.manifest.slices:
                current.staged.pop(piece.key, None)

    def state_lost(self, state_roots: Collection[Hash]) -> None:
        """What is not whole on disk any more is made again before anybody votes for it."""
        verified = self._state.round.verified
        for name in list(verified):
            content = self._proposals.named(name)
            if content is None or content.manifest.state_root in state_roots:
                verified.discard(name)
