"""Takes in what peers say of themselves, and what others remember of this one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from spes_p2p.consensus.bounds import is_sane_intent, is_sane_work
from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.electorate import Faults
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.membership import MAX_ELECTORS
from spes_p2p.consensus.messages import Signed, Status, declared, plan_hash
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.place import Place, claimed_place, place_of, roll_number
from spes_p2p.consensus.round_plan import RoundPlan
from spes_p2p.consensus.state import Contact
from spes_p2p.consensus.timing import NEVER, Moment
from spes_p2p.consensus.vote_record import ballot_of
from spes_p2p.consensus.voting import Voting
from spes_p2p.ids import NO_HASH, PeerId

MOST_LACKED = 8
"""Contents that somebody may ask for at once."""
MOST_MORE = 2
"""Times as many as vote on our head, or are members, may be so on another."""
MAX_WAIT_EXTENSIONS = 16
"""Most deadlines that a round waits because others report moving bytes, while nothing arrives here."""


@dataclass(eq=False)
class Statuses(Part):
    """Keeps the newest status of each peer."""

    _contacts: Contacts
    _leadership: Leadership
    _round_plan: RoundPlan
    _voting: Voting

    def hear(self, signed: Signed[Status], sender: PeerId, heard_at: Moment, now: float) -> bool:
        """Takes in a status; whether the rules should look at it. `heard_at` is `NEVER` for words that may be old."""
        status = signed.value
        peer = status.peer
        if signed.author != peer or status.fingerprint != self._rules.fingerprint or not self._is_sane(status):
            return False
        self._round_plan.hear_ready(declared(signed))
        if peer == self._me:
            return self._hear_of_ourselves(status)
        known = self._others.contacts.get(peer)
        if known is None:
            if not self._contacts.has_room_for(peer, now):
                return False
            self._others.contacts[peer] = Contact(signed, heard_at, now if sender == peer else NEVER)
            self._heard_from(status, now)
            self._others.reply_due.add(peer)
            return True
        last = known.status
        if status.mark <= last.mark:
            known.is_old = sender == peer and status.mark < last.mark
            is_fresh_now = status.mark == last.mark and known.at == NEVER and heard_at > NEVER
            if is_fresh_now:
                known.at = heard_at
            return is_fresh_now
        known.is_old = False
        before = (known.furthest or known.signed).value
        is_further = status.incarnation != before.incarnation or _binding(status) >= _binding(before)
        known.furthest = None if is_further else known.furthest or known.signed
        was_alive = self._contacts.alive(peer, now)
        stirs = self._needs_evaluation(last, status)
        if sender == peer:
            self._pace.observe_gap(now - known.direct_at)
            known.direct_at = now
        known.signed, known.at = signed, max(known.at, heard_at)
        self._heard_from(status, now)
        if (
            status.moved > last.moved
            and status.head == last.head == self._state.round.tip_hash
            and self._takes_part(status)
        ):
            self._moved_at(peer, now)
        is_new = status.lacks and status.lacks != last.lacks
        if status.plan != last.plan or status.head != last.head or is_new:
            self._others.reply_due.add(peer)
        return stirs or (not was_alive and self._contacts.alive(peer, now))

    def _needs_evaluation(self, last: Status, status: Status) -> bool:
        """Whether the rules need to look at once. Most of it concerns the leader; the rest waits for a tick."""
        current, ballots, before = self._state.round, status.ballots, last.ballots
        if (status.incarnation, status.intent) != (last.incarnation, last.intent):
            return True
        if status.head != last.head and claimed_place(status) > place_of(current.tip):
            return True
        if self._leadership.leader_of(current.vote.ballot) == self._me:
            return status.head != last.head or status.work.ready != last.work.ready or ballots != before
        return ballots.closing != before.closing and not current.close_asked

    def _heard_from(self, status: Status, now: float) -> None:
        peer = status.peer
        self._others.refused_dial.discard(peer)
        if status.work.ready and self._rules.faults is Faults.CRASH:
            self._others.kept_waiting.discard(peer)

    def _hear_of_ourselves(self, status: Status) -> bool:
        """What an earlier life of ours has said, from somebody who remembers it.

        It may be newer than what we say, where the clock was set back; or than what we know, where the disk was.
        """
        if status.life == self._own.life or status.incarnation < self._own.incarnation:
            return False
        if status.incarnation > self._own.incarnation:
            self._voting.forget_record(status.incarnation)
            return True
        self._own.sequence = max(self._own.sequence, status.sequence)
        ballots, record = status.ballots, self._state.record
        knows = ballots.prevoted <= ballot_of(record.prevote) and ballots.precommitted <= ballot_of(record.precommit)
        tip = self._state.tip
        was_higher = claimed_place(status) > place_of(tip) and status.roll >= roll_number(tip)
        if was_higher or (status.head == self._state.tip_hash and not knows):
            self._voting.forget_record(self._own.incarnation)
        return True

    def _takes_part(self, status: Status) -> bool:
        """Whether a round may wait for bytes that move at this peer: newcomers and archives take their own time."""
        return any(m.peer == status.peer and m.incarnation == status.incarnation for m in self._state.tip.members)

    def _moved_at(self, peer: PeerId, now: float) -> None:
        """Notes that bytes move at a peer, which extends the deadlines as long as something comes of it."""
        current = self._state.round
        if peer in self._others.moving_in_vain:
            return
        if current.extended_wait_seconds > MAX_WAIT_EXTENSIONS * self._pace.deadline_seconds(0):
            self._others.moving_in_vain.add(peer)
            self._state.notify("late", "it kept reporting transfers that led to nothing", peer)
            return
        if peer in current.seen:
            current.seen[peer] = now
        if current.decided is None:
            current.extended_wait_seconds += now - current.progress_at
            current.progress_at = now

    def _is_sane(self, status: Status) -> bool:
        """Nothing in it is longer or larger than it can be."""
        return (
            {len(name) for name in (status.head, status.plan, *status.lacks)} == {len(NO_HASH)}
            and len(status.lacks) <= MOST_LACKED
            and max(len(status.reports), len(status.staged)) <= self._most_slices(status)
            and self._may_name(status, status.unheard, self._state.electors)
            and self._may_name(status, status.silent, [member.peer for member in self._state.tip.members])
            and min(status.counted, status.roll) >= 0
            and status.round >= -1  # before genesis
            and is_sane_work(status.work)
            and is_sane_intent(status.intent, self._rules.num_columns)
        )

    def _most_slices(self, status: Status) -> int:
        """Of the plan that it names, or of any where we know another: a slice has a tile at least."""
        plan = self._state.round.plan
        is_ours = plan is not None and status.plan == plan_hash(plan.value)
        return len(plan.value.slices) if plan is not None and is_ours else sum(self._rules.block_tiles)

    def _may_name(self, status: Status, named: Sequence[PeerId], known: Collection[PeerId]) -> bool:
        """Whether those that it does not hear may be who votes, or is a member, where it stands; we know ours."""
        if status.head == self._state.tip_hash:
            return len(named) == len({*named}) and {*named} <= {*known}
        return len(named) <= max(MAX_ELECTORS, MOST_MORE * len(known))


def _binding(status: Status) -> tuple[Place, int, int]:
    return claimed_place(status), status.ballots.prevoted, status.ballots.precommitted
