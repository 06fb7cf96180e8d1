"""A short valid chain of one peer's run, made without any network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from spes_p2p.config.schema import Config
from spes_p2p.consensus.manifest import (
    Contribution,
    Manifest,
    Slice,
    manifest_hash,
)
from spes_p2p.consensus.membership import Member
from spes_p2p.consensus.messages import (
    QUORUM,
    Certificate,
    Commit,
    Precommit,
    Seal,
)
from spes_p2p.consensus.renewing import signed_renewal
from spes_p2p.consensus.rules import Outcome, child_manifest, genesis_manifest, renewed_manifest
from spes_p2p.consensus.slices import plan_slices
from spes_p2p.ids import PeerId, sha256
from spes_p2p.interop.hf import state_layout
from spes_p2p.ownership.assign import OwnershipRequest
from spes_p2p.state.initial import InitialState
from spes_p2p.state.store import StateStore
from spes_p2p.swarm.memory_backend import FakeKeys
from spes_p2p.sync.genesis import describe_run, sign_genesis
from spes_p2p.sync.node import rules_of
from spes_p2p.sync.sealing import KeySealer
from tests.sync.swarm_cases import small_config

ORGANISER, A, B = PeerId("organiser"), PeerId("a"), PeerId("b")


class MadeRun:
    """A run of peer a (and its organiser), with everything to make commits by hand."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or small_config(peers=1)
        self.keys = FakeKeys()
        self.layout = state_layout(self.config)
        self.info = describe_run(self.config, sha256(b"data"), ORGANISER)
        self.rules = rules_of(self.config, self.info, self.layout)
        self.initial = InitialState(self.layout, self.config.run.seed, self.config.model.init_std)

    def sealer(self, peer: PeerId) -> KeySealer:
        return KeySealer(self.keys.signer(peer))

    def store(self, folder: Path) -> StateStore:
        """A store with the initial state."""
        store = StateStore(folder, self.layout)
        store.create_initial(self.initial)
        return store

    def genesis(self, root: bytes, signer: PeerId = ORGANISER) -> Commit:
        members = [Member(A, 1, True, 0)]
        manifest = genesis_manifest(self.rules, root, members, {A: OwnershipRequest(self.layout.num_columns)})  # type: ignore[arg-type]
        return sign_genesis(manifest, signer, self.sealer(signer))

    def slices(self, parent: Manifest) -> tuple[Slice, ...]:
        return plan_slices([A], parent.ownership, {}, self.rules.block_tiles, self.rules.slice_tiles)

    def child(self, parent: Manifest, root: bytes, wire_root: bytes) -> Manifest:
        """What one round of peer a leads to."""
        roster = (Contribution(A, 8 * self.config.data.sequence_length, 1, 8),)
        outcome = Outcome(roster, self.slices(parent), wire_root, root, None)  # type: ignore[arg-type]
        wishes = {A: OwnershipRequest(self.layout.num_columns)}
        return child_manifest(self.rules, parent, outcome, parent.members, wishes)

    def certified(self, manifest: Manifest, signer: PeerId = A) -> Commit:
        name = manifest_hash(manifest)
        signed = self.sealer(signer).seal(Precommit(self.info.fingerprint, manifest.parent, 0, name))
        seal = Seal(signed.author, signed.public_key, signed.signature)
        return Commit(Certificate(manifest.parent, QUORUM, 0, name, (seal,)), manifest)

    def renewal(self, parent: Manifest, *chosen: PeerId) -> Commit:
        """By the organiser's key."""
        manifest = renewed_manifest(self.rules, parent, chosen or (A,))
        return signed_renewal(manifest, ORGANISER, self.sealer(ORGANISER))

    def chain(self, length: int) -> list[Commit]:
        """Commits with roots that stand for no state; no merge falls due."""
        commits = [self.genesis(sha256(b"state 0"))]
        for round in range(1, length):
            manifest = self.child(commits[-1].manifest, sha256(b"state %d" % round), sha256(b"wire"))
            commits.append(self.certified(manifest))
        return commits


def with_tokens(commit: Commit, tokens: int) -> Commit:
    """The same commit with another number in it: its certificate does not fit any more."""
    return replace(commit, manifest=replace(commit.manifest, tokens=tokens))
