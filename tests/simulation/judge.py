"""What must never happen in a run of the protocol, checked from outside while a simulation goes on.

The judge sees every durable voting record, every message as it leaves and every commit as it is made. It knows the
truth that no peer has: who was up when, who heard whom. See docs/protocol.md, "What is checked".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spes_p2p.consensus.child_checks import check_commit
from spes_p2p.consensus.columns import lost_columns
from spes_p2p.consensus.content import Envelope
from spes_p2p.consensus.electorate import NIL
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import electors
from spes_p2p.consensus.messages import QUORUM, RENEWAL, Certificate, Commit, Precommit, Prevote, Proposal, Signed
from spes_p2p.consensus.place import Line, goes_before, place_of
from spes_p2p.consensus.rules import RunRules, idle_members, neglected_columns
from spes_p2p.consensus.vote_record import VoteRecord, ballot_of
from spes_p2p.data.leases import Ranges, joined
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Hash, PeerId, sha256, short
from tests.simulation.sim_state import Disk, State, Trained, check_fake, next_state, root_of, split, trained_positions

AnyWord = Signed[Prevote] | Signed[Precommit] | Signed[Proposal]


class Violation(AssertionError):
    """The protocol did what it must never do. `kind` is one word."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass
class VoteHistory:
    """All that one elector made durable for the child of one manifest: its words in each ballot, and its lock."""

    prevotes: dict[int, Hash] = field(default_factory=dict)
    precommits: dict[int, Hash] = field(default_factory=dict)
    proposals: dict[int, Hash] = field(default_factory=dict)
    locked: tuple[int, Hash] = (-1, NIL)

    def has_said(self, signed: AnyWord) -> bool:
        """Whether this very word was written down."""
        match signed.value:
            case Prevote():
                said = self.prevotes
            case Precommit():
                said = self.precommits
            case Proposal():
                said = self.proposals
        return said.get(signed.value.ballot) == signed.value.value

    def words_of(self, record: VoteRecord) -> tuple[tuple[dict[int, Hash], AnyWord | None], ...]:
        """What is kept of each kind of word, and the newest one."""
        return (
            (self.prevotes, record.prevote),
            (self.precommits, record.precommit),
            (self.proposals, record.proposal),
        )


@dataclass
class Known:
    """A manifest that was committed, with what follows from it."""

    manifest: Manifest
    state: State
    used: Ranges
    certificates: list[Certificate] = field(default_factory=list)


def _note(who: str, said: dict[int, Hash], signed: AnyWord | None) -> None:
    """One word a ballot, ever, and none that is taken back."""
    newest = ballot_of(signed)
    if newest < max(said, default=-1):
        raise Violation("votes", f"{who} forgot what it said in ballot {max(said)}")
    if signed is not None and said.setdefault(newest, signed.value.value) != signed.value.value:
        raise Violation("votes", f"{who} said two things in ballot {newest}")


