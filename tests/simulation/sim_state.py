"""What stands for tensors in the simulation: hashes that are equal exactly where real bytes would be.

A reduced tile is the hash of (parent, tile, who went in with which trained values and weight); a tile of the state is
the hash of what it was and what came. Whoever computes a root from other tiles gets another root.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from spes_p2p.consensus.manifest import Manifest, Merge, Slice, manifest_hash
from spes_p2p.consensus.messages import Commit, Plan, Precommit, Renewal, Signed, Work, signing_bytes
from spes_p2p.consensus.place import Place
from spes_p2p.consensus.rules import RunRules
from spes_p2p.consensus.turns import AS_OFTEN, Vocabulary
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.data.leases import Range, take
from spes_p2p.errors import StorageFull
from spes_p2p.ids import NO_HASH, Hash, PeerId, sha256

T = TypeVar("T")
State = tuple[Hash, ...]
"""The hash of each tile of a version of the state."""
_FULL = "the disk is full"
NOTHING, VOTE, STATE = range(3)
"""What there is room for on a disk."""
RIVALS_SHARE = 0.3
"""Of all writes, how many find that others have filled or freed the disk."""
SEQUENCE_TOKENS = 8
BATCH_SEQUENCES = 2
STEPS = 4


def run_rules(
    columns: int,
    shared_tiles: int = 2,
    replicas: int = 1,
    expert_rounds: int = 1,
    vocabulary: Vocabulary = AS_OFTEN,
) -> RunRules:
    """A small run: `columns` columns of one tile each, a merge every third round."""
    return RunRules(
        fingerprint=sha256(b"simulated run"),
        block_tiles=(shared_tiles, *(1 for _ in range(columns))),
        slice_tiles=1,
        sequence_tokens=SEQUENCE_TOKENS,
        batch_sequences=BATCH_SEQUENCES,
        block_sequences=4,
        leased=True,
        target_replicas=replicas,
        steps_per_round=lambda step: STEPS,
        merge_interval=3 * STEPS,
        merge_alpha=lambda step: 0.01,
        expert_rounds=expert_rounds,
        vocabulary=vocabulary,
    )


def initial_state(rules: RunRules) -> State:
    return tuple(sha256(b"initial", bytes([tile])) for tile in range(sum(rules.block_tiles)))


def root_of(state: State) -> Hash:
    return sha256(*state)


@dataclass(frozen=True)
class Trained:
    """One snapshot of a peer's values: trained on `parent` by its `number`-th life, using these stream positions."""

    number: int
    peer: PeerId
    parent: Hash
    work: Work
    positions: tuple[Range, ...]
    poison: frozenset[int] = frozenset()
    """Blocks whose values are not finite."""


def trained_positions(manifest: Manifest, peer: PeerId, sequences: int) -> tuple[Range, ...]:
    """The stream positions that `peer` has used after so many sequences of its lease."""
    return take(manifest.leases.of(peer), sequences)[0]


def reduce_tiles(plan: Plan, piece: Slice, inputs: Sequence[Trained]) -> tuple[Hash, ...]:
    """The reduced tiles of a slice."""
    parts = b"".join(sha256(b"%d/%d" % (trained.number, trained.work.tokens)) for trained in inputs)
    return tuple(sha256(plan.parent, b"%d" % (piece.first_tile + at), parts) for at in range(piece.tiles))


