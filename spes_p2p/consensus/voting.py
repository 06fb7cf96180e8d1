"""The vote on the child of the tip: what Tendermint needs to know of this round, and what its words mean here.

`tendermint` votes on hashes. Here it is told which of them are on our disk, whether we may vote, what we would propose,
and that a deadline is over; and what it says is persisted, told, and made a certificate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from spes_p2p.consensus import vote_events as vote_on
from spes_p2p.consensus.actions import Forget, Persist
from spes_p2p.consensus.contacts import Contacts
from spes_p2p.consensus.content import Content, Statements
from spes_p2p.consensus.leadership import Leadership
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.members import Members
from spes_p2p.consensus.messages import QUORUM, Certificate, Commit, Seal, Votes
from spes_p2p.consensus.part import Part
from spes_p2p.consensus.proposals import Proposals
from spes_p2p.consensus.sizes import most_named
from spes_p2p.consensus.statements import content_of, missing_quorum
from spes_p2p.consensus.tendermint import Tendermint
from spes_p2p.consensus.vote_events import Step, Verdict
from spes_p2p.consensus.vote_record import VoteRecord, ballot_of
from spes_p2p.failpoints import reached
from spes_p2p.ids import Hash, PeerId

NOBODY_AS_YET = -1
"""The incarnation of a peer that waits for another one."""


@dataclass(eq=False)
class Voting(Part):
    """Votes, certifies; says when a leader has failed."""

    _contacts: Contacts
    _leadership: Leadership
    _members: Members
    _proposals: Proposals

    # ---------------------------------------------------------------- the vote

    def vote(self, now: float) -> bool:
        """Tells the vote what is new of this round, until nothing is."""
        fired = False
        while (event := next(self._due(now), None)) is not None:
            self._step(event, now)
            fired = True
        return fired

    def hear(self, votes: Votes, now: float) -> bool:
        """Takes in what another one tells; whether there was something new in it."""
        self._compare(votes)
        heard, near = self._state.round.vote.heard, self._leadership.near(votes)
        if not heard.is_news(near):
            return False
        polka, proposal = heard.polka, heard.proposal_at(self._leadership.ballot())
        self._step(vote_on.Heard(near), now)
        if heard.polka != polka or heard.proposal_at(self._leadership.ballot()) != proposal:
            self._state.note_progress(now)
        return True

    def _compare(self, votes: Votes) -> None:
        """Holds what somebody heard of the vote on our tip against what we did: authors may have said two things."""
        before, said = self._others.votes_before, votes.prevote or votes.precommit or votes.proposal
        if before is None or said is None or said.value.parent != before.parent or not before.is_news(votes):
            return
        before.take(votes)
        for liar in sorted(before.liars):
            self._accuse(liar)

    def not_persisted(self, durable: VoteRecord, now: float) -> None:
        """The record could not be written: back to what is on disk."""
        self._take_contents(durable)
        self._step(vote_on.NotPersisted(replace(durable, contents=())), now)

    def resume(self, record: VoteRecord) -> None:
        """A process begins with the record that is on disk for this parent."""
        self._take_contents(record)
        current = self._state.round
        identity, heard = self._state.identity, current.vote.heard
        bare = replace(record, contents=())
        current.vote = Tendermint.begin(self._me, heard.electorate, heard.fingerprint, bare, identity.sealer).vote

    def _take_contents(self, record: VoteRecord) -> None:
        for content in record.contents:
            self._state.round.contents[manifest_hash(content.manifest)] = content

    def _due(self, now: float) -> Iterator[vote_on.Event]:
        """What the vote does not know yet."""
        current, vote = self._state.round, self._state.round.vote
        may_vote = self._leadership.can_vote() and current.decided is None
        if vote.is_allowed != may_vote:
            yield vote_on.Allowed(may_vote)
        for name in {*current.contents, *current.refused, *vote.verdicts}:
            if vote.verdicts.get(name) != (verdict := self._verdict(name)):
                yield vote_on.Judged(name, verdict)
        if may_vote and vote.decided is None:
            if self._leadership.leading() and ballot_of(vote.record.proposal) < vote.ballot:
                content = self._content_to_propose(now)
                if content is not None:
                    self._proposals.take(content, now)
                    yield vote_on.Built(manifest_hash(content.manifest))
            for ballot, step in list(current.deadlines):
                if self._is_over(ballot, step, now):
                    del current.deadlines[ballot, step]
                    yield vote_on.DeadlinePassed(ballot, step)

    def _verdict(self, name: Hash) -> Verdict | None:
        current = self._state.round
        if name in current.refused:
            return Verdict.REFUSED
        return Verdict.FIT if name in current.verified else None

    def _is_over(self, ballot: int, step: Step, now: float) -> bool:
        """Whether a deadline is over. Without a quorum in hearing nothing can be decided: ballots stay as they are."""
        current, vote = self._state.round, self._state.round.vote
        if ballot != vote.ballot:
            return True
        if step is Step.PROPOSE:
            return vote.step is Step.PROPOSE and self._liveness.hears_quorum and self._leadership.has_failed(now)
        since = max(current.deadlines[ballot, step], current.progress_at)
        return now - since > self._pace.deadline_seconds(ballot)

    def _step(self, event: vote_on.Event, now: float) -> None:
        current, vote = self._state.round, self._state.round.vote
        ballot, before = vote.ballot, vote.record
        for action in Tendermint(self._me, vote, self._state.identity.sealer).handle(event):
            match action:
                case vote_on.Persist(record):
                    self.bind(record)
                    self._state.note_progress(now)
                case vote_on.Tell():
                    self._own.has_news = True
                case vote_on.StartDeadline(at, step):
                    current.deadlines = {key: since for key, since in current.deadlines.items() if key[0] >= at}
                    current.deadlines[at, step] = now
                case vote_on.Accuse(elector):
                    self._accuse(elector)
                case vote_on.RecordIsOld() if self._state.is_elector():  # else they are words of an earlier incarnation
                    self.forget_record(self._own.incarnation)
        vote.own_value = None  # it is proposed now, or not at all: another ballot has another manifest
        if vote.ballot != ballot:
            current.progress_at = now
        for word in ("proposal", "prevote", "precommit"):
            if getattr(vote.record, word) not in (None, getattr(before, word)):
                reached(word, peer=self._me, round=self._state.tip.round + 1)

    def _accuse(self, elector: PeerId) -> None:
        """Tells people once that somebody lies: who may ban it is the organiser."""
        if elector not in self._others.voted_twice and elector != self._me:
            self._state.notify("lies", "it has signed two different votes in one ballot", elector)
            self._others.voted_twice.add(elector)

    def bind(self, record: VoteRecord) -> None:
        """What we are bound to goes to disk, with what is needed to stand by it."""
        current = self._state.round
        current.vote.record = current.vote.durable = record
        self._liveness.was_full = False  # where this finds no room, nothing leaves that says so
        contents = tuple(current.contents[name] for name in sorted(record.pinned) if name in current.contents)
        self._state.out.append(Persist(replace(record, contents=contents)))

    def forget_record(self, above: int) -> None:
        """Votes are not given twice: from now on we are a newcomer."""
        self._state.notify(
            "votes",
            "others have heard more of this peer than its disk knows: it rejoins as a newcomer; if this comes again "
            "and again, its identity.key is in use on another machine, too",
        )
        self._own.incarnation = NOBODY_AS_YET
        self.resume(VoteRecord(self._state.tip_hash))
        self._state.round.decided = None
        self._state.out.append(Forget(above))

    # ---------------------------------------------------------------- what is proposed, and decided

    def _content_to_propose(self, now: float) -> Content | None:
        """What is here already, else what was built."""
        polka = self._state.round.vote.record.valid
        if polka is not None and polka.value in self._state.round.verified:
            return self._proposals.named(polka.value)
        return self._proposals.verified_before() or self.built(now)

    def built(self, now: float) -> Content | None:
        """A manifest for the state that was built here, with those who take part next."""
        if self._state.round.outcome is None:
            return None
        build, outcome = self._state.round.outcome
        ready = tuple(self._state.round.ready[entry] for entry in build.roster)
        others, tip = self._state.others, self._state.tip
        slices = tuple(signed.value.piece for signed in build.reports)
        most = most_named(self._rules, tip, ready, build.roster, build.reports, slices)
        said = tuple(self._members.declarations(now)[:most])
        statements = Statements(ready, build.reports, said, others.decay, others.roll)
        content = content_of(self._rules, tip, statements, outcome.state_root, outcome.merge)
        return None if missing_quorum(self._rules, tip, content) else content

    def certify(self, now: float) -> bool:
        """Precommits of a quorum for one value are the commit, as soon as we know what it stands for."""
        decided = self._state.round.vote.decided
        if decided is None:
            return False
        content = self._proposals.named(decided.value)
        if content is None:
            return False
        seals = sorted(
            (Seal(signed.author, signed.public_key, signed.signature) for signed in decided.precommits),
            key=lambda seal: seal.peer,
        )
        certificate = Certificate(self._state.tip_hash, QUORUM, decided.ballot, decided.value, tuple(seals))
        self.take_decision(Commit(certificate, content.manifest), now)
        return True

    def take_decision(self, commit: Commit, now: float) -> None:
        current = self._state.round
        current.decided = commit
        current.failed.clear()
        self._state.note_progress(now)
