"""What a peer does if it has heard no live quorum for long: makes degraded children, and accepts those of others.

The guard stands over both: a live quorum is never overruled (`liveness` measures it, `forks` chooses between
histories)."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.consensus import vote_record
from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.electorate import Faults
from spes_p2p.consensus.forks import ForkContext, ForkDecision, Line, best, choose, has_quorum
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.members import Members
from spes_p2p.consensus.messages import DEGRADED, Commit, DegradedProposal, DegradedVote, Signed
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.proposals import Proposals
from spes_p2p.consensus.state import Heard
from spes_p2p.consensus.voting import Voting
from spes_p2p.ids import NO_HASH, short


@dataclass(eq=False)
class Degraded(Part):
    """Keeps the guard, makes degraded children, takes those of others."""

    _contacts: Contacts
    _leadership: Leadership
    _members: Members
    _proposals: Proposals
    _voting: Voting

    def propose(self, now: float) -> bool:
        """The leader of those who are left asks them to sign: once, and again where they keep to something else."""
        heard, known = self._state.degraded_set, self._proposals.degraded()
        is_bound, content = self._proposals.bound()
        if not is_bound:
            content = None if known else self._proposals.verified_before() or self._voting.built(now)
        name = manifest_hash(content.manifest) if content else NO_HASH
        if content is None or (known is not None and known.value.value == name):
            return False
        kept = self._proposals.kept_by_set()
        attempt = max(self._own.sequence, known.value.attempt + 1 if known else 0)  # it grows over restarts too
        self._proposals.take(content, now)
        proposal = DegradedProposal(
            self._state.tip_hash, attempt, self._me, heard, kept[0] if kept[2] == name else -1, name
        )
        self._state.round.degraded_proposals[heard] = self._state.identity.sealer.seal(proposal)
        self._own.has_news = True
        self._state.note_progress(now)
        return True

    def vote(self, now: float) -> bool:
        """A quorum is unheard for long: give the leader of those who are heard our signature for its proposal."""
        current, heard = self._state.round, self._state.degraded_set
        if self._leadership.leader_of(heard, 0) == self._me:
            return False
        proposal = self._proposal()
        if proposal is None:
            return False
        vote = self._vote_for(proposal.value)
        if current.own_degraded is not None and current.own_degraded.value == vote:
            return False
        self._voting.bind(vote_record.vote_degraded(self._state.record, proposal))
        current.own_degraded = self._state.identity.sealer.seal(vote)
        self._own.has_news = True
        return True

    def certify(self, now: float) -> bool:
        """All others that the degraded proposal calls heard have signed: its leader signs last, and that decides.

        So there is one content for a set of electors, ever: only its leader can complete a certificate, and the record
        keeps it whole.
        """
        current, heard = self._state.round, self._state.degraded_set
        proposal = self._proposal()
        content = None if proposal is None else self._proposals.named(proposal.value.value)
        if proposal is None or content is None or self._state.record.degraded_votes:
            return False
        vote = self._vote_for(proposal.value)
        given = current.degraded_votes.get((heard, vote.manifest), {})
        given = {peer: signed for peer, signed in given.items() if signed.value == vote}
        if any(peer != self._me and peer not in given for peer in heard):
            return False
        seals = [self._state.identity.sealer.seal(vote), *(given[peer] for peer in heard if peer != self._me)]
        self._voting.bind(vote_record.vote_degraded(self._state.record, proposal, tuple(seals)))
        self._voting.take_decision(self._voting.commit_of(DEGRADED, vote.ballot, heard, content, seals), now)
        return True

    def take(self, now: float) -> bool:
        """A degraded child that others made is taken where no live quorum was heard for long; before one is made."""
        offered = self._state.round.offered
        if not offered or not self._liveness.may_take(self._pace, now) or self._liveness.hears_quorum:
            return False
        fitting = [
            (commit,) for name, commit in offered.items()
            if self._proposals.can_be_had(name, now) and self.way_to((), (commit,), now) is ForkDecision.MOVE
        ]  # fmt: skip
        if not fitting:
            return False
        self._voting.take_decision(best(fitting, self._rules.final_rounds)[0], now)
        return True

    def _vote_for(self, made: DegradedProposal) -> DegradedVote:
        return DegradedVote(self._rules.fingerprint, made.parent, made.heard, made.ballot, made.value)

    def _proposal(self) -> Signed[DegradedProposal] | None:
        """The proposal of our degraded set, if its state is here and the set keeps to nothing else."""
        proposal = self._proposals.degraded()
        if proposal is None:
            return None
        name, kept = proposal.value.value, self._proposals.kept_by_set()[2]
        return proposal if name in self._state.round.verified and kept in (NO_HASH, name) else None

    def electors(self, now: float) -> Heard:
        """The electors to make a degraded child: those alive on our tip if no live quorum was heard for W."""
        is_bound = self._state.round.decided is not None and not self._proposals.is_lost(now)
        if self._rules.faults is Faults.BYZANTINE:  # there only the organiser goes on without a quorum
            return ()
        if is_bound or not self._leadership.can_vote() or not self._liveness.may_make(self._pace, now):
            return ()
        live = {self._me, *self._members.live_electors(now)}
        return tuple(
            sorted(p for p in live if p == self._me or self._others.contacts[p].status.head == self._state.tip_hash)
        )

    def become(self, heard: Heard) -> None:
        """These make a degraded child from now on; nobody, where it is empty."""
        if heard != self._state.degraded_set:
            self._state.degraded_set = heard
        if heard and (lost := self._state.round.decided) is not None:
            self._state.round.decided = None
            self._state.round.given_up.add(lost.certificate.manifest)
            self._state.round.failed.clear()
            self._state.notify(
                "lost",
                f"round {lost.manifest.round} was committed, but no reachable peer has its state: the remaining peers "
                "continue without it until a former peer brings it back",
            )

    def way_to(self, ours: Line, theirs: Line, now: float) -> ForkDecision:
        """Whether to go from our tip, the last of `ours`, to the tip of `theirs`, which was checked.

        Both begin on top of one common manifest.
        """
        ballot, _, kept = self._state.round.vote.best_known
        may_take = self._liveness.may_take(self._pace, now)
        return choose(ours, theirs, ForkContext(may_take, self._rules.final_rounds, ballot, kept, self._others.chosen))

    def still_takes(self, child: Commit) -> bool:
        """Whether a child of our tip that was to be taken may be, now that its state is here."""
        is_free = has_quorum(child) or child.certificate.manifest in self._others.chosen
        return is_free or not self._liveness.hears_quorum

    def listen(self, now: float) -> bool:
        """Keeps the guard of degraded commits up to date; whether what may be done has changed."""
        live, current = self._liveness, self._state.round
        others = (
            {member.peer for member in self._state.tip.members} - {self._me} if live.asking_since is not None else ()
        )
        changed = live.note(others, self._pace, now)
        if live.failing_since is not None and not self._is_wanting(now):
            live.failing_since = None
        live.hears_quorum = len(self._members.live_electors(now)) >= self._state.electorate.quorum
        if live.hears_quorum:
            live.heard_quorum(now)
            degraded = current.decided is not None and not has_quorum(current.decided)
            if degraded and current.decided is not None and not current.adopting:  # it lives after all
                current.offered[current.decided.certificate.manifest] = current.decided
                current.decided = None
                changed = True
        elif self._rules.faults is Faults.BYZANTINE and live.may_make(self._pace, now) and not live.is_told:
            live.is_told = True
            self._tell_of_silence(now)
        return changed

    def _tell_of_silence(self, now: float) -> None:
        """Nothing goes on, and people would see nothing."""
        electors = self._state.electorate
        lacking = ", ".join(short(peer) for peer in sorted(set(electors.order) - {*self._members.live_electors(now)}))
        self._state.notify(
            "quorum",
            f"the run stands still: a round needs {electors.quorum} of {len(electors.order)} electors "
            f"(swarm.faults: byzantine), and these are not heard, or cannot vote: {lacking}; it goes on once enough of "
            "them are back",
        )

    def _is_wanting(self, now: float) -> bool:
        """Whether others have what is to be staged here, or are further than we are, or what we build fails."""
        target = self._proposals.target()
        if target is None and self._state.round.failed_builds > 1:
            return True
        name = manifest_hash(target.manifest) if target is not None else NO_HASH
        is_here = target is None or name in self._state.round.verified
        return self._others.ahead_since is not None or (not is_here and self._proposals.can_be_had(name, now))