class Judge:
    """Checks one simulated run; raises Violation."""

    def __init__(self, rules: RunRules, genesis: Manifest, state: State) -> None:
        self.rules = rules
        self.known: dict[Hash, Known] = {manifest_hash(genesis): Known(genesis, state, ())}
        self.children: dict[Hash, list[Hash]] = {}
        self.forks: list[tuple[Hash, Hash]] = []
        self.lost_tokens = 0
        """Counted on lines that somebody has left, the most of them."""
        self.copies: set[PeerId] = set()
        """Whose disk was an old copy: it may sign twice."""
        self.liars: set[PeerId] = set()
        """Who may say what others refuse."""
        self.reduced: dict[Hash, tuple[Trained, ...]] = {}
        self.wires: dict[Hash, tuple[Hash, ...]] = {}
        self._histories: dict[tuple[PeerId, int, Hash], VoteHistory] = {}
        self._seen: dict[int, Certificate] = {}
        self._proposed: set[Hash] = set()

    # ---------------------------------------------------------------- votes

    def saw_record(self, peer: PeerId, record: VoteRecord, disk: Disk) -> None:
        """A voting record became durable."""
        if peer in self.liars:
            return
        history = self._histories.setdefault((peer, disk.incarnation, record.parent), VoteHistory())
        who = f"{peer} for the child of {short(record.parent)}"
        if ballot_of(record.prevote) not in history.prevotes:
            self._check_staged(who, record, disk)
        for said, signed in history.words_of(record):
            _note(who, said, signed)
        if record.locked_ballot < history.locked[0]:
            raise Violation("lock", f"{who} goes back to an earlier lock than that of ballot {history.locked[0]}")
        history.locked = record.locked_ballot, record.locked_value
        precommit = record.precommit
        if precommit is not None and precommit.value.value != NIL and record.locked_ballot < precommit.value.ballot:
            raise Violation("lock", f"{who} precommits in ballot {precommit.value.ballot} and is not locked there")

    @staticmethod
    def _check_staged(who: str, record: VoteRecord, disk: Disk) -> None:
        """What is voted for is on disk."""
        vote = record.prevote
        if vote is None or vote.value.value == NIL:
            return
        roots = {manifest_hash(content.manifest): content.manifest.state_root for content in record.contents}
        if roots.get(vote.value.value) not in disk.finished:
            raise Violation("staging", f"{who} prevotes in ballot {vote.value.ballot} what is not on its disk")

    def saw_message(self, peer: PeerId, envelope: Envelope, disk: Disk) -> None:
        """A message is about to leave `peer`: nothing in it may go beyond what is durable."""
        if peer in self.liars:
            return
        for votes in envelope.votes:
            for signed in (votes.prevote, votes.precommit, votes.proposal):
                if signed is not None and signed.author == peer and not self._is_durable(peer, signed):
                    raise Violation(
                        "durability", f"{peer} says in ballot {signed.value.ballot} what is not on its disk"
                    )
        for status in envelope.statuses[:1]:
            ballots, record = status.value.ballots, disk.record
            durable = record if record is not None and record.parent == status.value.head else None
            prevoted, precommitted = (ballot_of(durable.prevote), ballot_of(durable.precommit)) if durable else (-1, -1)
            if ballots.prevoted > prevoted or ballots.precommitted > precommitted:
                raise Violation("durability", f"{peer} tells of votes that are not on its disk")

    def _is_durable(self, peer: PeerId, signed: AnyWord) -> bool:
        """Whether some incarnation of it has written this down: what one has said another one may pass on."""
        lives = [
            kept for (who, _, parent), kept in self._histories.items() if (who, parent) == (peer, signed.value.parent)
        ]
        return any(kept.has_said(signed) for kept in lives)

    def saw_contents(self, peer: PeerId, envelope: Envelope, disk: Disk) -> None:
        """Who proposes what nobody has proposed before has made it."""
        proposed = {v.proposal.value.value for v in envelope.votes if v.proposal and v.proposal.author == peer}
        for content in envelope.contents:
            manifest, name = content.manifest, manifest_hash(content.manifest)
            pairs = zip(manifest.slices, content.wire_hashes, strict=True)
            whole = all(disk.has(piece, tiles) for piece, tiles in pairs)
            is_new = name in proposed and name not in self._proposed
            if is_new and not whole and manifest.state_root not in disk.finished and peer not in self.liars:
                raise Violation("staging", f"{peer} proposes a state that it has not on its disk")
            self._proposed.add(name)

    # ---------------------------------------------------------------- commits

    def saw_commit(self, commit: Commit) -> None:
        """Somebody has this commit: it must follow from its parent, and be the only one by a quorum."""
        certificate = commit.certificate
        if id(certificate) in self._seen:
            return
        self._seen[id(certificate)] = certificate
        name = manifest_hash(commit.manifest)
        parent = self.known.get(certificate.parent)
        if parent is None:
            raise Violation("orphan", f"round {commit.manifest.round} was committed on an unknown parent")
        try:
            check_commit(self.rules, parent.manifest, commit, check_fake)
        except RemoteProtocolError as error:
            raise Violation("certificate", str(error)) from error
        self._check_turns(parent.manifest, commit.manifest)
        _check_servers(parent.manifest, commit.manifest)
        if name not in self.known:
            self.known[name] = self._follow(parent, commit.manifest)
        self.known[name].certificates.append(certificate)
        siblings = self.children.setdefault(certificate.parent, [])
        if name not in siblings:
            siblings.append(name)
        self._check_siblings(certificate, name, siblings)

    def _check_turns(self, parent: Manifest, child: Manifest) -> None:
        """Checks that no owner that stays loses a column before handing out its newest values, unless it is idle."""
        members = {member.peer for member in child.members}
        neglected = neglected_columns(self.rules, parent, idle_members(parent, child.roster, child.members))
        for column in set(lost_columns(parent, child)) - neglected if self.rules.expert_rounds > 1 else ():
            if members & set(parent.ownership[column]) - set(child.ownership[column]):
                raise Violation("turns", f"round {child.round} takes column {column} from one who did not hand it out")

    def saw_switch(self, peer: PeerId, common: Manifest, left: Line, taken: Line) -> None:
        """A peer goes over to another history: only upwards, and work is lost only where a renewal was signed."""
        if not goes_before(taken, left, common, self.rules.faults):
            raise Violation("lower", f"{peer} leaves {len(left)} rounds for a history that does not go before them")
        kinds = {line[0].certificate.kind for line in (left, taken) if line}
        if RENEWAL not in kinds and not self.copies and not self.liars:
            raise Violation("fork", f"{peer} leaves what a quorum has committed, and nobody has signed a renewal")
        self.lost_tokens = max(self.lost_tokens, left[-1].manifest.tokens - common.tokens if left else 0)

    def saw_place(self, peer: PeerId, manifest: Manifest, disk: Disk) -> None:
        """A peer stands on `manifest`: its place only rises, as long as it has its disk."""
        place = place_of(manifest)
        if disk.places and disk.keeps_states and place < disk.places[-1] and manifest.roll is None:
            raise Violation("place", f"{peer} stands on round {manifest.round}, and stood higher before")
        disk.places = [place]

    def _check_siblings(self, certificate: Certificate, name: Hash, siblings: list[Hash]) -> None:
        """Two children of one parent by quorums: only where somebody lies, or its disk is an old copy."""
        for other in siblings:
            if other == name:
                continue
            for theirs in self.known[other].certificates:
                both = {seal.peer for seal in certificate.seals} & {seal.peer for seal in theirs.seals}
                is_twin = certificate.kind == theirs.kind == QUORUM
                if is_twin and not both & (self.copies | self.liars):
                    raise Violation("conflict", f"{_describe(certificate)} and {_describe(theirs)} on one parent")
            if (other, name) not in self.forks and (name, other) not in self.forks:
                self.forks.append((other, name))

    def _follow(self, parent: Known, child: Manifest) -> Known:
        """State, data and tokens of a child, worked out independently of the peers."""
        hashes = self.wires.get(child.wire_root) if child.slices else ()
        if hashes is None:
            raise Violation("state", f"round {child.round} has tiles that nobody built")
        wire = dict(zip((p.first_tile + at for p in child.slices for at in range(p.tiles)), hashes, strict=True))
        state = next_state(self.rules, parent.state, wire, child.merge)
        if root_of(state) != child.state_root:
            raise Violation("state", f"the root of round {child.round} is not that of its tiles")
        for piece in child.slices:
            for at in range(piece.tiles):
                went_in = self.reduced[wire[piece.first_tile + at]]
                if tuple(trained.peer for trained in went_in) != piece.contributors:
                    raise Violation("state", f"slice {piece.key} has other contributors than its manifest says")
                for trained in went_in:
                    self._check_counted(parent.manifest, child, trained)
        return Known(child, state, self._check_data(parent, child))

    def _check_counted(self, parent: Manifest, child: Manifest, trained: Trained) -> None:
        """What went in is what the roster counts."""
        entry = next((entry for entry in child.roster if entry.peer == trained.peer), None)
        if entry is None or (entry.tokens, entry.steps) != (trained.work.tokens, trained.work.steps):
            raise Violation("data", f"round {child.round} counts other work of {trained.peer} than went in")
        if trained_positions(parent, trained.peer, entry.sequences) != trained.positions:
            raise Violation("data", f"round {child.round} counts other data of {trained.peer} than it used")

    def _check_data(self, parent: Known, child: Manifest) -> Ranges:
        """Used, held and returned positions are a partition of what lies below the cursor."""
        now_used = [
            span for entry in child.roster for span in trained_positions(parent.manifest, entry.peer, entry.sequences)
        ]
        used = joined(sorted([*parent.used, *now_used]))
        leases = child.leases
        spans = sorted([*used, *leases.returned, *(span for _, held in leases.held for span in held)])
        if joined(spans) != (((0, leases.cursor),) if leases.cursor else ()):
            raise Violation("data", f"round {child.round} loses data, or counts some of it twice")
        return used

    def saw_state(self, peer: PeerId, manifest: Manifest, state: State) -> None:
        """`peer` stands on `manifest` with `state`."""
        known = self.known.get(manifest_hash(manifest))
        if known is None or known.state != state:
            raise Violation("state", f"{peer} stands on round {manifest.round} with another state")

    def saw_build(self, hashes: tuple[bytes, ...]) -> Hash:
        """A leader computed a state from these tiles; the root of their list."""
        tiles = tuple(tile for part in hashes for tile in split(part))
        root = sha256(*hashes)
        self.wires[root] = tiles
        return root


