"""Proofs of fraud: a file by which anybody can see that a reducer handed out what is no mean.

The reducer signed a report that names the plan it worked by, and with it what each contributor had committed to. So the
values that these commitments name, and the committed ones that they are judged by, give the only mean that it could
have reported: who makes it again from a file and gets other bytes needs nobody's word. Who found it keeps the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spes_p2p.consensus.certificate import CheckSignature, is_signed
from spes_p2p.consensus.manifest import Contribution, Manifest, Slice, manifest_hash
from spes_p2p.consensus.messages import LOST, Declaration, Plan, Report, Signed, plan_hash
from spes_p2p.consensus.rules import RunRules
from spes_p2p.consensus.statements import contribution
from spes_p2p.consensus.weights import weighed
from spes_p2p.errors import RemoteProtocolError, StorageFull
from spes_p2p.files import write_whole
from spes_p2p.ids import Hash, PeerId, short
from spes_p2p.interop.hf import state_layout
from spes_p2p.state.hashes import hash_tile, split_hashes
from spes_p2p.state.layout import VALUE_BYTES, Layout, Values
from spes_p2p.state.version import DTYPE, bytes_of
from spes_p2p.sync.audit import check_committed
from spes_p2p.sync.genesis import RunInfo, check_run
from spes_p2p.sync.node import rules_of
from spes_p2p.sync.reduce import OTHER_VALUES, WRONG_SIZE
from spes_p2p.sync.slice_mean import hand_out, hashes_of, mean_of, sent_values, unfit
from spes_p2p.wire import pack, unpack

UNJUDGED = (LOST, WRONG_SIZE, OTHER_VALUES)
"""Why somebody is left out of a slice without a look at its values."""
PROOFS = "proofs"
MAX_PROOF_BYTES = 2**28
MOST_PROOFS = 4
"""That a node keeps, one of each reducer: anybody who wants more can take them from others."""


@dataclass(frozen=True)
class Charge:
    """What was signed: a report, and the plan that it names; what contributors said that they brought to its parent."""

    parent: Manifest
    plan: Plan
    report: Signed[Report]
    ready: tuple[Signed[Declaration], ...]

    @property
    def piece(self) -> Slice:
        """As planned, with those whose values the reducer judged."""
        report, planned = self.report.value, self.plan.slices[self.report.value.index]
        return Slice(
            planned.block, planned.first_tile, planned.tiles, report.reducer, judged(planned.contributors, report)
        )


@dataclass(frozen=True)
class Given:
    """What a contributor sent of a slice, and the opening that leads from it to its commitment (see `Opening`)."""

    peer: PeerId
    opening: bytes
    data: bytes


@dataclass(frozen=True)
class FraudProof:
    """`state`: the hashes of all tiles of the parent's state, joined; `before`: the slice's values in it, fp32."""

    info: RunInfo
    charge: Charge
    state: bytes
    before: bytes
    given: tuple[Given, ...]


def judged(contributors: Sequence[PeerId], report: Report) -> tuple[PeerId, ...]:
    """Those of a slice's contributors whose values its reducer had: it took them, or says why not."""
    seen = {*report.contributors, *(peer for peer, why in report.left_out if why not in UNJUDGED)}
    return tuple(peer for peer in contributors if peer in seen)


# ---------------------------------------------------------------- checking


def check_proof(data: bytes, check: CheckSignature) -> FraudProof:
    """The proof in `data`, good against the author of its report in the run whose record it holds.

    Raises RemoteProtocolError with the reason where it proves nothing, ConfigError for a run that cannot be read.
    """
    proof = unpack(FraudProof, data, MAX_PROOF_BYTES)
    config = check_run(proof.info, proof.info.fingerprint)
    layout = state_layout(config)
    rules, charge = rules_of(config, proof.info, layout), proof.charge
    _check_charge(rules, charge, check)
    before = _checked_base(layout, proof)
    contributors, made = made_again(rules, layout, charge, before, _checked_values(rules, layout, proof, before))
    report = charge.report.value
    if (contributors, made) == (report.contributors, report.wire_hashes):
        raise RemoteProtocolError("the slice is the mean of what its contributors committed to: this proves nothing")
    return proof


def made_again(
    rules: RunRules, layout: Layout, charge: Charge, before: Values, found: dict[PeerId, Values]
) -> tuple[tuple[PeerId, ...], tuple[Hash, ...]]:
    """Who belongs in the mean of a slice, and the hashes of its tiles."""
    piece = charge.piece
    tiles = layout.tiles[piece.first_tile : piece.first_tile + piece.tiles]
    roster = {entry.peer: entry for entry in weighed(charge.plan.roster, rules.clips, charge.parent.members)}
    refused = unfit(rules, layout, piece, roster, found, before)
    fit = tuple(peer for peer in piece.contributors if peer not in refused)
    if not fit:
        return (), ()
    mean = mean_of(rules, [found[peer] for peer in fit], before, [roster[peer].tokens for peer in fit])
    made = hand_out(layout, tiles, mean, before, lambda tile_id: None)
    return (fit, hashes_of(made)) if made else ((), ())


