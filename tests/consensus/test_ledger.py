"""The ledger: sums of rosters, the same by any way that leads to them, with a path for each account."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.consensus import ledger as ledgers
from spes_p2p.consensus.ledger import EMPTY, Ledger, check_account, check_ledger
from spes_p2p.consensus.manifest import Audited, Contribution
from spes_p2p.consensus.membership import FAILED, PASSED, WITHHELD
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Hash, PeerId
from tests.sync.chains import A, MadeRun

PEERS = tuple(PeerId(name) for name in "abcdefghijk")
ENTRIES = st.builds(Contribution, st.sampled_from(PEERS), st.integers(1, 10**6), st.integers(1, 100), st.just(0))
Rosters = list[tuple[Contribution, ...]]
ROSTERS = st.lists(
    st.lists(ENTRIES, max_size=8, unique_by=lambda entry: entry.peer).map(lambda some: tuple(sorted(some))), max_size=8
)


FINDINGS = st.sampled_from([PASSED, FAILED, WITHHELD])


def ledger_of(rosters: Rosters) -> Ledger:
    found = EMPTY
    for roster in rosters:
        found = found.after(roster)
    return found


@given(rosters=ROSTERS)
def test_it_is_the_sum_of_the_rosters_and_goes_back_the_same_way(rosters: Rosters) -> None:
    known = [EMPTY]
    for roster in rosters:
        known.append(known[-1].after(roster))
    tokens, rounds = Counter[PeerId](), Counter[PeerId]()
    for entry in (entry for roster in rosters for entry in roster):
        tokens[entry.peer] += entry.tokens
        rounds[entry.peer] += 1
    for peer in PEERS:
        assert (known[-1].of(peer).tokens, known[-1].of(peer).rounds) == (tokens[peer], rounds[peer])
    for roster, before, after in zip(rosters, known, known[1:], strict=False):
        assert after.before(roster) == before
        assert after.before(roster).root == before.root
    assert ledger_of(rosters[::-1]).root == known[-1].root, "the order of rounds is nothing"


@given(rosters=ROSTERS, data=st.data())
def test_what_audits_found_is_counted_of_who_has_an_account_and_taken_back(
    rosters: Rosters, data: st.DataObject
) -> None:
    found, steps = EMPTY, []
    for roster in rosters:
        audited = tuple(Audited(peer, data.draw(FINDINGS)) for peer in PEERS if data.draw(st.booleans()))
        steps.append((found, roster, audited))
        found = found.after(roster, audited)
    for before, roster, audited in reversed(steps):
        assert found.before(roster, audited) == before
        for one in audited:
            was, now = before.of(one.peer), found.of(one.peer)
            counts = (now.passed - was.passed, now.failed - was.failed, now.withheld - was.withheld)
            expected = tuple(int(one.finding == finding) for finding in (PASSED, FAILED, WITHHELD))
            assert counts == (expected if now.rounds else (0, 0, 0))
        found = before


@given(rosters=ROSTERS)
def test_each_account_has_a_path_and_nothing_else_has(rosters: Rosters) -> None:
    ledger = ledger_of(rosters)
    assert ledger.proof_of(PeerId("nobody")) is None
    for account in ledger.accounts:
        proof = ledger.proof_of(account.peer)
        assert proof is not None
        check_account(account, proof, ledger.root)
        lies = [
            (replace(account, tokens=account.tokens + 1), proof),
            (account, replace(proof, index=proof.index + 1)),
            (account, replace(proof, index=proof.index - 1)),
            (account, replace(proof, accounts=proof.accounts + 1)),
            (account, replace(proof, accounts=2**62)),
            (account, replace(proof, index=0, accounts=0)),
            (account, replace(proof, path=(*proof.path, Hash(b"x" * 32)))),
        ]
        for said, path in lies:
            with pytest.raises(RemoteProtocolError, match="is not in the ledger"):
                check_account(said, path, ledger.root)


def test_a_full_ledger_takes_nobody_more_and_goes_back_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "MAX_ACCOUNTS", 2)
    first, second = (tuple(Contribution(peer, 7, 1, 0) for peer in some) for some in (PEERS[:1], PEERS[:3]))
    full = EMPTY.after(first).after(second)
    assert [account.peer for account in full.accounts] == [*PEERS[:2]]
    assert full.of(PEERS[0]).tokens == 14
    assert full.before(second) == EMPTY.after(first)


def test_a_manifest_with_another_ledger_does_not_follow() -> None:
    run = MadeRun()
    commits = run.chain(4)
    known = EMPTY
    for commit in commits:
        known = check_ledger(known, commit.manifest)
        assert known == run.ledger_of(commit.manifest)
    assert known.of(A).rounds == 3
    last = commits[-1].manifest
    for before, child in ((known, last), (EMPTY, replace(last, ledger=EMPTY.root))):
        with pytest.raises(RemoteProtocolError, match="its ledger does not follow"):
            check_ledger(before, child)
