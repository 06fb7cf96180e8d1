"""Agreement on the child of one manifest: Tendermint, Algorithm 1 of arXiv 1807.04938, as a pure state machine.

An elector takes events (votes were heard, a deadline passed, a value was judged) and returns actions. It knows neither
clock nor disk nor network, and of values only their names: tiles, deadlines and who is heard are its caller's. "Line"
in a docstring is one of Algorithm 1. Where we depart from it:

- Votes are not flooded. An elector tells its newest ones, with the newest proposal and polka that it knows; they may be
  lost, and earlier ones are forgotten. So "2f+1 of any kind" (lines 34 and 47) counts who has gone on to a later step
  or ballot as well; else two electors could wait for each other's forgotten votes for ever.
- A proposal carries its polka (line 28), and a polka moves the valid value in any step (lines 36 to 43).
- Nobody prevotes, locks or takes for valid what is not on its own disk: `valid(v)` is a judgement that may come late.
- Whether a value is complete is judged in first proposals alone (lines 22 to 26), and not of the locked value; and
  only until everybody has led, then any will do.
- The leader has a deadline too (line 21): it may have nothing to propose.
- Where a quorum precommitted nil the next ballot begins at once (lines 47 and 65).
- Without liars (`crash`) a quorum is a majority, and one word of a later ballot is enough to go there (line 55):
  somebody came there by the votes of a quorum.
- What was said is on disk before it leaves, so that a restart is only a pause.
"""

from __future__ import annotations

from collections.abc import Callable

from spes_p2p.consensus import vote_events as vote_on
from spes_p2p.consensus import vote_record
from spes_p2p.consensus.electorate import NIL, Electorate
from spes_p2p.consensus.heard_votes import HeardVotes
from spes_p2p.consensus.messages import Polka, Precommit, Prevote, Proposal, Sealer, Votes
from spes_p2p.consensus.vote import Vote
from spes_p2p.consensus.vote_record import VoteRecord, ballot_of
from spes_p2p.ids import Hash, PeerId


class OwnVotes:
    """What an elector says of the child of one parent, and the record that binds it.

    Writes each word of ours into the record, and among what was heard. What may be said is decided elsewhere.
    """

    def __init__(self, vote: Vote, sealer: Sealer) -> None:
        self._vote, self._sealer = vote, sealer
        self._names = vote.heard.fingerprint, vote.heard.parent

    def resume(self, record: VoteRecord) -> None:
        """Goes on from what is on disk: in the newest ballot in which something was said."""
        vote = self._vote
        vote.record, vote.ballot = record, record.ballot
        said = (
            (ballot_of(record.prevote), vote_on.Step.PREVOTE),
            (ballot_of(record.precommit), vote_on.Step.PRECOMMIT),
        )
        vote.step = max((step for ballot, step in said if ballot == vote.ballot), default=vote_on.Step.PROPOSE)
        vote.heard.take(Votes(record.prevote, record.precommit, record.proposal, record.valid))

    def start_ballot(self, ballot: int) -> None:
        """Lines 11 to 13 of Algorithm 1."""
        vote = self._vote
        vote.ballot, vote.step = ballot, vote_on.Step.PROPOSE
        vote.asked = {one for one in vote.asked if not isinstance(one, vote_on.StartDeadline) or one.ballot >= ballot}

    def propose(self, value: Hash, polka: Polka | None) -> None:
        """Once a ballot."""
        signed = self._sealer.seal(Proposal(*self._names, self._vote.ballot, value, polka))
        self._vote.record = vote_record.propose(self._vote.record, signed)
        self._vote.heard.take(Votes(proposal=signed))

    def prevote(self, value: Hash) -> None:
        """Once a ballot."""
        signed = self._sealer.seal(Prevote(*self._names, self._vote.ballot, value))
        self._vote.record = vote_record.prevote(self._vote.record, signed)
        self._vote.step = vote_on.Step.PREVOTE
        self._vote.heard.take(Votes(prevote=signed))

    def precommit(self, value: Hash) -> None:
        """Once a ballot; a value is locked first."""
        signed = self._sealer.seal(Precommit(*self._names, self._vote.ballot, value))
        self._vote.record = vote_record.precommit(self._vote.record, signed)
        self._vote.step = vote_on.Step.PRECOMMIT
        self._vote.heard.take(Votes(precommit=signed))

    def lock(self, polka: Polka) -> None:
        self._vote.record = vote_record.lock(self._vote.record, polka)

    def take_valid(self, polka: Polka) -> None:
        self._vote.record = vote_record.take_valid(self._vote.record, polka)