def _check_servers(parent: Manifest, child: Manifest) -> None:
    """Who only serves has no work counted, owns nothing and leases nothing; nobody changes over."""
    before = {member.peer for member in parent.members if not member.trains}
    serving = {member.peer for member in child.members if not member.trains}
    counted = {entry.peer for entry in child.roster} | {p for piece in child.slices for p in piece.contributors}
    given = {owner for owners in child.ownership for owner in owners} | {peer for peer, _ in child.leases.held}
    if counted & before or given & serving:
        raise Violation("serving", f"round {child.round} takes {sorted(counted & before | given & serving)} to train")
    known = {(member.peer, member.incarnation): member.trains for member in parent.members}
    for member in child.members:
        if known.get((member.peer, member.incarnation), member.trains) != member.trains:
            raise Violation("serving", f"round {child.round} has {member.peer} change between training and serving")


def voters(manifest: Manifest) -> dict[PeerId, int]:
    """The electors that a manifest names, with their incarnations."""
    return {member.peer: member.incarnation for member in electors(manifest.members)}


def _describe(certificate: Certificate) -> str:
    signers = ",".join(seal.peer for seal in certificate.seals)
    return f"{certificate.kind} commit of {short(certificate.manifest)} at ballot {certificate.ballot} by {signers}"
