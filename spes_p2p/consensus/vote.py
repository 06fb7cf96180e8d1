"""All that one elector knows of the vote on the child of one parent. No behaviour: `tendermint` votes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from spes_p2p.consensus.heard_votes import HeardVotes
from spes_p2p.consensus.messages import Votes
from spes_p2p.consensus.vote_events import Action, Decide, Step, Verdict
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.ids import Hash


@dataclass
class Vote:
    """Where an elector is in its vote. Of this `record` alone must survive a restart; all else comes again.

    `durable` is the record as it was last asked to be written, `told` what was last asked to be told. `verdicts` are of
    values, `own_value` may be proposed by us. `is_allowed`: whether we vote; else we only look on. `is_mute`: we have
    said what the record does not know, so nothing more is said. `asked` is what was asked for once.
    """

    heard: HeardVotes
    record: VoteRecord
    durable: VoteRecord
    told: Votes = field(default_factory=Votes)
    ballot: int = 0
    step: Step = Step.PROPOSE
    verdicts: dict[Hash, Verdict] = field(default_factory=dict)
    own_value: Hash | None = None
    decided: Decide | None = None
    is_allowed: bool = False
    is_mute: bool = False
    asked: set[Action] = field(default_factory=set)

    def copy(self) -> Vote:
        """One that goes its own way, for searches."""
        return replace(self, heard=self.heard.copy(), verdicts=dict(self.verdicts), asked=set(self.asked))

    @property
    def to_tell(self) -> Votes:
        """What to tell the others: it says all that matters of what was told before."""
        mine = VoteRecord(self.record.parent) if self.is_mute else self.record
        return Votes(mine.prevote, mine.precommit, self.heard.proposal_at(self.ballot), self.heard.polka)