class Tendermint:
    """One elector of one parent, over the `Vote` that it keeps.

    The rules stand in the order in which they are tried after each event, until none fires.
    """

    def __init__(self, me: PeerId, vote: Vote, sealer: Sealer) -> None:
        self.me, self.vote = me, vote
        self.electorate = vote.heard.electorate
        self.own = OwnVotes(vote, sealer)
        self._out: list[vote_on.Action] = []

    @classmethod
    def begin(
        cls, me: PeerId, electorate: Electorate, fingerprint: Hash, record: VoteRecord, sealer: Sealer
    ) -> Tendermint:
        """`record` is what is on disk for this parent, or a new one. It only looks on until it is `Allowed` to vote."""
        vote = Vote(HeardVotes(electorate, fingerprint, record.parent), record, record)
        elector = cls(me, vote, sealer)
        elector.own.resume(record)
        vote.told = vote.to_tell
        return elector

    def handle(self, event: vote_on.Event) -> list[vote_on.Action]:
        """Takes an event, does what follows from it, and says what is to be done, in order, before the next event.

        A `Persist` comes first: what follows it may leave only when it is on disk.
        """
        self._out = []
        self._take(event)
        if isinstance(event, vote_on.NotPersisted):  # it is tried again with the next event
            return []
        while self.vote.decided is None and any(rule() for rule in self._rules()):
            pass
        first: list[vote_on.Action] = []
        if self.vote.record != self.vote.durable:
            self.vote.durable = self.vote.record
            first.append(vote_on.Persist(self.vote.record))
        if (told := self.vote.to_tell) != self.vote.told:
            self.vote.told = told
            first.append(vote_on.Tell())
        return first + self._out

    # ---------------------------------------------------------------- events

    def _take(self, event: vote_on.Event) -> None:
        match event:
            case vote_on.Heard(votes):
                self.vote.heard.take(votes)
                if self.vote.heard.has_more_of(self.me, self.vote.record):
                    self.vote.is_mute = True
                    self._ask(vote_on.RecordIsOld())
                for liar in sorted(self.vote.heard.liars):
                    self._ask(vote_on.Accuse(liar))
            case vote_on.Judged(value, None):
                self.vote.verdicts.pop(value, None)
                self.vote.asked.discard(vote_on.Stage(value))
            case vote_on.Judged(value, vote_on.Verdict() as verdict):
                self.vote.verdicts[value] = verdict
            case vote_on.Built(value):
                self.vote.own_value = value
            case vote_on.DeadlinePassed(ballot, step):
                self._pass_deadline(ballot, step)
            case vote_on.Allowed(is_allowed):
                self.vote.is_allowed = is_allowed and self.me in self.electorate.order
                self.vote.asked = {
                    action for action in self.vote.asked if not isinstance(action, vote_on.StartDeadline)
                }
            case vote_on.NotPersisted(record):
                self._take_back(record)

    def _pass_deadline(self, ballot: int, step: vote_on.Step) -> None:
        """Lines 57 to 67."""
        if ballot != self.vote.ballot or self.vote.decided is not None or not self._votes():
            return
        if step is vote_on.Step.PRECOMMIT:
            self.own.start_ballot(ballot + 1)
        elif step is vote_on.Step.PREVOTE is self.vote.step:
            self.own.precommit(NIL)
        elif step is vote_on.Step.PROPOSE is self.vote.step:
            self.own.prevote(NIL)

    def _take_back(self, record: VoteRecord) -> None:
        """Goes back to what is on disk. What was asked for since may not have been heard: it is asked for again."""
        self.vote.heard.forget(self.me, record.prevote)
        self.vote.decided = None
        self.vote.asked.clear()
        self.vote.durable = record
        self.own.resume(record)
        self.vote.told = self.vote.to_tell

    def _votes(self) -> bool:
        return self.vote.is_allowed and not self.vote.is_mute

    # ---------------------------------------------------------------- rules

    def _rules(self) -> tuple[Callable[[], bool], ...]:
        if not self._votes():
            return (self._rule_decide,)
        return (
            self._rule_decide,
            self._rule_follow,
            self._rule_take_valid,
            self._rule_propose,
            self._rule_prevote,
            self._rule_precommit,
            self._rule_ask,
        )

    def _rule_decide(self) -> bool:
        """Lines 49 to 51: precommits of a quorum for one value, in any ballot. Its tiles may still have to come."""
        precommits = self.vote.heard.certificate()
        if not precommits:
            return False
        vote = precommits[0].value
        self.vote.decided = vote_on.Decide(vote.ballot, vote.value, precommits)
        self._out.append(self.vote.decided)
        return True

    def _rule_follow(self) -> bool:
        """Lines 55 and 56: moves to a later ballot if others are there, or if nothing can be decided in this one."""
        reached = self.vote.heard.reached()
        if self.vote.heard.nil_quorum(self.vote.heard.precommits, self.vote.ballot):
            reached = max(reached, self.vote.ballot + 1)
        if reached <= self.vote.ballot:
            return False
        self.own.start_ballot(reached)
        return True

    def _rule_take_valid(self) -> bool:
        """Lines 42 and 43: a polka, and its value is on disk."""
        polka = self.vote.heard.polka
        if polka is None or polka.ballot <= self.vote.record.valid_ballot or not self._has(polka.value):
            return False
        self.own.take_valid(polka)
        return True

    def _rule_propose(self) -> bool:
        """Lines 14 to 19: the valid value with its polka, else our own."""
        if self.electorate.leader(self.vote.ballot) != self.me or self.vote.step is not vote_on.Step.PROPOSE:
            return False
        if ballot_of(self.vote.record.proposal) == self.vote.ballot:
            return False
        polka = self.vote.record.valid
        if polka is not None and not (self._has(polka.value) and polka.ballot < self.vote.ballot):
            polka = None
        value = polka.value if polka else self.vote.own_value
        if value is None:
            return False
        self.own.propose(value, polka)
        return True

    def _rule_prevote(self) -> bool:
        """Lines 22 to 33."""
        signed = self.vote.heard.proposal_at(self.vote.ballot)
        if signed is None or self.vote.step is not vote_on.Step.PROPOSE:
            return False
        proposal = signed.value
        if not self.vote.record.allows(proposal):
            self.own.prevote(NIL)
            return True
        verdict = self.vote.verdicts.get(proposal.value)
        if verdict is None:
            return False
        self.own.prevote(NIL if verdict is vote_on.Verdict.REFUSED else proposal.value)
        return True

    def _rule_precommit(self) -> bool:
        """Lines 36 to 41: a polka in this ballot, and its value is on disk. Lines 44 to 46: a quorum for nil."""
        ballot, polka = self.vote.ballot, self.vote.heard.polka
        if self.vote.step is not vote_on.Step.PREVOTE:
            return False
        if polka is not None and polka.ballot == ballot and self._has(polka.value):
            self.own.lock(polka)
            self.own.precommit(polka.value)
            return True
        if self.vote.heard.nil_quorum(self.vote.heard.prevotes, ballot):
            self.own.precommit(NIL)
            return True
        return False

    def _rule_ask(self) -> bool:
        """Deadlines (lines 21, 34 and 47), and what is to be brought here."""
        asked = len(self.vote.asked)
        self._ask(vote_on.StartDeadline(self.vote.ballot, vote_on.Step.PROPOSE))
        if self.vote.heard.passed(self.vote.ballot, vote_on.Step.PREVOTE) and self.vote.step is vote_on.Step.PREVOTE:
            self._ask(vote_on.StartDeadline(self.vote.ballot, vote_on.Step.PREVOTE))
        if self.vote.heard.passed(self.vote.ballot, vote_on.Step.PRECOMMIT):
            self._ask(vote_on.StartDeadline(self.vote.ballot, vote_on.Step.PRECOMMIT))
        for value in self.wanted():
            self._ask(vote_on.Stage(value))
        return len(self.vote.asked) > asked

    # ---------------------------------------------------------------- helpers

    def wanted(self) -> set[Hash]:
        """Values without which we cannot vote, or keep to what we voted for."""
        proposal, polka = self.vote.heard.proposal_at(self.vote.ballot), self.vote.heard.polka
        values = {self.vote.record.locked_value, self.vote.record.valid.value if self.vote.record.valid else NIL}
        if proposal is not None and self.vote.record.allows(proposal.value):
            values.add(proposal.value.value)
        if polka is not None:
            values.add(polka.value)
        return {value for value in values - {NIL} if value not in self.vote.verdicts}

    def _has(self, value: Hash) -> bool:
        """valid(v): it follows from its parent, and all of it is on our disk."""
        return self.vote.verdicts.get(value) is vote_on.Verdict.FIT

    def _ask(self, action: vote_on.Action) -> None:
        """Once."""
        if action not in self.vote.asked:
            self.vote.asked.add(action)
            self._out.append(action)
