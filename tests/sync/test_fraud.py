"""Proofs of fraud: who finds a false mean keeps one, anybody can check it offline, and nobody honest can be framed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_p2p.consensus.messages import LOST, Report, Signed
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import NO_HASH, Hash, PeerId, sha256
from spes_p2p.interop.hf import state_layout
from spes_p2p.state.version import DTYPE
from spes_p2p.swarm.memory_backend import FakeKeys
from spes_p2p.sync import fraud
from spes_p2p.sync.fraud import FraudProof, Given, ProofFolder, check_proof, made_again
from spes_p2p.sync.genesis import check_run
from spes_p2p.sync.node import rules_of
from spes_p2p.sync.sealing import KeySealer
from spes_p2p.sync.slice_mean import sent_values
from spes_p2p.wire import pack
from tests.simulation.memory_swarm import MemorySwarm
from tests.sync.swarm_cases import commits, in_swarm, small_config
from tests.sync.test_audits import CLIP, LIAR, hands_out, start

KEYS = FakeKeys()


def found_in(folder: Path, codec: str) -> list[Path]:
    """Of a swarm in which one reducer lies a little: the proofs on the disks of the others."""

    async def play(swarm: MemorySwarm) -> list[Path]:
        liar = await start(swarm)
        told = hands_out(liar, lambda values: values * np.float32(1.0 + 1e-6))
        await swarm.until_round(8, "a")
        assert told
        assert commits(swarm, "a")[-1].manifest.banned == (LIAR,)
        said = [notice for life in swarm.up for notice in life.notices if notice.kind == "proof"]
        found = [path for name in "abcd" if (path := swarm.peers[PeerId(name)].disk.proofs.path_of(LIAR))]
        assert sorted(notice.text.rpartition(" is ")[2] for notice in said) == [f"{n}/proofs/e.proof" for n in "abcd"]
        assert {notice.peer for notice in said} == {LIAR}
        return found

    return in_swarm(folder, play, small_config(*CLIP, "sync.audited_share=1", f"sync.codec={codec}", peers=5))


@pytest.fixture(scope="module", params=["fp32", "int8"])
def proof(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FraudProof:
    found = found_in(tmp_path_factory.mktemp("fraud"), request.param)
    assert len(found) == 4, "whoever hears of it makes it again, and keeps what it found"
    proofs = [check_proof(path.read_bytes(), KEYS.verify) for path in found]
    assert {one.charge.report.author for one in proofs} == {LIAR}
    return proofs[0]


def refused(proof: FraudProof, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        check_proof(pack(proof), KEYS.verify)


def signed_by(author: PeerId, report: Report) -> Signed[Report]:
    return KeySealer(KEYS.signer(author)).seal(report)


def with_report(proof: FraudProof, **changes: Any) -> FraudProof:
    """As if its author had signed another one."""
    report = replace(proof.charge.report.value, **changes)
    return replace(proof, charge=replace(proof.charge, report=signed_by(LIAR, report)))


def true_mean(proof: FraudProof) -> tuple[tuple[PeerId, ...], tuple[Hash, ...]]:
    config = check_run(proof.info, proof.info.fingerprint)
    layout = state_layout(config)
    rules = rules_of(config, proof.info, layout)
    piece = proof.charge.piece
    before = np.frombuffer(proof.before, DTYPE)
    tiles = layout.tiles[piece.first_tile : piece.first_tile + piece.tiles]
    found = {one.peer: sent_values(layout, tiles, memoryview(one.data), before) for one in proof.given}
    return made_again(rules, layout, proof.charge, before, found)


def test_an_honest_report_is_no_fraud(proof: FraudProof) -> None:
    contributors, hashes = true_mean(proof)
    piece = replace(proof.charge.report.value.piece, contributors=contributors)
    refused(with_report(proof, piece=piece, wire_hashes=hashes), "is the mean .* proves nothing")


def altered_values(proof: FraudProof) -> FraudProof:
    first, *others = proof.given
    data = bytes([first.data[0] ^ 1]) + first.data[1:]
    return replace(proof, given=(replace(first, data=data), *others))


def of_another_commitment(proof: FraudProof) -> FraudProof:
    """Its author is framed by a plan in which a contributor has committed to something else than it sent."""
    roster = tuple(replace(entry, commitment=sha256(b"else")) for entry in proof.charge.plan.roster)
    return replace(proof, charge=replace(proof.charge, plan=replace(proof.charge.plan, roster=roster)))


def forged_report(proof: FraudProof) -> FraudProof:
    signed = proof.charge.report
    other = replace(signed, value=replace(signed.value, wire_hashes=(NO_HASH,) * len(signed.value.wire_hashes)))
    return replace(proof, charge=replace(proof.charge, report=other))


def in_anothers_name(proof: FraudProof) -> FraudProof:
    """The accuser has made up a report of somebody else, and signs it itself."""
    report = proof.charge.report.value
    report = replace(report, piece=replace(report.piece, reducer=PeerId("b")))
    return replace(proof, charge=replace(proof.charge, report=signed_by(PeerId("a"), report)))


def other_base(proof: FraudProof) -> FraudProof:
    return replace(proof, before=bytes([proof.before[0] ^ 1]) + proof.before[1:])


def unsigned_commitments(proof: FraudProof) -> FraudProof:
    said = tuple(replace(ready, signature=b"no") for ready in proof.charge.ready)
    return replace(proof, charge=replace(proof.charge, ready=said))


LIES: dict[str, tuple[Callable[[FraudProof], FraudProof], str]] = {
    "values": (altered_values, "that it has not committed to"),
    "a contributor less": (lambda proof: replace(proof, given=proof.given[1:]), "not the values of exactly those"),
    "a contributor more": (
        lambda proof: replace(proof, given=(*proof.given, Given(PeerId("x"), b"", b""))), "of exactly those",
    ),
    "shorter values": (
        lambda proof: replace(proof, given=(replace(proof.given[0], data=b""), *proof.given[1:])), "another length",
    ),
    "commitments": (of_another_commitment, "of another plan"),
    "commitments with their plan": (
        lambda proof: with_report(made := of_another_commitment(proof), plan=fraud.plan_hash(made.charge.plan)),
        "has not committed to what the plan names",
    ),
    "nobody's commitment": (
        lambda proof: replace(proof, charge=replace(proof.charge, ready=())), "has not committed to what",
    ),
    "unsigned commitments": (unsigned_commitments, "did not sign its commitment"),
    "hashes": (forged_report, "did not sign that report"),
    "another's report": (in_anothers_name, "did not sign that report"),
    "committed values": (other_base, "are not the committed ones"),
    "more of them": (lambda proof: replace(proof, before=proof.before + b"\0\0\0\0"), "more values than the slice"),
    "state": (lambda proof: replace(proof, state=proof.state[32:]), "not that of the state"),
    "half a state": (lambda proof: replace(proof, state=proof.state[1:]), "cut off"),
    "manifest": (
        lambda proof: replace(
            proof, charge=replace(proof.charge, parent=replace(proof.charge.parent, state_root=NO_HASH))
        ),
        "on top of another manifest",
    ),
    "run": (lambda proof: replace(proof, info=replace(proof.info, run_id="x")), "that of run tiny"),
    "no slice": (lambda proof: with_report(proof, index=2**40), "a slice that the plan does not have"),
    "another slice": (
        lambda proof: with_report(proof, index=(proof.charge.report.value.index + 1) % len(proof.charge.plan.slices)),
        "a slice that the plan does not have",
    ),
    "nothing": (
        lambda proof: with_report(
            proof, piece=replace(proof.charge.report.value.piece, contributors=()), wire_hashes=()
        ),
        "hands nothing out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_what_was_altered_or_made_up_proves_nothing(proof: FraudProof, lie: str) -> None:
    alter, words = LIES[lie]
    refused(alter(proof), words)


def test_who_was_lost_to_the_reducer_is_no_part_of_it(proof: FraudProof) -> None:
    """It need not have reached everybody: what it says of those whom it had is judged."""
    contributors, _ = true_mean(proof)
    gone, kept = contributors[0], contributors[1:]
    piece = replace(proof.charge.report.value.piece, contributors=kept)
    less = with_report(proof, piece=piece, left_out=((gone, LOST),))
    less = replace(less, given=tuple(one for one in less.given if one.peer != gone))
    contributors, hashes = true_mean(less)
    assert contributors == kept
    refused(with_report(less, wire_hashes=hashes), "is the mean")
    assert check_proof(pack(less), KEYS.verify).charge.report.author == LIAR


def test_a_folder_keeps_what_stands_and_not_too_much(
    proof: FraudProof, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ProofFolder(tmp_path / "proofs", proof.info)
    before = np.frombuffer(proof.before, DTYPE)

    def keep(proof: FraudProof) -> Path | None:
        return folder.keep(proof.charge, proof.state, before, proof.given, KEYS.verify)

    assert keep(altered_values(proof)) is None
    assert folder.path_of(LIAR) is None
    monkeypatch.setattr(fraud, "MOST_PROOFS", 0)
    assert keep(proof) is None
    monkeypatch.setattr(fraud, "MOST_PROOFS", 1)
    monkeypatch.setattr(fraud, "MAX_PROOF_BYTES", 100)
    assert keep(proof) is None
    monkeypatch.undo()
    assert keep(proof) == folder.path_of(LIAR)
    assert keep(altered_values(proof)) is None, "the one that is there stays"
    path = folder.path_of(LIAR)
    assert path is not None
    assert check_proof(path.read_bytes(), KEYS.verify) == proof