def _check_charge(rules: RunRules, charge: Charge, check: CheckSignature) -> None:
    report, plan, parent = charge.report.value, charge.plan, charge.parent
    head = manifest_hash(parent)
    if parent.fingerprint != rules.fingerprint or not rules.audited_share:
        raise RemoteProtocolError("the report is of another run, or of one in which no mean is checked")
    if not is_signed(charge.report, check) or charge.report.author != report.reducer:
        raise RemoteProtocolError(f"{short(report.reducer)} did not sign that report")
    if {report.parent, plan.parent} != {head} or plan_hash(plan) != report.plan:
        raise RemoteProtocolError("the report is of another plan, or on top of another manifest")
    if not 0 <= report.index < len(plan.slices) or plan.slices[report.index].key != report.piece.key:
        raise RemoteProtocolError("the report is of a slice that the plan does not have")
    planned = plan.slices[report.index]
    if len(planned.contributors) < 2 or not set(report.contributors) <= set(planned.contributors):
        raise RemoteProtocolError("the slice has one contributor, or others than the plan names")
    if not report.contributors:
        raise RemoteProtocolError("the report hands nothing out")
    entries = {entry.peer: entry for entry in plan.roster}
    said = {signed.author: signed for signed in charge.ready}
    for peer in charge.piece.contributors:
        signed, entry = said.get(peer), entries.get(peer)
        if signed is None or entry is None or contribution(rules, parent, signed.value) != entry:
            raise RemoteProtocolError(f"{short(peer)} has not committed to what the plan names")
        if signed.value.peer != peer or not is_signed(signed, check):
            raise RemoteProtocolError(f"{short(peer)} did not sign its commitment")


def _checked_base(layout: Layout, proof: FraudProof) -> Values:
    """The slice's committed values."""
    piece, parent = proof.charge.piece, proof.charge.parent
    if len(proof.state) % len(parent.state_root):
        raise RemoteProtocolError("the proof's list of the committed state is cut off")
    hashes = split_hashes(proof.state)
    if layout.root_of(hashes) != parent.state_root:
        raise RemoteProtocolError("the proof's list is not that of the state that the manifest names")
    tiles = layout.tiles[piece.first_tile : piece.first_tile + piece.tiles]
    at = 0
    for tile in tiles:
        size = VALUE_BYTES * tile.size
        if hash_tile(proof.before[at : at + size]) != hashes[tile.id]:
            raise RemoteProtocolError(f"the proof's values of tile {tile.id} are not the committed ones")
        at += size
    if at != len(proof.before):
        raise RemoteProtocolError("the proof has more values than the slice")
    return np.frombuffer(proof.before, DTYPE)


def _checked_values(rules: RunRules, layout: Layout, proof: FraudProof, before: Values) -> dict[PeerId, Values]:
    """What the contributors brought, as they had committed to it."""
    piece = proof.charge.piece
    entries: dict[PeerId, Contribution] = {entry.peer: entry for entry in proof.charge.plan.roster}
    tiles = layout.tiles[piece.first_tile : piece.first_tile + piece.tiles]
    given = {one.peer: one for one in proof.given}
    if set(given) != set(piece.contributors):
        raise RemoteProtocolError("the proof has not the values of exactly those whom the reducer judged")
    found = {}
    for peer in piece.contributors:
        data = memoryview(given[peer].data)
        if len(data) != sum(layout.wire_bytes(tile) for tile in tiles):
            raise RemoteProtocolError(f"the proof's values of {short(peer)} are of another length")
        check_committed(layout, entries[peer], given[peer].opening, tiles, data)
        found[peer] = sent_values(layout, tiles, data, before)
    return found


# ---------------------------------------------------------------- keeping


class ProofFolder:
    """The proofs that a node has, a file for each reducer, named by it."""

    def __init__(self, folder: Path, info: RunInfo) -> None:
        self._folder = folder
        self._info = info

    def name_of(self, path: Path) -> str:
        """For others: below the folder of the node."""
        return str(path.relative_to(self._folder.parent.parent))

    def path_of(self, reducer: PeerId) -> Path | None:
        """None where there is none."""
        path = self._path(reducer)
        return path if path.exists() else None

    def keep(
        self, charge: Charge, state: bytes, before: Values, given: Sequence[Given], check: CheckSignature
    ) -> Path | None:
        """Where it now lies; None where it is none, there is one already, or it is too large, or one too many."""
        path = self._path(charge.report.author)
        proof = FraudProof(self._info, charge, state, bytes(bytes_of(before)), tuple(given))
        is_large = len(proof.before) + sum(len(one.data) + len(one.opening) for one in given) > MAX_PROOF_BYTES
        if is_large or path.exists() or len(list(self._folder.glob("*.proof"))) >= MOST_PROOFS:
            return None
        with contextlib.suppress(RemoteProtocolError, StorageFull, OSError):
            data = pack(proof)
            check_proof(data, check)
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
            return path
        return None

    def _path(self, reducer: PeerId) -> Path:
        return self._folder / f"{reducer}.proof"
