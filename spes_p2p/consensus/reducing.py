"""From a plan to a new state: whose turn it is to reduce a slice, and what the leader builds of the slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spes_p2p.consensus.actions import Build, Reduce
from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.manifest import Manifest, Slice, manifest_hash
from spes_p2p.consensus.messages import LOST, Report, Signed, plan_hash
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.proposals import Proposals
from spes_p2p.consensus.rules import Outcome, merge_alpha_for, next_step
from spes_p2p.consensus.slices import reducer_order
from spes_p2p.consensus.staging import Staging
from spes_p2p.consensus.statements import counted
from spes_p2p.ids import NO_HASH, PeerId

SURE = 2
"""How many reducers must find nobody's values fit before a slice is given up (or all, if fewer can be asked)."""


@dataclass(eq=False)
class Reducing(Part):
    """Reduces slices and builds the new state."""

    _contacts: Contacts
    _proposals: Proposals
    _staging: Staging

    def reduce(self, now: float) -> bool:
        """The first peer in a slice's order that is able to reduces it."""
        current = self._state.round
        if current.plan is None or self._proposals.stands_by_a_state():
            return False
        plan = current.plan
        started = False
        for index in current.mine:
            if index in current.reports or index in current.reducing:
                continue
            if self.acting_reducer(index, plan.value.slices[index], now) == self._me:
                current.reducing.add(index)
                self._state.out.append(Reduce(plan, index))
                started = True
        return started

    def build(self, now: float) -> bool:
        """If we lead and all slices that can still be reduced are staged, asks for the new state to be computed."""
        current = self._state.round
        target = self._proposals.target()
        has_another = target is not None and not self._proposals.is_hopeless(target)
        if current.plan is None or current.building or has_another:
            return False
        if self._proposals.verified_before() is not None:
            return False
        chosen = self._resolved_slices(now)
        if chosen is None:
            return False
        pieces = (signed.value.piece for signed in chosen)
        roster = counted(self._rules, current.plan.value.roster, pieces)
        step = next_step(current.tip.step, roster, self._rules.admission_of(current.tip))
        alpha = merge_alpha_for(self._rules, current.tip.step, step)
        current.reducing.clear()
        current.building = Build(roster, chosen, alpha)
        self._state.out.append(current.building)
        return True

    def acting_reducer(self, index: int, piece: Slice, now: float) -> PeerId | None:
        """Whose turn it is: the first in order that may do it and whose time is not over; None when all had theirs."""
        current, turn_ends, tries = self._state.round, self._state.round.plan_at, 0
        voids = current.empty_reports.get(index)
        if voids and sum(_saw_all(void.value, piece) for void in voids.values()) >= SURE:
            return None
        for peer in reducer_order(piece, self._state.electors):
            if (voids and peer in voids) or not self._may_reduce(peer, now):
                continue
            if peer == self._me:
                return peer
            turn_ends = max(turn_ends, current.seen.setdefault(peer, current.plan_at)) + self._pace.slice_seconds(tries)
            if now <= turn_ends:
                return peer
            tries += 1
        return None

    def _may_reduce(self, peer: PeerId, now: float) -> bool:
        """Alive, standing on the plan's parent, with room on its disk."""
        if peer == self._me:
            return self._own.intent.can_vote
        contact = self._others.contacts.get(peer)
        if contact is None or not self._contacts.alive(peer, now):
            return False
        return contact.status.head == self._state.round.tip_hash and contact.status.intent.can_vote

    def _resolved_slices(self, now: float) -> tuple[Signed[Report], ...] | None:
        """Reports of the slices once every one is staged or beyond hope; a block is whole or not at all."""
        current = self._state.round
        assert current.plan is not None
        if self._staging.missing():
            return None
        lost_blocks: set[int] = set()
        slices = current.plan.value.slices
        for index, piece in enumerate(slices):
            if index not in current.reports:
                if self.acting_reducer(index, piece, now) is not None:
                    return None
                lost_blocks.add(piece.block)
        found = [current.reports[index] for index in sorted(current.reports)]
        return tuple(signed for signed in found if signed.value.piece.block not in lost_blocks)

    def reduced(self, report: Report, now: float) -> None:
        """A slice was reduced here and its tiles are staged; without contributors: nobody's values were fit."""
        current = self._state.round
        if current.plan is not None and report.plan == plan_hash(current.plan.value):
            current.reducing.discard(report.index)
            signed = self._state.identity.sealer.seal(report)
            if report.contributors:
                current.reports[report.index] = signed
                key = current.plan.value.slices[report.index].key
                self._staging.stage(key, b"".join(report.wire_hashes), now)
            else:
                current.empty_reports.setdefault(report.index, {})[self._me] = signed
            self._own.has_news = True
            self._state.note_progress(now)

    def built(self, build: Build, outcome: Outcome, now: float) -> None:
        """The new state was computed here from `build`'s slices."""
        if build.makes_the_same(self._state.round.building):
            self._state.round.outcome = (build, outcome)
            self._state.note_progress(now)

    def handed_out(self, child: Manifest) -> tuple[tuple[Slice, ...], tuple[bytes, ...]]:
        """Slices of a committed child of our tip with the hashes of their tiles, as far as we know: ours at least."""
        content = self._proposals.named(manifest_hash(child))
        if content is not None and content.manifest == child and _is_whole(child.slices, content.wire_hashes):
            return child.slices, content.wire_hashes
        plan, pairs = self._state.round.plan, []
        for report in self._state.round.reports.values():
            if plan is None or report.author != self._me or not set(child.roster) <= set(plan.value.roster):
                continue
            if report.value.piece in child.slices:
                pairs.append((report.value.piece, b"".join(report.value.wire_hashes)))
        return tuple(piece for piece, _ in pairs), tuple(hashes for _, hashes in pairs)


def _is_whole(slices: Sequence[Slice], hashes: Sequence[bytes]) -> bool:
    return all(len(joined) == len(NO_HASH) * piece.tiles for piece, joined in zip(slices, hashes, strict=True))


def _saw_all(void: Report, piece: Slice) -> bool:
    """Whether the reducer had everybody's values and none was fit."""
    reasons = dict(void.left_out)
    return all(reasons.get(peer, LOST) != LOST for peer in piece.contributors)
