"""Who leads the vote on the next manifest, and at which ballot somebody may act. Decides nothing.

Part of the vote: another vote has another way to choose leaders."""

from __future__ import annotations

from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.messages import (
    Ballots,
    Status,
)
from spes_p2p.consensus.state import (
    MOST_TURNS,
    Heard,
    State,
)
from spes_p2p.ids import PeerId


class Leadership:
    """Questions about ballots, promises and leaders."""

    def __init__(self, state: State, contacts: Contacts) -> None:
        self._state = state
        self._liveness = state.liveness
        self._own = state.own
        self._me = state.me
        self._contacts = contacts

    def leader_of(self, heard: Heard, ballot: int) -> PeerId:
        order = self._state.round.order
        if heard:
            return next((peer for peer in order if peer in heard), PeerId(""))
        return order[ballot % len(order)] if order else PeerId("")

    def leading(self) -> bool:
        """As an elector, may we act as leader: of a degraded set, of ballot 0, or of one that a majority promised?"""
        if self._state.degraded_set:
            return self.leader_of(self._state.degraded_set, 0) == self._me
        ballot = self._state.round.view
        if self.leader_of((), ballot) != self._me or self._own.record.promised != ballot:
            return False
        return ballot == 0 or self._contacts.is_majority(len(self.promisers(ballot)))

    def own_ballots(self) -> Ballots:
        record, current = self._own.record, self._state.round
        return Ballots(current.prepare, record.promised, record.accepted_ballot, record.accepted_hash, current.closing)

    def promisers(self, ballot: int) -> list[Ballots]:
        """Ballots of the electors that promised exactly `ballot`, ours first."""
        mine = [self.own_ballots()] if self._own.record.promised == ballot else []
        return mine + [s.ballots for s in self._contacts.electors_here() if s.ballots.promised == ballot]

    def _promised(self) -> list[int]:
        """The highest ballot that each elector on our head has promised, ours among them."""
        mine = [self._own.record.promised] if self._state.is_elector() else []
        return mine + [status.ballots.promised for status in self._contacts.electors_here()]

    def _is_reached(self, ballot: int) -> bool:
        """Whether a majority of the electors has promised `ballot` or a later one, as far as we heard."""
        return self._contacts.is_majority(sum(promised >= ballot for promised in self._promised()))

    def may_act(self, ballot: int) -> bool:
        """Whether somebody may plan or propose at `ballot`: the first leader, or one that a majority promised.

        A word of that may come later than the plan; then both come again.
        """
        return ballot == 0 or (ballot > 0 and self._is_reached(ballot))

    def is_near(self, ballot: int) -> bool:
        """Whether a ballot can come about by turns: from our view, or the one that a majority has reached."""
        most = MOST_TURNS * len(self._state.electors)
        return 0 <= ballot <= self._state.round.view + most or (ballot > most and self._is_reached(ballot - most))

    def _may_close(self, status: Status) -> bool:
        """Whether an elector says that it closes the round, and may: it leads the ballot of which it says so."""
        ballot = status.ballots.closing
        if ballot < 0:
            return False
        if self._state.degraded_set:
            return status.peer == self.leader_of(self._state.degraded_set, 0)
        return status.peer == self.leader_of((), ballot) and (ballot == 0 or self._is_reached(ballot))

    def is_closing(self) -> bool:
        current = self._state.round
        if current.closing >= 0 or current.plan is not None or current.proposals:
            return True
        return any(self._may_close(status) for status in self._contacts.electors_here())

    def newest_ballot(self) -> int:
        """The highest ballot of which we know an ordinary proposal that may be made; -1 for none."""
        ballots = (ballot for heard, ballot in self._state.round.proposals if not heard and self.may_act(ballot))
        return max(ballots, default=-1)

    def has_leader(self) -> bool:
        """Whether the leader of our view may act: nobody needs to be elected for ballot 0."""
        view = self._state.round.view
        return view == 0 or self._contacts.is_majority(len(self.promisers(view)))

    def asking(self) -> list[tuple[int, PeerId]]:
        """(ballot, candidate) of those who ask for promises, the highest first."""
        asked = [(s.ballots.prepare, s.peer) for s in self._contacts.electors_here() if s.ballots.prepare >= 0]
        return sorted((pair for pair in asked if self.is_near(pair[0])), reverse=True)

    def can_vote(self) -> bool:
        """Whether we are an elector that can write its votes, and has asked what became of the run."""
        return self._state.is_elector() and self._own.intent.can_vote and self._liveness.asking_since is None
