"""What a round decides fits into one call with all that it follows from, at its largest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spes_p2p.consensus.bounds import MAX_COUNT, MAX_STEP_SECONDS, MAX_TRAINED_SECONDS, MAX_UPLINK
from spes_p2p.consensus.content import Statements
from spes_p2p.consensus.inbound import MAX_REASON
from spes_p2p.consensus.manifest import Manifest, manifest_hash
from spes_p2p.consensus.membership import MAX_MEMBERS, Member
from spes_p2p.consensus.messages import Ballots, Declaration, Intent, Report, Signed, Status, Work, declared
from spes_p2p.consensus.rules import RunRules, genesis_manifest
from spes_p2p.consensus.sizes import MAX_CONTENT_BYTES, declaration_bytes, most_members, plan_fits
from spes_p2p.consensus.slices import plan_slices
from spes_p2p.consensus.statements import check_content, content_of, contribution
from spes_p2p.ids import NO_HASH, Hash, PeerId, sha256
from spes_p2p.ownership.assign import MOST_CLAIMANTS, OwnershipRequest
from spes_p2p.swarm.calls import MAX_CALL_BYTES
from spes_p2p.swarm.keys import MAX_KEY_BYTES, MAX_SIGNATURE_BYTES
from spes_p2p.wire import pack
from tests.simulation.sim_state import run_rules

INCARNATION = 2**62


def name_of(number: int) -> PeerId:
    return PeerId(f"{number:04}".ljust(46, "Q"))


def declaration(rules: RunRules, name: PeerId, head: Hash, sequence: int) -> Signed[Declaration]:
    """As large as it may be."""
    counts = MAX_COUNT - 1 - sequence
    work = Work(True, counts, counts, counts, MAX_TRAINED_SECONDS, MAX_STEP_SECONDS, counts)
    columns = range(rules.num_columns)
    intent = Intent(True, False, 2**62, tuple(columns), (), 1, MAX_UPLINK)
    status = Status(rules.fingerprint, name, INCARNATION, 2**62 + sequence, 1, head, work, intent, Ballots())
    return declared(Signed(status, name, bytes(MAX_KEY_BYTES), bytes(MAX_SIGNATURE_BYTES)))


@pytest.mark.parametrize("columns", [0, 8, 128, 129, 300])
def test_no_declaration_is_larger_than_is_reckoned_with(columns: int) -> None:
    rules = run_rules(columns)
    assert len(pack(declaration(rules, name_of(0), sha256(b"head"), 0))) <= declaration_bytes(columns)


def reported(rules: RunRules, tip: Manifest, plan: Hash, roster: tuple[PeerId, ...]) -> tuple[Signed[Report], ...]:
    """Slices as they would be planned; of each contributor but the last two the values were refused at length."""
    slices = plan_slices(roster, tip.ownership, {}, rules.block_tiles, rules.slice_tiles)
    reports = list[Signed[Report]]()
    for at, piece in enumerate(slices):
        used = piece.contributors if at % 2 else piece.contributors[-2:]
        left_out = tuple((peer, "x" * MAX_REASON) for peer in piece.contributors if peer not in used)
        made = replace(piece, contributors=used)
        wires = tuple(sha256(b"%d" % tile) for tile in piece.tile_ids)
        report = Report(manifest_hash(tip), plan, at, made, wires, left_out)
        reports.append(Signed(report, piece.reducer, bytes(MAX_KEY_BYTES), bytes(MAX_SIGNATURE_BYTES)))
    return tuple(reports)


@pytest.mark.parametrize("replicas", [1, MOST_CLAIMANTS + 1])
@pytest.mark.parametrize(("columns", "tiles", "slice_tiles"), [(2, 2, 1), (8, 40, 4), (32, 2000, 16), (128, 300, 2)])
def test_a_manifest_fits_one_call_with_as_many_members_as_it_may_name(
    columns: int, tiles: int, slice_tiles: int, replicas: int
) -> None:
    """All are as large as may be, claim everything, have trained, and say something else by now."""
    rules = replace(run_rules(columns, tiles, replicas), slice_tiles=slice_tiles, has_strangers=True)
    number = most_members(rules)
    assert 64 <= number <= MAX_MEMBERS
    members = [Member(name_of(at), INCARNATION, False, 1) for at in range(number)]
    wishes = {member.peer: OwnershipRequest(columns, tuple(range(columns))) for member in members}
    tip = genesis_manifest(rules, NO_HASH, members, wishes)
    head, names = manifest_hash(tip), [member.peer for member in members]
    before = {name: declaration(rules, name, head, 0) for name in names}
    roster = list(names)
    while not plan_fits(rules, tip, roster, plan_slices(roster, tip.ownership, {}, rules.block_tiles, slice_tiles)):
        roster = roster[: len(roster) * 3 // 4]
    assert len(roster) > 2
    ready = tuple(before[name] for name in roster)
    assert all(contribution(rules, tip, one.value) for one in ready)
    said = tuple(declaration(rules, name, head, 1) for name in names)
    statements = Statements(ready, reported(rules, tip, sha256(b"plan"), tuple(roster)), said)
    content = content_of(rules, tip, statements, NO_HASH, None)
    check_content(rules, tip, content)
    assert len(content.manifest.members) == number
    assert {entry.peer for entry in content.manifest.roster} <= {*roster}
    assert len(pack(content)) <= MAX_CONTENT_BYTES < MAX_CALL_BYTES
