"""What a leader may leave out: who votes turns down a first proposal that leaves out more than chance explains.

A manifest follows from what others signed, and whose words a leader has heard is up to it. So each elector compares
with what it heard itself, well before: who was READY when the plan was made, who was there all the while, which blocks
are whole on its disk. Those that are lost meanwhile do not count, nor does what came so late that the leader may have
missed it. It is an opinion, no two electors hear the same: it is asked of first proposals alone, and only until more
leaders were turned down than may lie, since one of them was honest then; whether electors are left out, until all have
led (see `tendermint`). Only runs in which electors may lie ask (`swarm.faults: byzantine`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from spes_p2p.consensus.child_checks import due_blocks
from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.content import Content, joined_hashes
from spes_p2p.consensus.electorate import Faults
from spes_p2p.consensus.manifest import Contribution, Slice, manifest_hash
from spes_p2p.consensus.members import Members
from spes_p2p.consensus.membership import Member, trainers, weightless
from spes_p2p.consensus.messages import Status, plan_hash
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.slices import columns_of_few
from spes_p2p.consensus.timing import NEVER
from spes_p2p.consensus.trials import Trials
from spes_p2p.consensus.weights import weighed
from spes_p2p.ids import PeerId

MOST_LEFT_OUT = 0.1
"""Of the tokens that were READY in time."""
LEAST_COUNTED = 0.3
"""Of those who live and trained the round before, by what it counted of them: no plan is made before they stop."""
LEAST_ROUND = 0.75
"""Of the time that rounds took: who still trains does not stop for a leader that closes a round before."""
LEADERS_LEAST_ROUND = 0.8
"""The same for the leader: two peers do not measure the same time."""
NEVER_STAGED = float("inf")


@dataclass(eq=False)
class Fairness(Part):
    """Compares plans and proposals with what this peer heard."""

    _contacts: Contacts
    _members: Members
    _trials: Trials

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_asked = self._state.rules.faults is Faults.BYZANTINE

    # ---------------------------------------------------------------- what is asked

    def is_complete(self, content: Content, now: float) -> bool:
        """Whether a manifest leaves nobody and nothing out that we would miss, and has no column that we find harmful.

        Whom it leaves out is noted: others hear of them from us.
        """
        if self._trials.has_harmful(content):
            return False
        if not self._is_asked:
            return True
        current = self._state.round
        dropped = set(self._dropped(content, now))
        current.missed |= dropped
        if not self._state.round.vote.ballot < self._state.electorate.believed:
            return not dropped & self._state.electors.keys()
        is_planned = self._is_of_our_plan(content)
        plan = current.plan.value.roster if current.plan is not None and is_planned else content.manifest.roster
        if current.plan is None:
            self.expect(now if current.closed_at is None else current.closed_at, now)
        is_counted = self._counts_enough({entry.peer for entry in plan}, now)
        names_dead = any(self._is_gone(member, content) for member in content.manifest.members)
        is_fair = is_counted and not dropped and not names_dead and self._keeps_blocks(content, is_planned)
        if not is_fair:
            current.unfair.add(manifest_hash(content.manifest))
        return is_fair

    def must_plan_again(self, now: float) -> bool:
        """Whether the plan of an earlier ballot leaves out so much that the next leader makes another."""
        current = self._state.round
        if not self._is_asked or current.plan is None or current.plan.value.ballot >= current.vote.ballot:
            return False
        return not self._counts_enough({entry.peer for entry in current.plan.value.roster}, now)

    # ---------------------------------------------------------------- when a round closes

    def may_stop(self, now: float) -> bool:
        """Whether we stop training for a leader that closes the round.

        Not while it is much shorter than the last ones: it would have little to count. That costs no more time than
        rounds take anyway, and an honest leader waits for longer.
        """
        return self._state.round.work.ready or self.is_long_enough(LEAST_ROUND, now)

    def is_long_enough(self, share: float, now: float) -> bool:
        """Whether a round has lasted for this share of what rounds took, or somebody has a reason to end it.

        Before anybody knows what they take, in a run's first round, half of the electors who train must be READY.
        """
        current, learnt = self._state.round, self._pace.round_seconds
        if not self._is_asked:
            return True
        trained = max(now - current.started_at, current.work.seconds)
        if (learnt or self._state.tip.round) and trained >= share * learnt:
            return True
        here = self._members.members_here(now)
        if self.leavers(here):
            return True
        training = {member.peer for member in trainers(self._state.tip.members)} & self._state.electors.keys()
        ready = [status.work.ready for status in here if status.peer in training]
        return 2 * sum(ready) >= len(ready)

    def leavers(self, here: Iterable[Status]) -> list[Status]:
        """Of members those who leave and are READY: a round ends for them.

        Where some may lie, only for who votes or whose work counts, since of other keys anybody may bring many to leave
        one by one; and once for each, since who says so in another round has not left.
        """
        leaving = [status for status in here if status.work.ready and status.intent.leaving]
        if not self._is_asked or not leaving:
            return leaving
        members, head = self._state.tip.members, self._state.tip_hash
        known = {member.peer for member in trainers(members)} - weightless(members) | self._state.electors.keys()
        return [s for s in leaving if s.peer in known and self._others.leaving_since.get(s.peer, head) == head]

    # ---------------------------------------------------------------- whose work is counted

    def expect(self, planned_at: float, now: float) -> None:
        """Notes whom a plan made at a time must count: as the plan comes, since who is READY later may not be in it."""
        if not self._is_asked:
            return
        current, beat = self._state.round, self._pace.heartbeat_seconds
        closed_at = planned_at if current.closed_at is None else current.closed_at
        is_early = planned_at < closed_at + beat  # a leader that waits for somebody waits for two heartbeats at least
        since = current.here_since if is_early else current.ready_since
        here = [status for status in self._members.trainers_here(now) if status.work.tokens or not status.work.ready]
        in_time = {peer for peer, at in since.items() if at <= planned_at - beat} | {self._me}
        current.owed = frozenset(status.peer for status in here if status.peer in in_time)
        counted = {entry.peer: entry.tokens for entry in self._weighed(self._state.tip.roster)}
        current.expected = {peer: tokens for peer, tokens in counted.items() if self._may_train(peer)}

    def _may_train(self, peer: PeerId) -> bool:
        """Whether it stands on our tip, or is about to, and has not come to an end with nothing."""
        if peer == self._me:
            return True
        contact = self._others.contacts.get(peer)
        if contact is None or contact.status.head not in (self._state.tip_hash, self._state.tip.parent):
            return False
        work = contact.status.work
        return contact.status.head == self._state.tip.parent or not work.ready or work.tokens > 0

    def _counts_enough(self, roster: Collection[PeerId], now: float) -> bool:
        current = self._state.round
        said = {entry.peer: entry for entry in current.ready}
        ready = [said[peer] for peer in current.owed if peer in said and self._is_well_heard(peer, now)]
        owed = {entry.peer: entry.tokens for entry in self._weighed(sorted(ready))}
        missed = {peer for peer in owed if peer not in roster}
        if sum(owed[peer] for peer in missed) > MOST_LEFT_OUT * sum(owed.values()):
            current.missed |= missed
            return False
        expected = {peer: tokens for peer, tokens in current.expected.items() if self._is_well_heard(peer, now)}
        counted = sum(tokens for peer, tokens in expected.items() if peer in roster)
        return counted >= LEAST_COUNTED * sum(expected.values())

    def _weighed(self, roster: Sequence[Contribution]) -> tuple[Contribution, ...]:
        """Nobody owes anything to those whose work does not count as yet."""
        return weighed(roster, capped=True, members=self._state.tip.members)

    def _is_well_heard(self, peer: PeerId, now: float) -> bool:
        """Whether it was heard so lately that the leader cannot have given it up yet."""
        if peer == self._me:
            return True
        contact = self._others.contacts.get(peer)
        is_fresh = contact is not None and now - contact.at <= self._pace.suspect_seconds / 2
        return is_fresh and peer not in self._others.refused_dial

    # ---------------------------------------------------------------- who takes part next

    def _dropped(self, content: Content, now: float) -> Iterator[PeerId]:
        """Members that were there well before, and are not named; not those whose own newer words say why."""
        manifest, said = content.manifest, {signed.author: signed.value for signed in content.statements.declarations}
        admission = self._rules.admission(manifest.roll, manifest.banned)
        named = {member.peer for member in manifest.members}
        since = self._proposed_at(content) - 2 * self._pace.heartbeat_seconds
        for member in self._state.tip.members:
            contact = self._others.contacts.get(member.peer)
            if contact is None or member.peer in named or admission.is_banned(member.peer):
                continue
            stays = contact.status.incarnation == member.incarnation and not contact.status.intent.leaving
            heard_since = self._others.heard_since.get(member.peer, contact.at)
            if not stays or heard_since > since or not self._is_well_heard(member.peer, now):
                continue
            words = said.get(member.peer)
            if words is None or words.mark < contact.status.mark:
                yield member.peer

    def _is_gone(self, member: Member, content: Content) -> bool:
        """Whether a manifest names somebody by old words of it whom nobody can have heard for long."""
        contact = self._others.contacts.get(member.peer)
        if contact is None or contact.at == NEVER or contact.status.incarnation != member.incarnation:
            return False
        silence = self._proposed_at(content) - contact.at
        words = {signed.author: signed.value for signed in content.statements.declarations}.get(member.peer)
        is_old = words is not None and words.mark <= contact.status.mark
        return is_old and silence > self._pace.suspect_seconds + self._pace.deadline_seconds(0)

    def _proposed_at(self, content: Content) -> float:
        current = self._state.round
        return current.contents_since.get(manifest_hash(content.manifest), current.started_at)

    # ---------------------------------------------------------------- what is handed out

    def _is_of_our_plan(self, content: Content) -> bool:
        plan = self._state.round.plan
        name = None if plan is None else plan_hash(plan.value)
        return all(signed.value.plan == name for signed in content.statements.reports)

    def _keeps_blocks(self, content: Content, is_planned: bool) -> bool:
        """Whether it has all blocks that it could have, but for what somebody may find harmful.

        Those of our plan that were whole on our disk well before; of another plan, those that are due.
        """
        manifest = content.manifest
        kept = {piece.block for piece in manifest.slices}
        if is_planned:
            whole = [(piece, hashes) for piece, hashes in self._whole_blocks(content) if piece.block not in kept]
            lost = frozenset(piece.block for piece, _ in whole) - self._trials.harmful_blocks(whole)
            opinions = frozenset(column.block for column in columns_of_few(whole))
        else:
            lost = due_blocks(self._rules, self._state.tip, [entry.peer for entry in manifest.roster]) - kept
            opinions = lost - {0}
        return lost <= opinions if self._rules.trial_sequences else not lost

    def _whole_blocks(self, content: Content) -> list[tuple[Slice, bytes]]:
        """Slices of our plan with the hashes of their tiles, of blocks that were staged here in time as a whole."""
        current = self._state.round
        proposed_at, beat = self._proposed_at(content), self._pace.heartbeat_seconds
        in_time = max(proposed_at - beat, min(proposed_at, current.plan_at + 2 * beat))  # who waits waits for longer
        pieces = () if current.plan is None else current.plan.value.slices
        staged = {
            index: current.reports[index]
            for index, piece in enumerate(pieces)
            if index in current.reports and current.staged_since.get(piece.key, NEVER_STAGED) <= in_time
        }
        accused = {one.value.report.author for some in current.accusations.values() for one in some.values()}
        torn = {piece.block for index, piece in enumerate(pieces) if index not in staged}
        torn |= {signed.value.piece.block for signed in staged.values() if signed.author in accused}  # others bar it
        chosen = [signed for signed in staged.values() if signed.value.piece.block not in torn]
        return list(zip((signed.value.piece for signed in chosen), joined_hashes(chosen), strict=True))
