"""What a ledger and a receipt cost: seconds for the next root, bytes of a receipt, and seconds to check one.

python scripts/bench_receipts.py
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa

from spes_p2p.config.load import bundled_config, load_config
from spes_p2p.consensus.ledger import Account, Ledger
from spes_p2p.consensus.manifest import Contribution, Manifest, manifest_hash
from spes_p2p.consensus.membership import Member
from spes_p2p.consensus.messages import QUORUM, Certificate, Precommit, Seal
from spes_p2p.consensus.rules import genesis_manifest
from spes_p2p.ids import NO_HASH, PeerId, sha256
from spes_p2p.interop.hf import state_layout
from spes_p2p.swarm.hivemind_backend import RsaSigner
from spes_p2p.swarm.keys import RsaVerifier
from spes_p2p.sync.genesis import RunInfo, describe_run
from spes_p2p.sync.node import rules_of
from spes_p2p.sync.organiser_words import Words, roll
from spes_p2p.sync.receipts import MAX_RECEIPT_BYTES, Receipt, Shown, Witness, check_receipt, pack_receipt
from spes_p2p.sync.sealing import KeySealer

ACCOUNTS = (10, 1000, 32_768)
ROSTER = 1000
VOUCHED = (4, 9, 21, 31)


def peers(count: int) -> list[PeerId]:
    return [PeerId(f"Qm{at:044d}") for at in range(count)]


def seal(said: Any, signer: RsaSigner) -> Seal:
    return Seal(signer.peer_id, signer.public_key, KeySealer(signer).seal(said).signature)


def main() -> None:
    config = load_config(bundled_config("small"), ["swarm.electors=vouched"])
    organiser = RsaSigner(rsa.generate_private_key(65537, 2048))
    info = describe_run(config, sha256(b"data"), organiser.peer_id)
    genesis = genesis_manifest(
        rules_of(config, info, state_layout(config)), NO_HASH, [Member(PeerId("a"), 1, True, 0)], {}
    )
    print("accounts  next root, roster of 1000  receipt by the organiser  checked in")
    for count in ACCOUNTS:
        ledger = Ledger(tuple(Account(peer, 9, 10**9, 900, 3) for peer in peers(count)))
        _ = ledger.root
        roster = tuple(Contribution(peer, 10**6, 100, 1) for peer in peers(min(count, ROSTER)))
        began = time.perf_counter()
        _ = ledger.after(roster).root
        root_ms = 1000 * (time.perf_counter() - began)
        manifest = replace(genesis, round=9, tokens=10**15, ledger=ledger.root)
        said = Witness(info.fingerprint, 9, manifest_hash(manifest))
        data = pack_receipt(receipt(info, manifest, ledger, witnesses=(seal(said, organiser),)))
        print(f"{count:>8,}  {root_ms:>20.1f} ms  {len(data):>18,} bytes  {checked_ms(data):>7.1f} ms")
    print("\nvouched for  signatures needed  receipt by a certificate (32,768 accounts)")
    for count in VOUCHED:
        keys = [RsaSigner(rsa.generate_private_key(65537, 2048)) for _ in range(count)]
        signed = roll(info, Words(), KeySealer(organiser), vouched=[key.peer_id for key in keys]).roll
        vote = Precommit(info.fingerprint, manifest.parent, 0, manifest_hash(manifest))
        needed = (count - 1) // 3 + 1
        seals = tuple(seal(vote, key) for key in keys[:needed])
        certificate = Certificate(vote.parent, QUORUM, 0, vote.value, seals)
        data = pack_receipt(replace(receipt(info, manifest, ledger), roll=signed, certificate=certificate))
        verdict = f"{checked_ms(data):.1f} ms" if len(data) <= MAX_RECEIPT_BYTES else "does not fit"
        print(f"{count:>11}  {needed:>17}  {len(data):>17,} bytes, {verdict}")


def receipt(info: RunInfo, manifest: Manifest, ledger: Ledger, witnesses: tuple[Seal, ...] = ()) -> Receipt:
    account = ledger.accounts[0]
    proof = ledger.proof_of(account.peer)
    assert proof is not None
    return Receipt(info, None, Shown.of(manifest), account, proof, None, witnesses)


def checked_ms(data: bytes) -> float:
    began = time.perf_counter()
    check_receipt(data, RsaVerifier().verify)
    return 1000 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
