"""A peer with data of its own in a run that leases data: it uses no sequences, and is counted all the same."""

from __future__ import annotations

from dataclasses import replace

from spes_p2p.consensus.manifest import Contribution
from spes_p2p.consensus.membership import Member
from spes_p2p.consensus.rules import RunRules, capped_tokens, genesis_manifest
from spes_p2p.data.leases import Leases
from spes_p2p.ids import Hash, PeerId

RULES = RunRules(
    fingerprint=Hash(b"f" * 32),
    block_tiles=(1, 1),
    slice_tiles=4,
    sequence_tokens=10,
    batch_sequences=4,
    block_sequences=8,
    leased=True,
    target_replicas=1,
    steps_per_round=lambda step: 5,
    merge_interval=0,
    merge_alpha=lambda step: 0.0,
)
PEER = PeerId("anna")
GENESIS = replace(
    genesis_manifest(RULES, Hash(b"s" * 32), [Member(PEER, 1, True, 0)], {}), leases=Leases(8, (), ((PEER, ((0, 8),)),))
)


def test_without_sequences_the_claim_is_capped_by_the_steps() -> None:
    honest = Contribution(PEER, tokens=5 * 4 * 10, steps=5, sequences=0)
    assert capped_tokens(RULES, GENESIS, honest) == honest
    assert capped_tokens(RULES, GENESIS, replace(honest, tokens=10**9)) == honest


def test_with_sequences_the_claim_is_capped_by_the_lease() -> None:
    claim = Contribution(PEER, tokens=10**9, steps=5, sequences=20)
    assert capped_tokens(RULES, GENESIS, claim) == replace(claim, tokens=80, steps=2, sequences=8)


def test_without_a_dataset_nothing_is_leased_and_the_steps_cap_the_claim() -> None:
    rules, honest = replace(RULES, leased=False), Contribution(PEER, tokens=5 * 4 * 10, steps=5, sequences=0)
    assert capped_tokens(rules, GENESIS, honest) == honest
    assert capped_tokens(rules, GENESIS, replace(honest, tokens=12345)) == honest
