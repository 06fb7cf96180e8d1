"""Receipts: sums of the chain, signed by whom the run's fingerprint leads to, and refused where anything is altered."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.messages import Seal
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.exchange.requests import TallyRequest
from spes_p2p.ids import NO_HASH, PeerId, sha256
from spes_p2p.swarm.hivemind_backend import RsaSigner
from spes_p2p.swarm.keys import RsaVerifier
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync import receipts
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.genesis import describe_run
from spes_p2p.sync.organiser_words import Words, roll
from spes_p2p.sync.receipts import MAX_RECEIPT_BYTES, Ledger, Receipt, Tally, check_receipt, fetch_receipt
from spes_p2p.sync.sealing import KeySealer
from spes_p2p.testing.memory_swarm import ORGANISER, MemorySwarm
from spes_p2p.wire import pack
from tests.sync.chains import A, MadeRun
from tests.sync.swarm_cases import in_swarm, small_config
from tests.sync.test_choosing_history import Surroundings
from tests.sync.test_vouching import VOUCHED, Organising, begun

VISITOR = "a visitor"


class Signers:
    """An organiser and some peers with real keys, and a run of theirs."""

    def __init__(self, *overrides: str, vouched: int = 0) -> None:
        keys = [RsaSigner(rsa.generate_private_key(65537, 2048)) for _ in range(vouched + 2)]
        self.organiser, self.worker, *self.others = keys
        self.info = describe_run(small_config(*overrides), sha256(b"data"), self.organiser.peer_id)
        voters = [one.peer_id for one in (*self.others, self.worker)] if vouched else []
        self.roll = roll(self.info, Words(), KeySealer(self.organiser), vouched=voters).roll
        self.tally = Tally(self.info.fingerprint, 40, sha256(b"head"), self.worker.peer_id, 30, 3000, 300, 9000)

    def receipt(self, *signers: RsaSigner, tally: Tally | None = None) -> Receipt:
        said = tally or self.tally
        seals = [Seal(one.peer_id, one.public_key, KeySealer(one).seal(said).signature) for one in signers]
        return Receipt(self.info, self.roll if self.others else None, said, tuple(seals))

    def refused(self, receipt: Receipt, words: str) -> None:
        with pytest.raises(RemoteProtocolError, match=words):
            check_receipt(pack(receipt), RsaVerifier().verify)


@pytest.fixture(scope="module")
def plain() -> Signers:
    return Signers()


@pytest.fixture(scope="module")
def vouching() -> Signers:
    """Nine peers that are vouched for, with the one that works: four of them are more than a third."""
    return Signers("swarm.electors=vouched", vouched=8)


def good(receipt: Receipt) -> bool:
    return check_receipt(pack(receipt), RsaVerifier().verify) == receipt


def test_the_organiser_alone_may_sign(plain: Signers) -> None:
    data = pack(plain.receipt(plain.organiser))
    assert check_receipt(data, RsaVerifier().verify).tally == plain.tally
    assert len(data) < MAX_RECEIPT_BYTES / 3


def test_more_than_a_third_of_those_vouched_for_may_sign_without_it(vouching: Signers) -> None:
    others = vouching.others
    assert good(vouching.receipt(*others[:3]))
    vouching.refused(vouching.receipt(*others[:2]), "2 of 9 vouched peers: it needs 3")
    vouching.refused(vouching.receipt(*others[:2], vouching.worker), "2 of 9 vouched")
    vouching.refused(vouching.receipt(others[0], others[0], others[0]), "two signatures of one")
    assert len(pack(vouching.receipt(*others))) < MAX_RECEIPT_BYTES


def test_where_everybody_votes_only_the_organiser_may() -> None:
    everybody = Signers(vouched=3)  # a list of the organiser's changes nothing there
    everybody.refused(everybody.receipt(*everybody.others), "whose word the run does not give")


def test_a_stranger_may_not_sign(plain: Signers, vouching: Signers) -> None:
    plain.refused(plain.receipt(plain.worker), "whose word the run does not give")
    plain.refused(plain.receipt(plain.organiser, vouching.organiser), "whose word the run does not give")
    plain.refused(plain.receipt(), "it needs 1, or the organiser's")


def test_a_list_of_peers_that_another_signed_is_refused(vouching: Signers) -> None:
    own = roll(vouching.info, Words(), KeySealer(vouching.worker), vouched=[vouching.worker.peer_id]).roll
    vouching.refused(replace(vouching.receipt(vouching.organiser), roll=own), "not signed by the run's organiser")
    assert own is not None
    forged = replace(own, author=vouching.organiser.peer_id)
    vouching.refused(replace(vouching.receipt(vouching.organiser), roll=forged), "not signed by the run's organiser")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": 3001}, "did not sign this"),
        ({"rounds": 31}, "did not sign this"),
        ({"peer": PeerId("somebody")}, "did not sign this"),
        ({"tokens": 9001}, "cannot be"),
        ({"rounds": 0}, "cannot be"),
        ({"fingerprint": sha256(b"another")}, "of another run"),
    ],
)
def test_altered_numbers_are_refused(plain: Signers, changes: dict[str, Any], words: str) -> None:
    honest = plain.receipt(plain.organiser)
    plain.refused(replace(honest, tally=replace(honest.tally, **changes)), words)


def test_another_config_or_organiser_is_another_run(plain: Signers) -> None:
    honest = plain.receipt(plain.organiser)
    for changes in ({"organiser": plain.worker.peer_id}, {"config": ""}, {"run_id": "x"}):
        altered = replace(honest, info=replace(plain.info, **changes))
        plain.refused(altered, "of another run")


@given(place=st.integers(0, 10**6), new=st.binary(min_size=1, max_size=3))
def test_no_byte_can_be_changed(plain: Signers, place: int, new: bytes) -> None:
    data = pack(plain.receipt(plain.organiser))
    place %= len(data)
    spoilt = data[:place] + new + data[place + len(new) :]
    if spoilt != data:
        with pytest.raises(RemoteProtocolError):
            check_receipt(spoilt, RsaVerifier().verify)


def test_the_ledger_is_the_sum_of_the_rosters_for_each_recent_round(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(receipts, "RECENT_ROUNDS", 3)
    run, chain = MadeRun(), Chain(tmp_path)
    ledger, commits = Ledger(chain), run.chain(6)
    for commit in commits:
        chain.append(commit)
        counted = [entry for one in commits[: commit.manifest.round + 1] for entry in one.manifest.roster]
        tally = ledger.tally(A)
        assert (tally.rounds, tally.tokens) == (len(counted), sum(entry.tokens for entry in counted))
        assert (tally.round, tally.head) == (commit.manifest.round, manifest_hash(commit.manifest))
    for back in (1, 2):
        manifest = commits[-1 - back].manifest
        tally = ledger.tally(A, manifest.round, manifest_hash(manifest))
        assert (tally.rounds, tally.tokens, tally.run_tokens) == (manifest.round, manifest.tokens, manifest.tokens)
    for round, head in ((5, sha256(b"another")), (2, manifest_hash(commits[2].manifest)), (9, NO_HASH)):
        with pytest.raises(RemoteProtocolError, match="none of the newest here"):
            ledger.tally(A, round, head)


def test_the_ledger_counts_again_after_a_switch(tmp_path: Path) -> None:
    run, chain = MadeRun(), Chain(tmp_path)
    commits = run.chain(4)
    for commit in commits:
        chain.append(commit)
    ledger = Ledger(chain)
    assert ledger.tally(A).rounds == 3
    other = run.certified(run.child(commits[1].manifest, sha256(b"other"), sha256(b"wire")))
    chain.switch([other])
    assert (ledger.tally(A).rounds, ledger.tally(A).head) == (2, manifest_hash(other.manifest))


def fetched(swarm: MemorySwarm, peer: str) -> Any:
    return fetch_receipt(swarm.network.peer(VISITOR), swarm.info, PeerId(peer), 5.0)


def test_a_swarm_gives_receipts_that_add_up(tmp_path: Path) -> None:
    async def main(swarm: MemorySwarm) -> None:
        around = Surroundings(swarm)
        await swarm.start_organiser()
        await around.add(ORGANISER)
        await asyncio.gather(*(swarm.add(name) for name in "abc"))
        await swarm.until_round(3)
        chain = swarm.organiser.chain
        found = [check_receipt(await fetched(swarm, name), swarm.network.keys.verify) for name in "abc"]
        for receipt in found:
            tally = receipt.tally
            rosters = [entry for at in range(tally.round + 1) for entry in chain.commit(at).manifest.roster]
            assert tally.tokens == sum(entry.tokens for entry in rosters if entry.peer == tally.peer) > 0
        with pytest.raises(NetworkError, match="numbers cannot be"):
            await fetched(swarm, "nobody that the run knows")
        await around.stop()

    in_swarm(tmp_path, main)


def _less(ledger: Ledger, asked: TallyRequest) -> Tally:
    true = ledger.tally(asked.peer, asked.round, asked.head)
    return replace(true, tokens=true.tokens - 1)


def test_without_the_organiser_those_vouched_for_sign_and_one_liar_changes_nothing(tmp_path: Path) -> None:
    async def main(swarm: MemorySwarm) -> None:
        around, desk = Surroundings(swarm), Organising(swarm)
        await begun(swarm, around, desk, "abcd")
        await swarm.add("d")
        await around.add("d")
        await swarm.until_round(2, "abcd")
        await around.remove(ORGANISER)
        await swarm.kill_organiser()
        liar = swarm.peers[PeerId("a")]
        liar.driver._serving._tally = lambda asked: Blob(pack(liar.node.sealer.seal(_less(Ledger(liar.chain), asked))))
        receipt = check_receipt(await fetched(swarm, "c"), swarm.network.keys.verify)
        rosters = [
            entry
            for at in range(receipt.tally.round + 1)
            for entry in swarm.peers[PeerId("b")].chain.commit(at).manifest.roster
        ]
        assert [seal.peer for seal in receipt.seals] == ["b", "d"]
        assert receipt.tally.tokens == sum(entry.tokens for entry in rosters if entry.peer == "c")
        await around.stop()

    in_swarm(tmp_path, main, VOUCHED)
