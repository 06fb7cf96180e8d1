"""What `Consensus.handle` asks of who drives it; how it went comes back as an event (`events.py`).

Actions are carried out in order: a `Persist` is on disk before what follows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.consensus.content import Content, Envelope, joined_hashes
from spes_p2p.consensus.manifest import Contribution, Slice
from spes_p2p.consensus.messages import Commit, Plan, Report, Signed
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.ids import Hash, PeerId


@dataclass(frozen=True)
class Send:
    """Deliver `envelope` to a peer; it may be lost, doubled or late."""

    to: PeerId
    envelope: Envelope


@dataclass(frozen=True)
class Persist:
    """fsync the voting record. When that fails: drop the rest of the actions, and `DiskFull`."""

    record: VoteRecord


@dataclass(frozen=True)
class Forget:
    """Our voting record is older than what we said: begin an incarnation above `above`, then `IncarnationBegun`."""

    above: int


@dataclass(frozen=True)
class CloseTraining:
    """The round closes: finish the running step, then `TrainingProgressed` with `ready`."""


@dataclass(frozen=True)
class Reduce:
    """Average slice `index` of `plan` from its contributors, stage it, then `SliceReduced` with the report."""

    plan: Signed[Plan]
    index: int


@dataclass(frozen=True)
class Fetch:
    """Get the tiles of a slice by hash from one of `holders` (best first), stage them, then `SliceStaged`.

    `hashes` concatenates the tile hashes. When nobody has them: `FetchFailed`.
    """

    piece: Slice
    hashes: bytes
    holders: tuple[PeerId, ...]


@dataclass(frozen=True)
class Build:
    """Compute the new state from the staged slices, then `StateBuilt` with its roots and the merge.

    `roster` is what counts, `reports` promise the slices in their order. The merge, if `alpha` is not 0, is the
    builder's to choose: neighbours by cosine similarity.
    """

    roster: tuple[Contribution, ...]
    reports: tuple[Signed[Report], ...]
    alpha: float

    @property
    def slices(self) -> tuple[Slice, ...]:
        return tuple(signed.value.piece for signed in self.reports)

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """Of each slice the hashes of its tiles, joined."""
        return joined_hashes(self.reports)

    def makes_the_same(self, other: Build | None) -> bool:
        """Whether the other asks for the same state, whoever signed for its slices."""
        mine = (self.roster, self.slices, self.hashes, self.alpha)
        return other is not None and mine == (other.roster, other.slices, other.hashes, other.alpha)


@dataclass(frozen=True)
class Verify:
    """Compute the new state that `content` names, on disk, then `StateVerified` with its manifest's hash.

    Where the own arithmetic gives another root the tiles that differ are fetched by hash.
    """

    content: Content


@dataclass(frozen=True)
class Adopt:
    """Make the verified state the committed one, then `CommitApplied`."""

    commit: Commit


@dataclass(frozen=True)
class CatchUp:
    """Fetch the headers from our tip to the newest that `holder` has, and its state; then `CommitApplied`.

    `head` is what the holder says it has; nothing of it is trusted before its certificates are checked. Where its
    history is another one than ours: `HeavierFound` where it goes before ours, and `HistorySwitched` once its state is
    here; else `LighterFound`. `is_back`: we keep no states, and nobody has that of our tip: lower is right.
    """

    holder: PeerId
    round: int
    head: Hash
    is_back: bool = False


@dataclass(frozen=True)
class Notice:
    """Something that a person or a log should know. `kind` is one word, `peer` is whom it is about."""

    kind: str
    text: str
    peer: PeerId | None = None


Work = Reduce | Fetch | Build | Verify | Adopt | CatchUp
"""What takes long, and needs room on the disk."""
Action = Send | Persist | Forget | CloseTraining | Notice | Work
