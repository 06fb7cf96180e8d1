"""What can happen to a peer, as `Consensus.handle` takes it. Frozen: it can be written down and handled again."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.consensus.actions import Build
from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.manifest import Manifest, Merge
from spes_p2p.consensus.membership import Roll
from spes_p2p.consensus.messages import Commit, DecayOrder, Intent, Report, Signed, Work
from spes_p2p.consensus.state import Key
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.ids import Hash, PeerId


@dataclass(frozen=True)
class MessageReceived:
    """A message came. Its signatures were checked; nothing else was."""

    envelope: Envelope


@dataclass(frozen=True)
class ReplyRequested:
    """A peer has just sent us something and waits for an answer: the one `Send` that comes of it."""

    peer: PeerId


@dataclass(frozen=True)
class ClockTicked:
    """Time passed; to be told at least once a heartbeat."""


@dataclass(frozen=True)
class TrainingProgressed:
    """How far the trainer is in this round; `work.ready` when it stopped."""

    work: Work


@dataclass(frozen=True)
class SliceReduced:
    """A slice was reduced here and its tiles are staged; without contributors: nobody's values were fit."""

    report: Report


@dataclass(frozen=True)
class SliceStaged:
    """The tiles of a slice are on disk; `hashes` concatenates theirs."""

    key: Key
    hashes: bytes


@dataclass(frozen=True)
class FetchFailed:
    """No holder could give the tiles of a slice; or it came, and `is_unfit`: its reducer handed out what is no mean."""

    key: Key
    is_unfit: bool = False


@dataclass(frozen=True)
class StagingFailed:
    """The tiles of a slice came and could not be staged: this peer's own disk is at fault, not who sent them."""

    key: Key


@dataclass(frozen=True)
class SlicesLost:
    """These slices are not on disk any more and nobody gave them."""

    keys: tuple[Key, ...]


@dataclass(frozen=True)
class StateBuilt:
    """The new state was computed here from the slices of `build`."""

    build: Build
    wire_root: Hash
    state_root: Hash
    merge: Merge | None


@dataclass(frozen=True)
class StateVerified:
    """The state that a manifest, by its hash, names is on disk here, with equal roots."""

    manifest: Hash


@dataclass(frozen=True)
class VerifyFailed:
    """The state could not be brought to the proposed root."""


@dataclass(frozen=True)
class StateLost:
    """States with these roots, which were verified, are not whole on disk any more."""

    state_roots: tuple[Hash, ...]


@dataclass(frozen=True)
class HostRefusedDial:
    """The host of a peer refused a fresh dial: its process is gone."""

    peer: PeerId


@dataclass(frozen=True)
class BytesMoved:
    """Bytes of this round moved here."""


@dataclass(frozen=True)
class CommitApplied:
    """`commit` is the committed state here, whether voted or caught up with."""

    commit: Commit


@dataclass(frozen=True)
class HistorySwitched:
    """Another history goes before ours: `commit` is the committed state here, in the place of our rounds."""

    commit: Commit


@dataclass(frozen=True)
class HeavierFound:
    """The certificates of another history that goes before ours are checked; the state of its `manifest` comes next."""

    manifest: Manifest


@dataclass(frozen=True)
class LighterFound:
    """The history that ends in `tip_hash` does not go before ours, now that its certificates are checked."""

    tip_hash: Hash


@dataclass(frozen=True)
class CatchUpFailed:
    """The holder could not serve what it said it has; or, `is_ours`, we broke it off for our own child."""

    is_ours: bool = False


@dataclass(frozen=True)
class AdoptFailed:
    """The state of the certified child is not whole on disk any more."""


@dataclass(frozen=True)
class IncarnationBegun:
    """The voting record has been deleted from disk: this incarnation is a newcomer (see the action `Forget`)."""

    incarnation: int


@dataclass(frozen=True)
class DiskFull:
    """No room. `durable` is the voting record that is on disk."""

    durable: VoteRecord


@dataclass(frozen=True)
class DiskHasRoom:
    """There may be room again; `for_state`: so much is free that a state fits."""

    for_state: bool = False


@dataclass(frozen=True)
class DecayOrdered:
    """The organiser has signed that the learning rate falls from the next manifest on."""

    order: Signed[DecayOrder]


@dataclass(frozen=True)
class RollSigned:
    """The organiser has signed whom it vouches for and whom it bans; the signature was checked."""

    roll: Signed[Roll]


@dataclass(frozen=True)
class PeersFound:
    """Peers of the run that were found somewhere: those who are no members hear our next statuses."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True)
class UplinkMeasured:
    """This peer's measured uplink in the last round; due with READY at the latest, for the next plan."""

    bytes_per_second: int


@dataclass(frozen=True)
class IntentChanged:
    """What this peer wants has changed (join, leave, claims)."""

    intent: Intent


Event = (
    MessageReceived
    | ReplyRequested
    | ClockTicked
    | TrainingProgressed
    | SliceReduced
    | SliceStaged
    | FetchFailed
    | StagingFailed
    | SlicesLost
    | StateBuilt
    | StateVerified
    | VerifyFailed
    | StateLost
    | HostRefusedDial
    | BytesMoved
    | CommitApplied
    | HistorySwitched
    | HeavierFound
    | LighterFound
    | CatchUpFailed
    | AdoptFailed
    | IncarnationBegun
    | DiskFull
    | DiskHasRoom
    | DecayOrdered
    | RollSigned
    | PeersFound
    | UplinkMeasured
    | IntentChanged
)
