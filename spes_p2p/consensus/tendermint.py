"""Agreement on the child of one manifest: Tendermint, Algorithm 1 of arXiv 1807.04938, as a pure state machine.

An elector takes events (votes were heard, a deadline passed, a value was judged) and returns actions. It knows neither
clock nor disk nor network, and of values only their names: tiles, deadlines and who is heard are its caller's. "Line"
in a docstring is one of Algorithm 1. Where we depart from it:

- Votes are not flooded. An elector tells its newest ones, with the newest proposal and polka that it knows; they may be
  lost, and earlier ones are forgotten. So "2f+1 of any kind" (lines 34 and 47) counts who has gone on to a later step
  or ballot as well; else two electors could wait for each other's forgotten votes for ever.
- A proposal carries its polka (line 28), and a polka moves the valid value in any step (lines 36 to 43).
- Nobody prevotes, locks or takes for valid what is not on its own disk: `valid(v)` is a judgement that may come late.
- Whether a value is complete is judged in first proposals alone (lines 22 to 26), and not of the locked value.
- The leader has a deadline too (line 21): it may have nothing to propose.
- Where a quorum precommitted nil the next ballot begins at once (lines 47 and 65).
- Without liars (`crash`) a quorum is a majority, and one word of a later ballot is enough to go there (line 55):
  somebody came there by the votes of a quorum.
- What was said is on disk before it leaves, so that a restart is only a pause.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from spes_p2p.consensus.heard_votes import HeardVotes
from spes_p2p.consensus.messages import Sealer
from spes_p2p.consensus.own_votes import OwnVotes
from spes_p2p.consensus.vote_events import (
    Accuse,
    Action,
    Allowed,
    Built,
    DeadlinePassed,
    Decide,
    Event,
    Heard,
    Judged,
    NotPersisted,
    Persist,
    RecordIsOld,
    Stage,
    StartDeadline,
    Step,
    Tell,
    Verdict,
)
from spes_p2p.consensus.vote_messages import NIL, Electorate, Votes
from spes_p2p.consensus.vote_record import VoteRecord, ballot_of
from spes_p2p.ids import Hash, PeerId


class Tendermint:
    """One elector of one parent. `record` is what must survive a restart; all else comes again.

    The rules stand in the order in which they are tried after each event, until none fires.
    """

    def __init__(
        self, me: PeerId, electorate: Electorate, fingerprint: Hash, record: VoteRecord, sealer: Sealer
    ) -> None:
        """`record` is what is on disk for this parent, or a new one."""
        self.me, self.electorate = me, electorate
        self.heard = HeardVotes(electorate, fingerprint, record.parent)
        self.own = OwnVotes(record, self.heard, sealer)
        self.verdicts: dict[Hash, Verdict] = {}
        self.own_value: Hash | None = None
        self.decided: Decide | None = None
        self.is_allowed = me in electorate.order
        """Whether we vote; else we only look on."""
        self.is_mute = False
        """Whether we have said what the record does not know: nothing more is said, then."""
        self._out: list[Action] = []
        self._asked: set[Action] = set()
        self._durable = record
        self._told = self.told

    def handle(self, event: Event) -> list[Action]:
        """Takes an event, does what follows from it, and says what is to be done, in order, before the next event.

        A `Persist` comes first: what follows it may leave only when it is on disk.
        """
        self._out = []
        self._take(event)
        if isinstance(event, NotPersisted):  # it is tried again with the next event
            return []
        while self.decided is None and any(rule() for rule in self._rules()):
            pass
        first: list[Action] = []
        if self.own.record != self._durable:
            self._durable = self.own.record
            first.append(Persist(self.own.record))
        if self.told != self._told:
            self._told = self.told
            first.append(Tell())
        return first + self._out

    def copy(self) -> Tendermint:
        """One that goes its own way, for searches."""
        other = copy.copy(self)
        other.heard = self.heard.copy()
        other.own = self.own.copy(other.heard)
        other.verdicts, other._asked = dict(self.verdicts), set(self._asked)
        return other

    @property
    def told(self) -> Votes:
        """What to tell the others: it says all that matters of what was told before."""
        mine = VoteRecord(self.own.record.parent) if self.is_mute else self.own.record
        proposal = self.heard.proposal_at(self.own.ballot)
        return Votes(mine.prevote, mine.precommit, proposal, self.heard.polka)

    @property
    def best_known(self) -> tuple[int, Hash]:
        """(ballot of its polka, value) to keep to where electors go on without a quorum.

        That is the value of the newest polka, else (-1) what we prevoted last: it may be decided where we do not hear
        of it. NIL where there is neither. Its tiles may not be here.
        """
        polka, backed = self.heard.polka, self.own.record.backed
        if polka is not None:
            return polka.ballot, polka.value
        return -1, backed.value.value if backed else NIL

    # ---------------------------------------------------------------- events

    def _take(self, event: Event) -> None:
        match event:
            case Heard(votes):
                self.heard.take(votes)
                if self.heard.has_more_of(self.me, self.own.record):
                    self.is_mute = True
                    self._ask(RecordIsOld())
                for evidence in self.heard.evidence.values():
                    self._ask(Accuse(evidence))
            case Judged(value, None):
                self.verdicts.pop(value, None)
                self._asked.discard(Stage(value))
            case Judged(value, Verdict() as verdict):
                self.verdicts[value] = verdict
            case Built(value):
                self.verdicts[value] = Verdict.FIT
                self.own_value = value
            case DeadlinePassed(ballot, step):
                self._pass_deadline(ballot, step)
            case Allowed(is_allowed):
                self.is_allowed = is_allowed and self.me in self.electorate.order
                self._asked = {action for action in self._asked if not isinstance(action, StartDeadline)}
            case NotPersisted(record):
                self._take_back(record)

    def _pass_deadline(self, ballot: int, step: Step) -> None:
        """Lines 57 to 67."""
        if ballot != self.own.ballot or self.decided is not None or not self._votes():
            return
        if step is Step.PRECOMMIT:
            self.own.start_ballot(ballot + 1)
        elif step is Step.PREVOTE is self.own.step:
            self.own.precommit(NIL)
        elif step is Step.PROPOSE is self.own.step:
            self.own.prevote(NIL)

    def _take_back(self, record: VoteRecord) -> None:
        """Goes back to what is on disk. What was asked for since may not have been heard: it is asked for again."""
        self.heard.forget(self.me, record.prevote)
        self.decided = None
        self._asked.clear()
        self._durable = record
        self.own.resume(record)
        self._told = self.told

    def _votes(self) -> bool:
        return self.is_allowed and not self.is_mute

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
        precommits = self.heard.certificate()
        if not precommits:
            return False
        vote = precommits[0].value
        self.decided = Decide(vote.ballot, vote.value, precommits)
        self._out.append(self.decided)
        return True

    def _rule_follow(self) -> bool:
        """Lines 55 and 56: others are in a later ballot. Or nothing can be decided in this one: nobody waits for it."""
        reached = self.heard.reached()
        if self.heard.nil_quorum(self.heard.precommits, self.own.ballot):
            reached = max(reached, self.own.ballot + 1)
        if reached <= self.own.ballot:
            return False
        self.own.start_ballot(reached)
        return True

    def _rule_take_valid(self) -> bool:
        """Lines 42 and 43: a polka, and its value is on disk."""
        polka = self.heard.polka
        if polka is None or polka.ballot <= self.own.record.valid_ballot or not self._has(polka.value):
            return False
        self.own.take_valid(polka)
        return True

    def _rule_propose(self) -> bool:
        """Lines 14 to 19: the valid value with its polka, else our own."""
        if self.electorate.leader(self.own.ballot) != self.me or self.own.step is not Step.PROPOSE:
            return False
        if ballot_of(self.own.record.proposal) == self.own.ballot:
            return False
        polka = self.own.record.valid
        if polka is not None and not (self._has(polka.value) and polka.ballot < self.own.ballot):
            polka = None
        value = polka.value if polka else self.own_value
        if value is None:
            return False
        self.own.propose(value, polka)
        return True

    def _rule_prevote(self) -> bool:
        """Lines 22 to 33."""
        signed = self.heard.proposal_at(self.own.ballot)
        if signed is None or self.own.step is not Step.PROPOSE:
            return False
        proposal = signed.value
        if not self.own.record.allows(proposal):
            self.own.prevote(NIL)
            return True
        verdict = self.verdicts.get(proposal.value)
        if verdict is None:
            return False
        is_free = proposal.polka is None and proposal.value != self.own.record.locked_value
        is_refused = verdict is Verdict.REFUSED or (is_free and verdict is Verdict.INCOMPLETE)
        self.own.prevote(NIL if is_refused else proposal.value)
        return True

    def _rule_precommit(self) -> bool:
        """Lines 36 to 41: a polka in this ballot, and its value is on disk. Lines 44 to 46: a quorum for nil."""
        ballot, polka = self.own.ballot, self.heard.polka
        if self.own.step is not Step.PREVOTE:
            return False
        if polka is not None and polka.ballot == ballot and self._has(polka.value):
            self.own.lock(polka)
            self.own.precommit(polka.value)
            return True
        if self.heard.nil_quorum(self.heard.prevotes, ballot):
            self.own.precommit(NIL)
            return True
        return False

    def _rule_ask(self) -> bool:
        """Deadlines (lines 21, 34 and 47), and what is to be brought here."""
        asked = len(self._asked)
        self._ask(StartDeadline(self.own.ballot, Step.PROPOSE))
        if self.heard.passed(self.own.ballot, Step.PREVOTE) and self.own.step is Step.PREVOTE:
            self._ask(StartDeadline(self.own.ballot, Step.PREVOTE))
        if self.heard.passed(self.own.ballot, Step.PRECOMMIT):
            self._ask(StartDeadline(self.own.ballot, Step.PRECOMMIT))
        for value in self._wanted():
            self._ask(Stage(value))
        return len(self._asked) > asked

    # ---------------------------------------------------------------- helpers

    def _wanted(self) -> set[Hash]:
        """Values without which we cannot vote, or keep to what we voted for."""
        proposal, polka = self.heard.proposal_at(self.own.ballot), self.heard.polka
        values = {self.own.record.locked_value, self.own.record.valid.value if self.own.record.valid else NIL}
        if proposal is not None and self.own.record.allows(proposal.value):
            values.add(proposal.value.value)
        if polka is not None:
            values.add(polka.value)
        return {value for value in values - {NIL} if value not in self.verdicts}

    def _has(self, value: Hash) -> bool:
        """valid(v): it follows from its parent, and all of it is on our disk."""
        return self.verdicts.get(value) in (Verdict.FIT, Verdict.INCOMPLETE)

    def _ask(self, action: Action) -> None:
        """Once."""
        if action not in self._asked:
            self._asked.add(action)
            self._out.append(action)
