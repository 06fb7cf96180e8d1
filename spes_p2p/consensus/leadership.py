"""Who leads the vote on the next manifest, whether it has failed, and at which ballot somebody may act. Only asks."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.electorate import NIL, Electorate
from spes_p2p.consensus.membership import electors
from spes_p2p.consensus.messages import Ballots, Status, Votes
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.place import claimed_place, place_of
from spes_p2p.consensus.state import MOST_TURNS
from spes_p2p.consensus.vote_events import Step
from spes_p2p.consensus.vote_record import ballot_of
from spes_p2p.ids import PeerId


@dataclass(eq=False)
class Leadership(Part):
    """Questions about ballots and leaders."""

    _contacts: Contacts

    def leader_of(self, ballot: int) -> PeerId:
        return self._state.electorate.leader(ballot)

    def leading(self) -> bool:
        """As an elector, may we act as leader of our ballot, where we have not given it up?"""
        vote = self._state.round.vote
        return vote.step is Step.PROPOSE and self.leader_of(vote.ballot) == self._me

    def own_ballots(self) -> Ballots:
        vote = self._state.round.vote
        prevoted, precommitted = ballot_of(vote.record.prevote), ballot_of(vote.record.precommit)
        return Ballots(prevoted, precommitted, vote.record.valid_ballot, self._state.round.closing)

    def ballot(self) -> int:
        """Ours, or that of the others where we only look on."""
        vote = self._state.round.vote
        return max(vote.ballot, vote.heard.reached())

    def may_act(self, ballot: int) -> bool:
        """Whether somebody may plan or close at `ballot`: a quorum is done with the one before, or somebody is there.

        A word of that may come later than the plan; then both come again.
        """
        heard = self._state.round.vote.heard
        is_begun = ballot <= heard.reached() or heard.passed(ballot - 1, Step.PRECOMMIT)
        return ballot == 0 or (ballot > 0 and is_begun)

    def is_near(self, ballot: int) -> bool:
        """Whether a ballot can come about by turns from ours."""
        return 0 <= ballot <= self.ballot() + MOST_TURNS * len(self._state.electors)

    def near(self, votes: Votes) -> Votes:
        """Without words of ballots that turns do not lead to; a polka speaks for a quorum, whatever its ballot."""
        prevote, precommit, proposal = votes.prevote, votes.precommit, votes.proposal
        return Votes(
            prevote if prevote and self.is_near(prevote.value.ballot) else None,
            precommit if precommit and self.is_near(precommit.value.ballot) else None,
            proposal if proposal and self.is_near(proposal.value.ballot) else None,
            votes.polka,
        )

    def _may_close(self, status: Status) -> bool:
        """Whether an elector says that it closes the round, and may: it leads the ballot of which it says so."""
        ballot = status.ballots.closing
        if ballot < 0:
            return False
        return status.peer == self.leader_of(ballot) and self.may_act(ballot)

    def is_closing(self) -> bool:
        current = self._state.round
        proposals = (signed.value.ballot for signed in current.vote.heard.proposals.values())
        is_under_way = current.plan is not None or any(map(self.may_act, proposals))
        if current.closing >= 0 or is_under_way:
            return True
        return any(self._may_close(status) for status in self._contacts.electors_here())

    def proposed(self) -> int:
        """The ballot that we are in, where we know its proposal; else -1."""
        heard = self._state.round.vote.heard
        return ballot_of(heard.proposal_at(self.ballot()))

    def can_vote(self) -> bool:
        """Whether we are an elector that can write its votes, has asked what became of the run, and goes not over."""
        is_able = self._state.is_elector() and self._own.intent.can_vote
        return is_able and self._liveness.asking_since is None and not self._yields()

    def _yields(self) -> bool:
        """Whether a heavier history is coming here whose quorum is heard: two that both grow might never meet."""
        current, now = self._state.round, self._state.last_event
        if current.heavier is None or now - current.heavier_at > self._state.pace.deadline_seconds(0):
            return False
        place, chosen = place_of(current.heavier), electors(current.heavier.members)
        there = {s.peer: s.incarnation for s in self._contacts.living(now) if claimed_place(s) >= place}
        voters = tuple(member.peer for member in chosen)
        heard = sum(there.get(member.peer) == member.incarnation for member in chosen)
        return heard >= Electorate(voters, self._rules.faults).quorum

    def has_failed(self, now: float) -> bool:
        """The leader of our ballot is lost or has given up, or the round should move and does not."""
        current, ballot = self._state.round, self._state.round.vote.ballot
        if self._is_out(self.leader_of(ballot), now):
            return True
        deadline = self._state.pace.deadline_seconds(ballot)
        if current.close_asked:
            return now - current.progress_at > deadline
        if current.ready_at is None:
            return False
        patience = 1.5 * max(self._state.pace.round_seconds, current.work.seconds)
        return now - max(current.ready_at + patience, current.progress_at) > deadline

    def _is_out(self, leader: PeerId, now: float) -> bool:
        """Whether the leader of our ballot can not lead: silent, given up, elsewhere, or without its own proposal."""
        current, vote = self._state.round, self._state.round.vote
        proposal = vote.heard.proposal_at(vote.ballot)
        if leader == self._me:
            waited = now - current.started_at > 2 * self._state.pace.heartbeat_seconds
            return proposal is not None and waited and proposal.value.value not in current.contents
        prevote = vote.heard.prevotes.get(leader)
        if prevote is not None and (prevote.value.ballot, prevote.value.value) == (vote.ballot, NIL):
            return True
        if self._contacts.is_silent(leader, now):
            return True
        contact = self._state.others.contacts.get(leader)
        if contact is None or contact.status.head == current.tip_hash:
            return False
        is_higher = claimed_place(contact.status) > place_of(current.tip)
        leads_to = is_higher and (current.following or current.adopting)
        return not leads_to and now - current.started_at > self._state.pace.deadline_seconds(vote.ballot)