def neighbours_of(columns: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return (tuple(((expert + 1) % columns,) for expert in range(columns)),)


def next_state(rules: RunRules, state: State, wire: dict[int, Hash], merge: Merge | None) -> State:
    """The state after `wire` tiles came and `merge` was done."""
    tiles = [sha256(tile, wire[at]) if at in wire else tile for at, tile in enumerate(state)]
    if merge is not None:
        first = rules.block_tiles[0]
        everything = sha256(repr(merge).encode(), *tiles[first:])
        tiles[first:] = [sha256(everything, tile) for tile in tiles[first:]]
    return tuple(tiles)


def split(hashes: bytes) -> list[Hash]:
    return [Hash(hashes[at : at + 32]) for at in range(0, len(hashes), 32)]


@dataclass
class Disk:
    """What survives a crash of one peer: the chain, the state of its tip, the voting record, and finished staging.

    `staged` holds one version of each reduced tile. `finished` is the new state computed from it, by root.
    """

    genesis: Manifest
    state: State
    incarnation: int
    chain: list[Commit] = field(default_factory=list)
    record: VoteRecord | None = None
    staged: dict[int, Hash] = field(default_factory=dict)
    finished: dict[Hash, State] = field(default_factory=dict)
    keeps_states: bool = True
    places: list[Place] = field(default_factory=list)
    """The highest place that whoever runs on this disk has stood on, if any."""
    free: int = STATE
    rivals: random.Random | None = None
    """Others on this disk, who fill and free it: whatever is written may find more room than before, or less."""

    @property
    def tip(self) -> Manifest:
        return self.chain[-1].manifest if self.chain else self.genesis

    @property
    def tip_commit(self) -> Commit | None:
        return self.chain[-1] if self.chain else None

    def manifest(self, round: int) -> Manifest:
        """That of a round up to our tip's."""
        return self.chain[round - 1].manifest if round else self.genesis

    def is_on_chain(self, head: Hash, round: int) -> bool:
        return round <= len(self.chain) and manifest_hash(self.manifest(round)) == head

    def shared_with(self, other: Disk) -> int:
        """How many commits both chains begin with."""
        pairs = zip(self.chain, other.chain, strict=False)
        different = (at for at, (a, b) in enumerate(pairs) if a.certificate.manifest != b.certificate.manifest)
        return next(different, min(len(self.chain), len(other.chain)))

    def has(self, piece: Slice, hashes: bytes) -> bool:
        """Whether these tiles of a slice are staged."""
        return all(self.staged.get(piece.first_tile + at) == tile for at, tile in enumerate(split(hashes)))

    def holds(self, manifest: Manifest) -> bool:
        """Whether the state of a manifest, or of one after it, is here whole."""
        return self.tip.round >= manifest.round or manifest.state_root in self.finished

    def check_room(self, needed: int = STATE) -> None:
        """Raises StorageFull where that cannot be written."""
        if self.rivals is not None and self.rivals.random() < RIVALS_SHARE:
            self.free = self.rivals.choice((NOTHING, NOTHING, VOTE, STATE, STATE))
        if self.free < needed:
            raise StorageFull(_FULL)

    def open(self, is_bound: Callable[[Hash], bool]) -> None:
        """Before tiles are written: a state that was finished is undone, unless the peer has signed for it."""
        self.finished = {root: state for root, state in self.finished.items() if is_bound(root)}

    def recover(self, is_bound: Callable[[Hash], bool]) -> None:
        """What a process finds after a crash: staging survives only where it is finished, and signed for."""
        self.open(is_bound)
        if not self.finished:
            self.staged.clear()

    def stage(self, piece: Slice, hashes: Sequence[Hash]) -> None:
        """Writes tiles."""
        for at, tile in enumerate(hashes):
            self.staged[piece.first_tile + at] = tile

    def finish(self, rules: RunRules, pieces: Sequence[Slice], merge: Merge | None) -> Hash:
        """Computes the new state from the staged tiles of `pieces`; the root."""
        wanted = {piece.first_tile + at for piece in pieces for at in range(piece.tiles)}
        state = next_state(rules, self.state, {at: self.staged[at] for at in sorted(wanted)}, merge)
        self.finished[root_of(state)] = state
        return root_of(state)

    def publish(self, commits: Sequence[Commit], state: State) -> None:
        self.chain.extend(commits)
        self.state = state
        self.staged.clear()
        self.finished.clear()

    def switch(self, common: int, line: Sequence[Commit], state: State) -> None:
        """Another history in the place of ours from `common` commits on."""
        del self.chain[common:]
        self.publish(line, state)

    def arrive(self, new_incarnation: Callable[[], int]) -> None:
        """A process starts: who can not stand by its votes is a new incarnation (see `joining`)."""
        parent = self.record.parent if self.record is not None else NO_HASH
        known = parent == NO_HASH or any(self.is_on_chain(parent, round) for round in range(len(self.chain), -1, -1))
        if not known:
            self.record, self.incarnation = None, new_incarnation()


class FakeSealer:
    """Signs with a hash where a certificate will need the signature; else keeps the author only."""

    def __init__(self, peer: PeerId) -> None:
        self._peer = peer

    def seal(self, value: T) -> Signed[T]:
        signature = b""
        if isinstance(value, Precommit | Renewal):
            signature = sha256(self._peer.encode(), signing_bytes(value))
        return Signed(value, self._peer, b"", signature)


def check_fake(peer: PeerId, public_key: bytes, data: bytes, signature: bytes) -> bool:
    return signature == sha256(peer.encode(), data)
