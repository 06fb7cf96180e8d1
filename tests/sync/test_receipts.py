"""Receipts: accounts of the ledger, signed by whom the fingerprint leads to, refused where anything is altered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.consensus.ledger import Account, Ledger
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.messages import QUORUM, Certificate, Precommit, Seal
from spes_p2p.errors import NetworkError, RemoteProtocolError
from spes_p2p.ids import PeerId, sha256
from spes_p2p.swarm.hivemind_backend import RsaSigner
from spes_p2p.swarm.keys import RsaVerifier
from spes_p2p.swarm.memory_backend import MemoryNetwork
from spes_p2p.swarm.ports import Blob
from spes_p2p.sync import receipts
from spes_p2p.sync.chain import Chain
from spes_p2p.sync.genesis import describe_run
from spes_p2p.sync.organiser_words import Words, roll
from spes_p2p.sync.receipts import (
    MAX_RECEIPT_BYTES,
    Receipt,
    Shown,
    Witness,
    check_receipt,
    compressed,
    make_receipt,
    pack_receipt,
)
from spes_p2p.sync.sealing import KeySealer
from spes_p2p.wire import pack
from tests.simulation.memory_swarm import ORGANISER, MemorySwarm
from tests.simulation.virtual_time import run_virtual
from tests.sync.around import Surroundings
from tests.sync.chains import MadeRun
from tests.sync.swarm_cases import in_swarm, small_config
from tests.sync.test_vouching import VOUCHED, Organising, begun

VISITOR = "a visitor"


class Signers:
    """An organiser and some peers with real keys, and a run of theirs with one manifest that counts the worker."""

    def __init__(self, *overrides: str, vouched: int = 0) -> None:
        keys = [RsaSigner(rsa.generate_private_key(65537, 2048)) for _ in range(vouched + 2)]
        self.organiser, self.worker, *self.others = keys
        self.info = describe_run(small_config(*overrides), sha256(b"data"), self.organiser.peer_id)
        voters = [one.peer_id for one in (*self.others, self.worker)] if vouched else []
        self.roll = roll(self.info, Words(), KeySealer(self.organiser), vouched=voters).roll
        others = (Account(one.peer_id, 3, 6000 // max(1, vouched), 30) for one in self.others)
        self.ledger = Ledger(tuple(sorted((Account(self.worker.peer_id, 30, 3000, 300, 11, 0, 1), *others))))
        made = MadeRun().chain(2)[-1].manifest
        self.manifest = replace(made, fingerprint=self.info.fingerprint, round=40, tokens=9000, ledger=self.ledger.root)

    def receipt(self, *witnesses: RsaSigner, votes: Sequence[RsaSigner] = ()) -> Receipt:
        """Signed by these, some of whom voted for its manifest."""
        name, proof = manifest_hash(self.manifest), self.ledger.proof_of(self.worker.peer_id)
        assert proof is not None
        said = Witness(self.info.fingerprint, self.manifest.round, name)
        vote = Precommit(self.info.fingerprint, self.manifest.parent, 2, name)
        certificate = Certificate(vote.parent, QUORUM, vote.ballot, name, seals_of(vote, votes)) if votes else None
        return Receipt(
            self.info, self.roll if self.others else None, Shown.of(self.manifest),
            self.ledger.of(self.worker.peer_id), proof, certificate, seals_of(said, witnesses),
        )  # fmt: skip

    def refused(self, receipt: Receipt, words: str) -> None:
        with pytest.raises(RemoteProtocolError, match=words):
            check_receipt(pack_receipt(receipt), RsaVerifier().verify)


def seals_of(said: object, signers: Sequence[RsaSigner]) -> tuple[Seal, ...]:
    return tuple(Seal(one.peer_id, one.public_key, KeySealer(one).seal(said).signature) for one in signers)


@pytest.fixture(scope="module")
def plain() -> Signers:
    return Signers()


@pytest.fixture(scope="module")
def vouching() -> Signers:
    """Nine peers that are vouched for, with the one that works: three of them are needed."""
    return Signers("swarm.electors=vouched", vouched=8)


def good(receipt: Receipt) -> bool:
    return check_receipt(pack_receipt(receipt), RsaVerifier().verify) == receipt


def test_the_organiser_alone_may_sign(plain: Signers) -> None:
    data = pack_receipt(plain.receipt(plain.organiser))
    assert check_receipt(data, RsaVerifier().verify).account == plain.ledger.of(plain.worker.peer_id)
    assert len(data) < MAX_RECEIPT_BYTES / 2
    assert good(plain.receipt(votes=[plain.organiser]))


def test_more_than_a_third_of_those_vouched_for_may_sign_without_it(vouching: Signers) -> None:
    others = vouching.others
    assert good(vouching.receipt(*others[:3]))
    assert good(vouching.receipt(votes=others[:3]))
    assert good(vouching.receipt(*others[:1], votes=others[1:3]))
    vouching.refused(vouching.receipt(*others[:2]), "2 of 9 vouched peers: it needs 3")
    vouching.refused(vouching.receipt(votes=[*others[:2], vouching.worker]), "2 of 9 vouched")
    vouching.refused(vouching.receipt(*others[:2], vouching.worker), "2 of 9 vouched")
    vouching.refused(vouching.receipt(others[0], others[0], others[0]), "two signatures of one")
    vouching.refused(vouching.receipt(others[0], others[1], votes=others[:2]), "two signatures of one")
    assert len(pack_receipt(vouching.receipt(*others))) < MAX_RECEIPT_BYTES


def test_where_everybody_votes_only_the_organiser_may() -> None:
    everybody = Signers(vouched=3)  # a list of the organiser's changes nothing there
    everybody.refused(everybody.receipt(*everybody.others), "whose word the run does not give")
    everybody.refused(everybody.receipt(votes=everybody.others), "whose word the run does not give")


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
        ({"tokens": 3001}, "is not in the ledger"),
        ({"rounds": 31}, "is not in the ledger"),
        ({"steps": 1}, "is not in the ledger"),
        ({"passed": 12}, "is not in the ledger"),
        ({"withheld": 0}, "is not in the ledger"),
        ({"peer": PeerId("somebody")}, "is not in the ledger"),
        ({"tokens": 9001}, "cannot be"),
        ({"rounds": 0}, "cannot be"),
    ],
)
def test_altered_numbers_are_refused(plain: Signers, changes: dict[str, Any], words: str) -> None:
    honest = plain.receipt(plain.organiser)
    plain.refused(replace(honest, account=replace(honest.account, **changes)), words)


def test_a_ledger_of_ones_own_is_refused(vouching: Signers) -> None:
    """Whoever alters the ledger alters the manifest, which nobody has signed then."""
    honest = vouching.receipt(*vouching.others[:3], votes=vouching.others[3:6])
    own = Ledger((replace(honest.account, tokens=8999),))
    proof = own.proof_of(honest.account.peer)
    assert proof is not None
    forged = replace(honest, account=own.accounts[0], proof=proof)
    vouching.refused(forged, "is not in the ledger")
    forged = replace(forged, manifest=replace(honest.manifest, ledger=own.root))
    vouching.refused(forged, "certificate is not that of the manifest")
    vouching.refused(replace(forged, certificate=None), "did not sign this")
    vouching.refused(replace(honest, manifest=replace(honest.manifest, others=())), "other fields than there are")


def test_the_account_of_another_peer_is_not_ones_own(vouching: Signers) -> None:
    honest, another = vouching.receipt(*vouching.others[:3]), vouching.others[0].peer_id
    proof = vouching.ledger.proof_of(another)
    assert proof is not None
    vouching.refused(replace(honest, account=vouching.ledger.of(another)), "is not in the ledger")
    vouching.refused(replace(honest, proof=proof), "is not in the ledger")


def test_another_config_or_organiser_is_another_run(plain: Signers) -> None:
    honest = plain.receipt(plain.organiser)
    for changes in ({"organiser": plain.worker.peer_id}, {"config": ""}, {"run_id": "x"}):
        altered = replace(honest, info=replace(plain.info, **changes))
        plain.refused(altered, "of another run")
    plain.refused(replace(honest, info=replace(plain.info, wire_version=1)), "with wire version 1")


@given(place=st.integers(0, 10**6), new=st.binary(min_size=1, max_size=3))
def test_no_byte_can_be_changed(vouching: Signers, place: int, new: bytes) -> None:
    honest = vouching.receipt(*vouching.others[:2], votes=vouching.others[2:3])
    data = pack(honest)
    place %= len(data)
    spoilt = data[:place] + new + data[place + len(new) :]
    if spoilt != data:
        with pytest.raises(RemoteProtocolError):
            check_receipt(compressed(spoilt), RsaVerifier().verify)


def test_a_file_that_is_too_long_cut_off_or_goes_on_is_refused(plain: Signers) -> None:
    data, verify = pack_receipt(plain.receipt(plain.organiser)), RsaVerifier().verify
    for spoilt, words in (
        (b"", "cut off"),
        (data[:-1], "cut off"),
        (data + b"x", "something behind it"),
        (data + bytes(MAX_RECEIPT_BYTES), "at most 10000 bytes"),
        (compressed(bytes(10**6)), "cut off"),  # a small file with much inside is not read to its end
        (pack(plain.receipt(plain.organiser)), "this is no receipt"),
    ):
        with pytest.raises(RemoteProtocolError, match=words):
            check_receipt(spoilt, verify)


def test_a_third_of_31_who_vote_fit_into_a_receipt() -> None:
    many = Signers("swarm.electors=vouched", vouched=30)
    receipt = many.receipt(votes=many.others[:11])
    assert good(receipt)
    assert len(pack_receipt(receipt)) < MAX_RECEIPT_BYTES < len(pack(receipt))


def made(swarm: MemorySwarm, name: str, chain: Chain | None = None) -> Any:
    peer = PeerId(name)
    return make_receipt(swarm.network.peer(VISITOR), swarm.info, chain or swarm.peers[peer].chain, peer, 5.0)


def counted(chain: Chain, receipt: Receipt) -> int:
    """Tokens, by all the rosters."""
    rosters = (entry for at in range(receipt.manifest.round + 1) for entry in chain.commit(at).manifest.roster)
    return sum(entry.tokens for entry in rosters if entry.peer == receipt.account.peer)


def test_a_swarm_gives_receipts_that_add_up(tmp_path: Path) -> None:
    async def main(swarm: MemorySwarm) -> None:
        around = Surroundings(swarm)
        await swarm.start_organiser()
        await around.add(ORGANISER)
        await asyncio.gather(*(swarm.add(name) for name in "abc"))
        await swarm.until_round(3)
        chain = swarm.organiser.chain
        found = [check_receipt(await made(swarm, name), swarm.network.keys.verify) for name in "abc"]
        for receipt in found:
            assert receipt.signers == (ORGANISER,)
            assert receipt.account.tokens == counted(chain, receipt) > 0
        with pytest.raises(NetworkError, match="no round has counted any of its work"):
            await made(swarm, "nobody that the run knows", chain)
        await swarm.kill_organiser()
        with pytest.raises(NetworkError, match="its machine does not answer"):
            await made(swarm, "a")
        await around.stop()

    in_swarm(tmp_path, main)


def test_a_history_of_ones_own_gets_no_receipt(tmp_path: Path) -> None:
    """The organiser signs for what is on its chain, whoever asks."""

    async def main(swarm: MemorySwarm) -> None:
        around = Surroundings(swarm)
        await swarm.start_organiser()
        await around.add(ORGANISER)
        await asyncio.gather(*(swarm.add(name) for name in "abc"))
        await swarm.until_round(4)
        own = Chain(tmp_path / "forged")
        for round in range(3):
            own.append(swarm.organiser.chain.commit(round))
        last = swarm.organiser.chain.commit(3)
        roster = tuple(replace(entry, tokens=10**6) for entry in last.manifest.roster)
        more = replace(last.manifest, roster=roster, tokens=10**9, ledger=own.ledger(2).after(roster).root)
        own.append(replace(last, certificate=replace(last.certificate, manifest=manifest_hash(more)), manifest=more))
        receipt = check_receipt(await made(swarm, "a", own), swarm.network.keys.verify)
        assert receipt.manifest.round == 2, "the newest that the organiser knows"
        assert receipt.account.tokens == counted(swarm.organiser.chain, receipt)
        await around.stop()

    in_swarm(tmp_path, main)


def test_certificates_are_enough_where_those_who_vote_are_vouched_for(tmp_path: Path) -> None:
    """Nobody else is asked: the organiser is gone, and no peer signs anything more."""

    async def main(swarm: MemorySwarm) -> None:
        around, desk = Surroundings(swarm), Organising(swarm)
        await begun(swarm, around, desk, "abcd")
        await swarm.add("d")
        await around.add("d")
        await swarm.until_round(4, "abcd")
        await swarm.kill_organiser()
        for name in "abcd":
            swarm.peers[PeerId(name)].driver.answers.serving.witness = None
        receipt = check_receipt(await made(swarm, "c"), swarm.network.keys.verify)
        assert set(receipt.signers) <= set("abd")
        assert len(receipt.signers) == 2
        assert receipt.witnesses == ()
        assert receipt.account.tokens == counted(swarm.peers[PeerId("b")].chain, receipt) > 0
        await around.stop()

    in_swarm(tmp_path, main, VOUCHED)


def test_others_sign_where_too_few_voted(tmp_path: Path) -> None:
    async def main(swarm: MemorySwarm) -> None:
        around, desk = Surroundings(swarm), Organising(swarm)
        await begun(swarm, around, desk, "abcd")
        await swarm.add("d")
        await around.add("d")
        await swarm.until_round(3, "abcd")
        await around.remove(ORGANISER)
        await swarm.kill_organiser()
        bare = Chain(tmp_path / "bare")
        for round in range(4):
            commit = swarm.peers[PeerId("c")].chain.commit(round)
            bare.append(replace(commit, certificate=replace(commit.certificate, seals=commit.certificate.seals[:1])))
        receipt = check_receipt(await made(swarm, "c", bare), swarm.network.keys.verify)
        assert receipt.witnesses
        assert receipt.account.tokens == counted(swarm.peers[PeerId("b")].chain, receipt)
        await around.stop()

    in_swarm(tmp_path, main, VOUCHED)


def test_who_keeps_promising_a_signature_is_not_waited_for(plain: Signers) -> None:
    class Promiser:
        async def on_call(self, caller: PeerId, request: bytes) -> bytes:
            raise RemoteProtocolError("nothing here")

        async def on_fetch(self, caller: PeerId, request: bytes) -> Blob:
            await asyncio.Event().wait()
            raise AssertionError

    async def main() -> None:
        network = MemoryNetwork()
        await network.peer("promiser").transport.serve(Promiser())
        account, proof = plain.ledger.accounts[0], plain.ledger.proof_of(plain.ledger.accounts[0].peer)
        assert proof is not None
        bare = Receipt(plain.info, None, Shown.of(plain.manifest), account, proof, None, ())
        with pytest.raises(NetworkError, match="did not finish within"):
            await receipts._ask(network.peer("asker"), PeerId("promiser"), bare, 5.0)

    run_virtual(main())
