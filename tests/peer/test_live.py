"""What the live view asks of a peer: who contributed what by the certificates, and where a round stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.consensus.electorate import Electorate, Faults
from spes_p2p.consensus.heard_votes import HeardVotes
from spes_p2p.consensus.manifest import manifest_hash
from spes_p2p.consensus.messages import (
    Plan,
    Proposal,
    Signed,
    Work,
)
from spes_p2p.consensus.state import RoundState
from spes_p2p.consensus.vote import Vote
from spes_p2p.consensus.vote_record import VoteRecord
from spes_p2p.ids import NO_HASH
from spes_p2p.observe.live import EXCHANGING, READY, TRAINING, VOTING
from spes_p2p.peer.live import Contributions
from spes_p2p.peer.phases import phase_of, slices_done
from spes_p2p.sync.chain import Chain
from tests.sync.chains import A, B, MadeRun

RUN = MadeRun()
COMMITS = RUN.chain(5)


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    chain = Chain(tmp_path)
    for commit in COMMITS:
        chain.append(commit)
    return chain


def test_contributors_are_ranked_by_what_certificates_count(chain: Chain) -> None:
    found = Contributions(chain)
    found.follow(0)
    assert found.rank(A) == (0, 0, 0)
    found.follow(4)
    assert found.rank(A) == (4, 1, 1)
    assert found.rank(B) == (0, 0, 1)


def test_another_history_is_read_anew_and_damage_left_out(chain: Chain, tmp_path: Path) -> None:
    found = Contributions(chain)
    found.follow(4)
    (damaged,) = tmp_path.glob("*02.commit")
    damaged.write_bytes(b"damaged")
    found.follow(3)
    assert found.rank(A) == (2, 1, 1)


def test_a_round_goes_from_training_to_voting() -> None:
    tip = COMMITS[0].manifest
    vote = Vote(
        HeardVotes(Electorate((A,), Faults.CRASH), RUN.info.fingerprint, manifest_hash(tip)),
        *2 * (VoteRecord(NO_HASH),),
    )
    current = RoundState(tip, manifest_hash(tip), vote, 0.0, 0.0)
    assert phase_of(current) == TRAINING
    current.work = Work(ready=True)
    assert phase_of(current) == READY
    slices = RUN.slices(tip)
    current.plan = Signed(Plan(RUN.info.fingerprint, b"", 0, A, (), slices), A, b"", b"")  # type: ignore[arg-type]
    current.staged = {slices[0].key: b""}
    assert (phase_of(current), slices_done(current)) == (EXCHANGING, (1, len(slices)))
    proposal = Proposal(RUN.info.fingerprint, manifest_hash(tip), 0, manifest_hash(COMMITS[1].manifest))
    vote.heard.proposals[A] = Signed(proposal, A, b"", b"")
    assert phase_of(current) == VOTING
