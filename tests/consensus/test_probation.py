"""Who is audited, by whom, what follows, and how much work counts: as pure functions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from spes_p2p.consensus.manifest import Audited, Contribution, Manifest, manifest_hash
from spes_p2p.consensus.membership import (
    FAILED,
    FEWEST_AUDITORS,
    HALF,
    MOST_PROBATION,
    PASSED,
    PROBATION,
    WITHHELD,
    Member,
    able_auditors,
    failed_too_often,
    judged,
    next_members,
    weightless,
)
from spes_p2p.consensus.messages import Signed, Verdict
from spes_p2p.consensus.probation import (
    COST_OF_TRAINING,
    MOST_AUDITORS,
    SEQUENCES,
    TILES_SHARE,
    auditors_of,
    drawn_work,
    outcome_of,
)
from spes_p2p.consensus.rules import Outcome, child_manifest, genesis_manifest
from spes_p2p.consensus.statements import audited_after
from spes_p2p.consensus.weights import next_step, weighed
from spes_p2p.data.leases import Leases
from spes_p2p.ids import PeerId, sha256
from spes_p2p.ownership.assign import OwnershipRequest
from spes_p2p.testing.sim_state import FakeSealer, run_rules

RULES = replace(run_rules(4), clips=True, audited_share=0.08, audited_work=0.03)
SEQUENCES_EACH = 6400


def peers(count: int) -> list[PeerId]:
    return [PeerId(f"p{at:04d}") for at in range(count)]


def manifest_of(count: int, round: int = 1, probation: dict[PeerId, int] | None = None, electors: int = 31) -> Manifest:
    """One that counts work of all its members."""
    stands = probation or {}
    members = tuple(
        Member(peer, 1, at < electors, 0, True, stands.get(peer, 0)) for at, peer in enumerate(peers(count))
    )
    roster = tuple(Contribution(peer, 8 * SEQUENCES_EACH, 100, SEQUENCES_EACH) for peer in peers(count))
    genesis = genesis_manifest(RULES, sha256(b"state"), members, {p: OwnershipRequest(1) for p in peers(count)})
    return replace(genesis, round=round, roster=roster, members=members, leases=Leases())


def said_by(manifest: Manifest, author: PeerId, peer: PeerId, finding: str) -> Signed[Verdict]:
    verdict = Verdict(RULES.fingerprint, manifest_hash(manifest), peer, finding)
    return FakeSealer(author).seal(verdict)


# ---- whose work, and by whom


@pytest.mark.parametrize("count", [4, 10, 40, 300])
def test_audits_take_no_more_than_their_share_of_training_and_of_bytes(count: int) -> None:
    rounds = 200
    training = received = 0.0
    for round in range(1, rounds + 1):
        manifest = manifest_of(count, round)
        for entry in drawn_work(RULES, manifest):
            auditors = len(auditors_of(manifest, entry.peer))
            training += auditors * SEQUENCES * COST_OF_TRAINING
            received += auditors * TILES_SHARE
    assert 0 < training <= 1.1 * RULES.audited_work * rounds * count * SEQUENCES_EACH
    assert 0 < received <= 1.1 * RULES.audited_work * rounds * 2 * count
    assert max(training / (rounds * count * SEQUENCES_EACH), received / (rounds * 2 * count)) > 0.02


def test_everybody_has_its_turn_and_newcomers_have_it_soon() -> None:
    newcomer = peers(10)[7]
    plain = Counter(e.peer for r in range(1, 600) for e in drawn_work(RULES, manifest_of(10, r)))
    waiting = Counter(e.peer for r in range(1, 600) for e in drawn_work(RULES, manifest_of(10, r, {newcomer: 3})))
    assert set(plain) == set(peers(10))
    assert max(plain.values()) < 3 * min(plain.values())
    assert waiting[newcomer] > 4 * plain[newcomer]
    assert min(waiting[peer] for peer in peers(10)) > 0, "newcomers do not take all places"


def test_auditors_are_other_electors_who_trained_and_count() -> None:
    manifest = manifest_of(20, probation={peers(20)[0]: 2, peers(20)[1]: HALF}, electors=12)
    manifest = replace(manifest, roster=manifest.roster[:-12] + manifest.roster[9:])
    seen = set()
    for peer in peers(20):
        auditors = auditors_of(manifest, peer)
        assert peer not in auditors
        assert len(auditors) == MOST_AUDITORS or len(auditors) >= 8
        seen |= set(auditors)
    assert seen == set(peers(20)[1:8]) | set(peers(20)[9:12])


def test_nobody_is_audited_by_one_or_two() -> None:
    rules = replace(RULES, audited_work=100.0)
    assert drawn_work(rules, manifest_of(FEWEST_AUDITORS)) == ()
    assert len(drawn_work(rules, manifest_of(FEWEST_AUDITORS + 1))) == FEWEST_AUDITORS + 1


def test_without_audits_nobody_is_drawn() -> None:
    assert drawn_work(replace(RULES, audited_work=0.0), manifest_of(10)) == ()


# ---- what follows


@pytest.mark.parametrize(
    ("failed", "passed", "withheld", "outcome"),
    [
        (7, 2, 0, FAILED),
        (6, 3, 0, None),
        (3, 6, 0, None),
        (2, 7, 0, PASSED),
        (0, 6, 0, None),
        (6, 0, 0, None),
        (6, 0, 1, WITHHELD),
        (0, 2, 7, WITHHELD),
        (0, 3, 6, None),
    ],
)
def test_more_than_two_thirds_of_those_drawn_must_agree(
    failed: int, passed: int, withheld: int, outcome: str | None
) -> None:
    manifest, peer = manifest_of(12), peers(12)[3]
    words = [FAILED] * failed + [PASSED] * passed + [WITHHELD] * withheld
    findings = dict(zip(auditors_of(manifest, peer), words, strict=False))
    assert outcome_of(manifest, peer, findings) == outcome
    others = dict.fromkeys(set(peers(12)) - set(auditors_of(manifest, peer)), FAILED)
    assert outcome_of(manifest, peer, others) is None, "who was not drawn has no say"


def drawn_one(count: int = 12) -> tuple[Manifest, PeerId]:
    for round in range(1, 1000):
        manifest = manifest_of(count, round)
        for entry in drawn_work(RULES, manifest):
            return manifest, entry.peer
    raise AssertionError


def test_a_manifest_lists_what_enough_verdicts_say_with_all_of_them() -> None:
    manifest, peer = drawn_one()
    auditors = auditors_of(manifest, peer)
    verdicts = [said_by(manifest, author, peer, PASSED) for author in reversed(auditors)]
    assert audited_after(RULES, manifest, verdicts) == ((Audited(peer, PASSED),), tuple(reversed(verdicts)))
    assert audited_after(RULES, manifest, verdicts[:6]) == ((), ())


def test_words_that_do_not_count_change_nothing() -> None:
    manifest, peer = drawn_one()
    auditors = auditors_of(manifest, peer)
    good = [said_by(manifest, author, peer, FAILED) for author in auditors[:6]]
    undrawn = next(p for p in peers(12) if p not in {entry.peer for entry in drawn_work(RULES, manifest)})
    other = manifest_of(12, 999)
    bad = [
        said_by(manifest, peer, peer, FAILED),  # of itself
        said_by(manifest, PeerId("stranger"), peer, FAILED),
        said_by(manifest, auditors[0], peer, FAILED),  # twice
        said_by(other, auditors[8], peer, FAILED),  # of another round
        said_by(manifest, auditors[8], peer, "other"),
        *(said_by(manifest, author, undrawn, FAILED) for author in auditors_of(manifest, undrawn)),
        FakeSealer(auditors[8]).seal(Verdict(sha256(b"other run"), manifest_hash(manifest), peer, FAILED)),
    ]
    assert audited_after(RULES, manifest, [*good, *bad]) == ((), ())
    last = said_by(manifest, auditors[8], peer, FAILED)
    assert audited_after(RULES, manifest, [*good, *bad, last])[0] == (Audited(peer, FAILED),)


def test_probation_goes_down_with_each_audit_passed_and_up_with_each_failed() -> None:
    member = Member(PeerId("a"), 1, True, 0, True, PROBATION)

    def after(*findings: str) -> int:
        now: tuple[Member, ...] = (member,)
        for finding in findings:
            now = judged(now, {member.peer: finding})
        return now[0].probation

    assert [after(*[PASSED] * times) for times in range(5)] == [3, 2, 1, 0, 0]
    assert after(FAILED) == MOST_PROBATION
    assert after(WITHHELD, WITHHELD) == PROBATION
    assert after(PASSED, PASSED, PASSED, WITHHELD) == HALF
    assert failed_too_often([member], {member.peer: FAILED}) == frozenset()
    assert failed_too_often([replace(member, probation=4)], {member.peer: FAILED}) == {member.peer}
    assert failed_too_often([replace(member, probation=6)], {member.peer: WITHHELD}) == frozenset()


def test_newcomers_are_on_probation_where_three_could_audit_them_and_stay_so_in_another_life() -> None:
    parent = manifest_of(5)
    admission = RULES.admission(None)
    new = Member(PeerId("new"), 7, False, 0)

    def next_of(members: tuple[Member, ...]) -> dict[PeerId, int]:
        found = next_members(members, members, [new], (), admission)
        return {member.peer: member.probation for member in found}

    assert next_of(parent.members)[new.peer] == PROBATION
    assert next_of(parent.members[:2])[new.peer] == 0
    again = (*parent.members, replace(new, probation=2, incarnation=1))
    assert next_of(tuple(sorted(again)))[new.peer] == 2


# ---- how much counts


def test_who_is_on_probation_weighs_nothing_or_half_and_moves_no_median() -> None:
    a, b, c, half, none = peers(5)
    members = [Member(p, 1, True, 0, True, {half: HALF, none: 2}.get(p, 0)) for p in peers(5)]
    roster = [Contribution(p, 100, 10, 1) for p in (a, b, c, half)] + [Contribution(none, 9999, 999, 1)]
    assert [entry.tokens for entry in weighed(roster, True, members)] == [100, 100, 100, 50, 0]
    assert next_step(0, roster, True, members) == 10
    assert weightless(members) == {none}
    assert able_auditors(members) == (a, b, c, half)


def test_where_too_few_would_be_left_all_count() -> None:
    members = [Member(p, 1, True, 0, True, 3 * (at > 1)) for at, p in enumerate(peers(6))]
    assert weightless(members) == frozenset()
    assert len(able_auditors(members)) == 6


def test_who_does_not_count_owns_no_column() -> None:
    parent = manifest_of(5)
    members = tuple(replace(member, probation=3 * (at == 0)) for at, member in enumerate(parent.members))
    outcome = Outcome(parent.roster, (), sha256(), sha256(b"state"), None)
    wishes = {peer: OwnershipRequest(2) for peer in peers(5)}
    child = child_manifest(
        replace(RULES, leased=False), replace(parent, ownership=((peers(5)[0],),) * 4), outcome, members, wishes
    )
    owners = {owner for column in child.ownership for owner in column}
    assert owners == set(peers(5)[1:])


def test_runs_without_audits_know_no_probation() -> None:
    assert replace(RULES, audited_work=0.0).admission(None).probation == 0
