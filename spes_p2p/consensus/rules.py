"""What a child manifest must look like, given its parent: pure derivations, used to build one and to check one.

Leaders call `child_manifest`, electors `check_child` (`child_checks.py`): what can be derived is derived by both in the
same code. What is the leader's to say (who was heard, which slices came about, which neighbours merge) is checked for
sense only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from spes_p2p.consensus.electorate import Faults, SealRule
from spes_p2p.consensus.manifest import (
    WIRE_VERSION,
    Contribution,
    Credit,
    Decay,
    Manifest,
    Merge,
    Slice,
    manifest_hash,
)
from spes_p2p.consensus.membership import (
    Admission,
    Member,
    Roll,
    newest_roll,
    trainers,
    with_votes,
)
from spes_p2p.consensus.messages import Work
from spes_p2p.consensus.place import counted_in
from spes_p2p.consensus.turns import AS_OFTEN, Ranges, Vocabulary, due_tiles
from spes_p2p.consensus.weights import next_step
from spes_p2p.data.leases import Leases, next_leases
from spes_p2p.ids import NO_HASH, NOBODY, Hash, PeerId, sha256
from spes_p2p.ownership.assign import Ownership, OwnershipRequest, assign, columns_of, nobody

EPOCH_ROUNDS = 64
"""For so many rounds the same electors are drawn where too many may vote."""
IDLE_TURNS = 3
"""How many turns a column may go without a new version before owners that train nothing lose it."""
MOST_ROUNDS = 8
"""Rounds of work that one claim may be worth: honest ones bring two, and more after rounds that did not count them."""


@dataclass(frozen=True)
class RunRules:
    """What all peers of a run agree on, as far as rounds need it (derived from the config).

    `block_tiles[b]` counts the tiles of block b; `sequence_tokens` is the length of a sequence; `batch_sequences` what
    a peer trains in one inner step; `leased` is false where peers bring data of their own.
    """

    fingerprint: Hash
    block_tiles: tuple[int, ...]
    slice_tiles: int
    sequence_tokens: int
    batch_sequences: int
    block_sequences: int
    leased: bool
    target_replicas: int
    steps_per_round: Callable[[int], int]
    merge_interval: int
    merge_alpha: Callable[[int], float]
    exchange: bool = True
    """False: a round only counts tokens and leases data; nobody's values go anywhere (a control experiment)."""
    expert_rounds: int = 1
    """Each column is handed out in every so many rounds."""
    vocabulary: Vocabulary = AS_OFTEN
    """The shared tiles that are averaged more seldom than once a round."""
    outer: tuple[float, float] | None = None
    """(learning rate, momentum) of the outer optimizer, if there is one."""
    faults: Faults = Faults.CRASH
    """What electors may do wrong, and so what is a quorum of them."""
    organiser: PeerId = NOBODY
    """Who may name other electors alone (see `renewed_manifest`); nobody in a run without an organiser."""
    has_strangers: bool = False
    """Trusted is only for whom the organiser vouches, and itself; else every member is."""
    renew_after_seconds: float = 60.0
    """How long a quorum is missed until the organiser's node names other electors (see `renewing`)."""

    @property
    def seals(self) -> SealRule:
        """Whose seals commit a manifest."""
        return SealRule(self.organiser, self.faults)

    def admission(self, roll: Roll | None, round: int = 0) -> Admission:
        """Who may take part and is trusted by this roll in a manifest of `round`."""
        epoch = sha256(self.fingerprint, (round // EPOCH_ROUNDS).to_bytes(8, "big"))
        return Admission(roll, self.has_strangers, self.organiser, epoch)

    def admission_of(self, manifest: Manifest) -> Admission:
        """Who may take part and is trusted by what `manifest` says."""
        return self.admission(manifest.roll, manifest.round)

    def due_shared(self, round: int) -> Ranges:
        """The shared tiles that are averaged in a round."""
        return due_tiles(self.block_tiles[0] if self.exchange else 0, round, self.vocabulary)

    @property
    def shared_share(self) -> float:
        """Of the shared tiles, how many are averaged in a round, on average."""
        return 1 - self.vocabulary.tiles * (1 - 1 / self.vocabulary.rounds) / max(1, self.block_tiles[0])

    def rounds_between(self, piece: Slice) -> int:
        """From one round that brings the tiles of a slice to the next."""
        if piece.block:
            return self.expert_rounds
        return self.vocabulary.rounds if piece.first_tile < self.vocabulary.tiles else 1

    @property
    def fewest_renewed(self) -> int:
        """A renewal names so many electors at least: one alone might be the one that lies."""
        return 2 if self.faults is Faults.BYZANTINE else 1

    @property
    def num_columns(self) -> int:
        return len(self.block_tiles) - 1


def merge_alpha_for(rules: RunRules, step_before: int, step_after: int) -> float:
    """Alpha of the merge that a round carries, 0.0 when none is due."""
    if rules.merge_interval <= 0 or step_after // rules.merge_interval == step_before // rules.merge_interval:
        return 0.0
    return max(0.0, rules.merge_alpha(step_after))


def demand(rules: RunRules, step: int, members: Sequence[Member], roster: Sequence[Contribution]) -> dict[PeerId, int]:
    """Sequences that each member that trains will use in the next round: those of this one, or a full round.

    Bounded: a lease is twice the demand, so that who says each time that it used it all would have it double for ever.
    """
    full_round = rules.steps_per_round(step) * rules.batch_sequences
    used = {entry.peer: min(entry.sequences, MOST_ROUNDS * full_round) for entry in roster}
    return {member.peer: max(used.get(member.peer, 0), full_round) for member in trainers(members)}


def leases_after(
    rules: RunRules, leases: Leases, step: int, members: Sequence[Member], roster: Sequence[Contribution]
) -> Leases:
    """Leases for the next round: used sequences are gone, those of peers that are gone come back first."""
    if not rules.leased:
        return leases
    used = {entry.peer: entry.sequences for entry in roster}
    peers = [member.peer for member in trainers(members)]
    return next_leases(leases, used, peers, demand(rules, step, members, roster), rules.block_sequences)


def capped_tokens(rules: RunRules, parent: Manifest, entry: Contribution) -> Contribution:
    """The same entry with its claim capped by what its lease could have given; without one, by MOST_ROUNDS rounds.

    A peer with data of its own takes no sequences from its lease. Steps are capped too: they move the global step, and
    a change is judged by how many of them made it.
    """
    steps = min(entry.steps, MOST_ROUNDS * parent.steps_per_round)
    if not rules.leased or entry.sequences == 0:
        trained = steps * rules.batch_sequences * rules.sequence_tokens
        return replace(entry, steps=steps, sequences=0, tokens=min(entry.tokens, trained))
    held = dict(parent.leases.held).get(entry.peer, ())
    sequences = min(entry.sequences, sum(stop - start for start, stop in held))
    steps = min(steps, -(-sequences // rules.batch_sequences))
    return replace(entry, steps=steps, sequences=sequences, tokens=min(entry.tokens, sequences * rules.sequence_tokens))


def counts(rules: RunRules, parent: Manifest, entry: Contribution, work: Work) -> bool:
    """Whether `work` is what a plan counts as `entry`: another life of the same peer may have done other work."""
    mine = Contribution(entry.peer, work.tokens, work.steps, work.sequences)
    return capped_tokens(rules, parent, mine) == entry


@dataclass(frozen=True)
class Outcome:
    """What the leader found in a round: the part of a manifest that is not derived.

    `decay_steps`: over how many steps the learning rate falls from now on, 0 where nobody says so. `roll`: whom the
    organiser vouches for and bans from now on. `strangers`: see `Manifest`.
    """

    roster: tuple[Contribution, ...]
    slices: tuple[Slice, ...]
    wire_root: Hash
    state_root: Hash
    merge: Merge | None
    decay_steps: int = 0
    roll: Roll | None = None
    strangers: tuple[Credit, ...] = ()


def child_manifest(
    rules: RunRules,
    parent: Manifest,
    outcome: Outcome,
    members: tuple[Member, ...],
    wishes: Mapping[PeerId, OwnershipRequest],
) -> Manifest:
    """The manifest that commits `outcome` on top of `parent`, with `members` for the next round."""
    idle = idle_members(parent, outcome.roster, members)
    neglected = neglected_columns(rules, parent, idle)
    kept = frozenset[int]()
    if rules.expert_rounds > 1:  # an owner may be rounds ahead: nobody takes over what was not handed out
        kept = frozenset(range(rules.num_columns)) - {piece.block - 1 for piece in outcome.slices} - neglected
    fitting = {
        peer: _without_more(wish, columns_of(parent.ownership, peer), neglected) if peer in idle else wish
        for peer, wish in wishes.items()
    }
    strangers = rules.admission(outcome.roll).strangers_of(fitting)
    ownership = assign(parent.ownership, fitting, rules.target_replicas, kept, strangers)
    return derived(rules, parent, outcome, members, ownership)


def idle_members(parent: Manifest, roster: Sequence[Contribution], members: Sequence[Member]) -> frozenset[PeerId]:
    """Who trained nothing that this round or the one before it counted, while others did and it was a member."""
    if not (roster and parent.roster):
        return frozenset()
    trained = {entry.peer for entry in (*roster, *parent.roster)}
    known = {(member.peer, member.incarnation) for member in parent.members}
    return frozenset(m.peer for m in members if (m.peer, m.incarnation) in known and m.peer not in trained)


def neglected_columns(rules: RunRules, parent: Manifest, idle: Collection[PeerId]) -> frozenset[int]:
    """Columns whose trusted owners are idle, and no new version in IDLE_TURNS turns with that of `parent`'s child."""
    oldest = parent.round + 1 - IDLE_TURNS * rules.expert_rounds
    columns = enumerate(zip(parent.ownership, parent.column_rounds, strict=True))
    strangers = rules.admission_of(parent).strangers_of(owner for owners in parent.ownership for owner in owners)
    useless = strangers.union(idle)  # of strangers alone nothing is made
    return frozenset(at for at, (owners, last) in columns if owners and last <= oldest and useless.issuperset(owners))


def _without_more(wish: OwnershipRequest, owned: Collection[int], neglected: Collection[int]) -> OwnershipRequest:
    """An idle peer's wish: only the columns that it has and does not neglect, or it would be the first to get more."""
    left = set(owned) - set(neglected)
    releases = tuple(sorted({*wish.releases, *set(owned) & set(neglected)}))
    return replace(wish, max_columns=min(wish.max_columns, len(left)), releases=releases)


def derived(
    rules: RunRules, parent: Manifest, outcome: Outcome, members: tuple[Member, ...], ownership: Ownership
) -> Manifest:
    step = next_step(parent.step, outcome.roster, rules.admission_of(parent))
    fresh = {piece.block - 1 for piece in outcome.slices if piece.block > 0}
    return Manifest(
        wire_version=WIRE_VERSION,
        fingerprint=rules.fingerprint,
        round=parent.round + 1,
        parent=manifest_hash(parent),
        step=step,
        tokens=parent.tokens + sum(entry.tokens for entry in outcome.roster),
        counted=parent.counted + counted_in(outcome.roster, rules.admission_of(parent)),
        roster=outcome.roster,
        slices=outcome.slices,
        wire_root=outcome.wire_root,
        state_root=outcome.state_root,
        merge=outcome.merge,
        members=members,
        ownership=ownership,
        column_rounds=tuple(
            parent.round + 1 if column in fresh else last for column, last in enumerate(parent.column_rounds)
        ),
        leases=leases_after(rules, parent.leases, step, members, outcome.roster),
        steps_per_round=rules.steps_per_round(step),
        decay=parent.decay or (Decay(step, outcome.decay_steps) if outcome.decay_steps else None),
        roll=outcome.roll,
        strangers=outcome.strangers,
    )


def genesis_manifest(
    rules: RunRules,
    state_root: Hash,
    members: Sequence[Member],
    wishes: Mapping[PeerId, OwnershipRequest],
    roll: Roll | None = None,
) -> Manifest:
    """Manifest 0: the initial state, the first members (electors, all that may vote), ownership and leases."""
    first = with_votes((), sorted(members), rules.admission(roll))
    return Manifest(
        wire_version=WIRE_VERSION,
        fingerprint=rules.fingerprint,
        round=0,
        parent=NO_HASH,
        step=0,
        tokens=0,
        counted=0,
        roster=(),
        slices=(),
        wire_root=sha256(),
        state_root=state_root,
        merge=None,
        members=first,
        ownership=assign(
            nobody(rules.num_columns),
            wishes,
            rules.target_replicas,
            strangers=rules.admission(roll).strangers_of(wishes),
        ),
        column_rounds=(0,) * rules.num_columns,
        leases=leases_after(rules, Leases(0, (), ()), 0, first, ()),
        steps_per_round=rules.steps_per_round(0),
        decay=None,
        roll=roll,
    )


def renewed_manifest(
    rules: RunRules,
    parent: Manifest,
    chosen: Collection[PeerId],
    newcomers: Sequence[Member] = (),
    roll: Roll | None = None,
) -> Manifest:
    """The child with which a run goes on where a quorum is lost: only who votes is another, and the organiser's roll.

    `chosen` vote on what follows. `newcomers` become members: where nobody else has the state.
    """
    named = {member.peer: member for member in parent.members} | {member.peer: member for member in newcomers}
    members = tuple(replace(named[peer], elector=peer in chosen) for peer in sorted(named))
    newest = newest_roll(parent.roll, roll)
    return replace(
        parent,
        round=parent.round + 1,
        parent=manifest_hash(parent),
        roster=(),
        slices=(),
        wire_root=sha256(),
        merge=None,
        members=members,
        roll=newest,
    )
