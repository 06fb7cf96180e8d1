"""The words of the trainer's machine: the stages of a peer's round, events that come in, actions that go out."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import Contribution, Manifest, manifest_hash
from spes_p2p.data.leases import Ranges, take
from spes_p2p.ids import Hash, PeerId


class Stage(enum.Enum):
    """Where a peer is in its round."""

    OUTSIDE = "outside"
    """The newest manifest does not name this peer: it follows the run, and trains as soon as one does."""
    TRAINING = "training"
    """Inner steps on top of a manifest."""
    HANDED_IN = "handed in"
    """What was trained is in a snapshot; the commit is waited for."""
    AHEAD = "ahead"
    """As HANDED_IN, but inner steps of the next round are made in the meantime."""
    LEAVING = "leaving"
    """As HANDED_IN, and this peer exits as soon as the run no longer counts on it."""
    LEFT = "left"


@dataclass(frozen=True)
class Uncounted:
    """Work that no round has counted yet: the tokens of its inner steps."""

    tokens: int = 0
    steps: int = 0

    def __add__(self, other: Uncounted) -> Uncounted:
        return Uncounted(self.tokens + other.tokens, self.steps + other.steps)


@dataclass(frozen=True)
class Place:
    """A place in the data: the leased positions, and how many at their front were trained on but not counted."""

    ranges: Ranges = ()
    consumed: int = 0

    def ahead_of(self, counted: int) -> Ranges:
        """What was trained on without the first `counted` positions of it."""
        return take(take(self.ranges, self.consumed)[0], counted)[1]


@dataclass(frozen=True)
class Turn:
    """One round of this peer: the manifest that it trains on top of, and the columns that it owns by it."""

    manifest: Manifest
    owned: tuple[int, ...]

    @property
    def tip_hash(self) -> Hash:
        return manifest_hash(self.manifest)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of the state that are trained: the shared one and the owned columns."""
        return self.blocks_within(self.owned)

    def blocks_within(self, columns: Collection[int]) -> tuple[int, ...]:
        """Of these, the shared one and what is among `columns`, too."""
        return (0, *(1 + column for column in self.owned if column in columns))


@dataclass(frozen=True)
class TrainingRules:
    """What a run, by its config, and the user ask of the loop. `leased`: the data is leased, not the peer's own."""

    me: PeerId
    batch_sequences: int
    sequence_tokens: int
    leased: bool = True
    overlaps: bool = False
    takes_turns: bool = False
    """A round leaves out columns, or shared values, whose turn it is not."""

    @classmethod
    def of(cls, config: Config, me: PeerId, leased: bool) -> TrainingRules:
        sync = config.sync
        return cls(
            me,
            config.optimizer.batch_sequences,
            config.data.sequence_length,
            leased,
            sync.overlap and sync.enabled,
            sync.takes_turns,
        )


# ---- events


@dataclass(frozen=True)
class Begin:
    """The state of `manifest` is here. `restored`: and everything stands where a checkpoint of it left it."""

    manifest: Manifest
    is_member: bool
    restored: Restored | None = None


@dataclass(frozen=True)
class Restored:
    """Where a checkpoint left the work of its round; `own_steps` of it are in the values."""

    place: Place
    work: Uncounted
    own_steps: int


@dataclass(frozen=True)
class StepMade:
    """An inner step took `sequences` from the lease; a skipped one (not finite) brings no tokens."""

    tokens: int
    sequences: int
    skipped: bool = False


@dataclass(frozen=True)
class RoundEnded:
    """No more steps for this round: they are made, it closes, the data ran out, or the peer pauses or leaves."""


@dataclass(frozen=True)
class GoAhead:
    """There is time until the commit: make steps of the next round, where the run allows it."""


@dataclass(frozen=True)
class Leave:
    """The peer wants to go: what it trained is handed in."""


@dataclass(frozen=True)
class Committed:
    """Rounds were committed since the last event, up to `newest`, whose state is here.

    `is_member`: the newest manifest counts on this peer. `counted` is what the first of them counted of ours;
    `had_snapshot`: it could have used what was handed in, and `uncounted` are the tiles of that which did not go in.
    `is_renewal`: `newest` is a renewal of what was trained on. `child`: the first of them, where it can be known.
    """

    newest: Manifest
    is_member: bool
    counted: Contribution | None
    had_snapshot: bool
    uncounted: frozenset[int]
    child: Manifest | None = None
    is_renewal: bool = False


@dataclass(frozen=True)
class Switched:
    """This peer stands on another history, of which `newest` is. `own_tokens`: of its own in rounds that it left."""

    newest: Manifest
    is_member: bool
    own_tokens: int


Event = Begin | StepMade | RoundEnded | GoAhead | Leave | Committed | Switched

# ---- actions


@dataclass(frozen=True)
class TakeSnapshot:
    """Keep the trained values of the turn's blocks, as what is handed in on top of its manifest."""

    turn: Turn


@dataclass(frozen=True)
class SayReady:
    """Tell the run that the snapshot is taken, with the work that is in it."""

    turn: Turn


@dataclass(frozen=True)
class StartAhead:
    """Steps from now on are those of the next round."""


@dataclass(frozen=True)
class Rebase:
    """theta <- new + (theta - old), for tiles that a round did not count (design section 4).

    `ahead` are the blocks in which then theta <- new + (theta - snapshot), for what was trained since the snapshot.
    """

    tiles: frozenset[int]
    ahead: tuple[int, ...] = ()


@dataclass(frozen=True)
class CloseTurn:
    """The turn is over: whoever needs what it began with or handed in takes it now."""


@dataclass(frozen=True)
class UseLease:
    """The next batches come from these positions."""

    place: Place


@dataclass(frozen=True)
class Load:
    """Train on the state of the turn's manifest, rebased or as it is, of which `own_steps` are made already."""

    turn: Turn
    rebase: Rebase | None
    own_steps: int
    restored: bool = False
    """Values and training state are those of a checkpoint, and here already."""


@dataclass(frozen=True)
class StandAside:
    """The newest manifest does not name this peer: nothing is trained."""

    newest: Manifest


@dataclass(frozen=True)
class Depart:
    """No peer counts on this one any more. Save `newest` and what is left of the turn's work for a later restart.

    `owned`: what a later life trains from there. The last ones to leave stay named, and may inherit columns by it.
    """

    owned: tuple[int, ...]
    newest: Manifest
    rebase: Rebase | None


@dataclass(frozen=True)
class Say:
    """What a person should know."""

    text: str


Action = TakeSnapshot | SayReady | StartAhead | CloseTurn | UseLease | Load | StandAside | Depart | Say
