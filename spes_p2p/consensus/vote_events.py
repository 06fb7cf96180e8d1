"""What a vote takes in and what it asks of its caller: events and actions of `Tendermint`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from spes_p2p.consensus.messages import Precommit, Signed, Votes
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.ids import Hash, PeerId


class Step(IntEnum):
    """Where an elector is in its ballot."""

    PROPOSE = 0
    PREVOTE = 1
    """It has prevoted."""
    PRECOMMIT = 2
    """It has precommitted."""


class Verdict(Enum):
    """What the caller has found out about a value. Until then it is waited for."""

    FIT = "fit"
    """It follows from its parent, and all of it is on our disk."""
    REFUSED = "refused"
    """It does not follow from its parent."""


# ------------------------------------------------------------------ events


@dataclass(frozen=True)
class Heard:
    """Somebody tells its votes, or those of others. Signatures were checked, nothing else."""

    votes: Votes


@dataclass(frozen=True)
class Judged:
    """A value is on disk or refused; with None its tiles are not on disk any more."""

    value: Hash
    verdict: Verdict | None


@dataclass(frozen=True)
class Built:
    """This value may be proposed by us (getValue() in line 18): it is complete."""

    value: Hash


@dataclass(frozen=True)
class DeadlinePassed:
    """A deadline that was asked for by `StartDeadline`."""

    ballot: int
    step: Step


@dataclass(frozen=True)
class Allowed:
    """Whether we may vote at present: not before we have asked what became of the run, nor in another incarnation."""

    is_allowed: bool


@dataclass(frozen=True)
class NotPersisted:
    """The record of the last `Persist` could not be written: nothing of it was said. `record` is what is on disk."""

    record: VoteRecord


Event = Heard | Judged | Built | DeadlinePassed | Allowed | NotPersisted

# ------------------------------------------------------------------ actions


@dataclass(frozen=True)
class Persist:
    """fsync the record. When that fails: drop the rest of the actions and bring `NotPersisted`."""

    record: VoteRecord


@dataclass(frozen=True)
class Tell:
    """There is something new in `Tendermint.told`."""


@dataclass(frozen=True)
class StartDeadline:
    """Bring `DeadlinePassed` after a while that grows with the ballot."""

    ballot: int
    step: Step


@dataclass(frozen=True)
class Stage:
    """Get this value and its tiles, then bring `Judged`. Whoever voted for it has them."""

    value: Hash


@dataclass(frozen=True)
class Decide:
    """The value is decided: these precommits are the certificate."""

    ballot: int
    value: Hash
    precommits: tuple[Signed[Precommit], ...]


@dataclass(frozen=True)
class Accuse:
    """An elector lies: it has signed two different votes in one ballot."""

    elector: PeerId


@dataclass(frozen=True)
class RecordIsOld:
    """Others heard votes of ours that our record lacks, so it must not be used any more. Begin a new incarnation."""


Action = Persist | Tell | StartDeadline | Stage | Decide | Accuse | RecordIsOld
