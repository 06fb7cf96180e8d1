"""Who is audited, by whom, what follows, and how much work counts: as pure functions."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from spes_p2p.consensus.child_checks import check_child
from spes_p2p.consensus.ledger import EMPTY
from spes_p2p.consensus.manifest import Audited, Contribution, Manifest, manifest_hash
from spes_p2p.consensus.membership import (
    FAILED,
    FEWEST_AUDITORS,
    HALF,
    LINK_PRIVATE,
    MOST_PROBATION,
    PASSED,
    PROBATION,
    WITHHELD,
    Member,
    able_auditors,
    weightless,
    with_votes,
)
from spes_p2p.consensus.messages import Signed, Verdict
from spes_p2p.consensus.probation import (
    COST_OF_TRAINING,
    MOST_AUDITORS,
    SEQUENCES,
    TEXT_SHARE,
    TILES_SHARE,
    auditors_of,
    drawn_work,
    outcome_of,
)
from spes_p2p.consensus.rules import Outcome, child_manifest, genesis_manifest
from spes_p2p.consensus.standing import LONGEST_WAIT, PATIENCE, PROVEN_EACH, failed_too_often, judged
from spes_p2p.consensus.statements import audited_after
from spes_p2p.consensus.weights import next_step, weighed
from spes_p2p.data.leases import Leases
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId, sha256
from spes_p2p.ownership.assign import OwnershipRequest
from tests.simulation.sim_state import FakeSealer, run_rules

RULES = replace(run_rules(4), clips=True, audited_share=0.08, audited_work=0.03)
SEQUENCES_EACH = 6400


def peers(count: int) -> list[PeerId]:
    return [PeerId(f"p{at:04d}") for at in range(count)]


def manifest_of(
    count: int,
    round: int = 1,
    probation: dict[PeerId, int] | None = None,
    electors: int = 31,
    waited: dict[PeerId, int] | None = None,
    public: int = 1000,
) -> Manifest:
    """One that counts work of all its members, of whom the first so many vote, and can be reached."""
    stands, rounds = probation or {}, waited or {}
    members = tuple(
        Member(peer, 1, at < electors, int(at >= public), True, stands.get(peer, 0), rounds.get(peer, 0))
        for at, peer in enumerate(peers(count))
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
            received += auditors * TILES_SHARE * (1 + 2 * TEXT_SHARE)
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


def test_who_has_waited_longest_on_probation_comes_first_up_to_a_bound() -> None:
    first, second, third, *_ = peers(10)
    stands = {first: 3, second: 2, third: HALF}

    def drawn(waited: dict[PeerId, int]) -> Counter[PeerId]:
        found = (drawn_work(RULES, manifest_of(10, r, stands, waited=waited)) for r in range(1, 600))
        return Counter(entry.peer for some in found for entry in some)

    one = drawn({first: 9, second: 11, third: 10})
    assert one[second] > 4 * one[first]
    assert one[second] > 4 * one[third]
    alike = drawn({first: LONGEST_WAIT, second: 999, third: LONGEST_WAIT + 1})
    assert max(alike[peer] for peer in stands) < 2 * min(alike[peer] for peer in stands), "nobody blocks the others"


def test_who_could_not_reach_a_peer_does_not_audit_it() -> None:
    manifest = manifest_of(12, public=5)
    assert set(auditors_of(manifest, peers(12)[7])) == set(peers(12)[:5])
    assert len(auditors_of(manifest, peers(12)[2])) == MOST_AUDITORS
    assert all(member.link_class == LINK_PRIVATE for member in manifest.members[5:])


def test_places_are_for_those_whom_enough_can_reach() -> None:
    rounds = range(1, 600)
    hidden = [entry for r in rounds for entry in drawn_work(RULES, manifest_of(12, r, {peers(12)[7]: 3}, public=2))]
    assert hidden
    assert {entry.peer for entry in hidden} == set(peers(12)[:2]), "all others can be reached by two alone"


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


class History:
    """Manifests one after the other, made by the shipped rules of what members, rosters and audits are made up here."""

    def __init__(self, count: int, electors: int = 31) -> None:
        self.tip, self.ledger = replace(manifest_of(count, electors=electors), roster=()), EMPTY

    def round(
        self,
        came: Iterable[PeerId] = (),
        gone: Iterable[PeerId] = (),
        idle: Iterable[PeerId] = (),
        found: Mapping[PeerId, str] | None = None,
    ) -> None:
        """One more: all are named but who is `gone`, and all members counted but who is `idle`."""
        audited = tuple(Audited(peer, finding) for peer, finding in sorted((found or {}).items()))
        assert {one.peer for one in audited} <= {entry.peer for entry in self.tip.roster}
        trained = [member.peer for member in self.tip.members if member.peer not in {*idle}]
        roster = tuple(Contribution(peer, 8 * SEQUENCES_EACH, 100, SEQUENCES_EACH) for peer in trained)
        staying = [member for member in self.tip.members if member.peer not in {*gone}]
        named = sorted([*staying, *(Member(peer, 1, False, 0) for peer in came)])
        voting = with_votes(self.tip.members, named, RULES.admission(None))
        members = RULES.with_standing(self.tip, self.ledger, voting, roster, audited)
        self.ledger = self.ledger.after(roster, audited)
        self.tip = replace(
            self.tip, parent=manifest_hash(self.tip), round=self.tip.round + 1,
            members=members, roster=roster, audited=audited,
        )  # fmt: skip

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()

    def of(self, peer: PeerId) -> int:
        return next(member.probation for member in self.tip.members if member.peer == peer)

    def standings(self, of: Iterable[PeerId]) -> Counter[int]:
        return Counter(self.of(peer) for peer in of)


NEW = PeerId("new")
KEYS = [PeerId(f"key{at:03d}") for at in range(100)]


def test_newcomers_are_on_probation_where_three_could_audit_them_and_stay_so_in_another_life() -> None:
    run = History(5)
    run.round([NEW])
    assert run.of(NEW) == PROBATION
    run.round()
    run.round(found={NEW: PASSED})
    again = [*run.tip.members[:-2], replace(run.tip.members[-2], incarnation=9), run.tip.members[-1]]
    assert RULES.with_standing(run.tip, run.ledger, tuple(again), (), ()) == tuple(again)
    few = History(2)
    few.round([NEW])
    assert few.of(NEW) == 0


@pytest.mark.parametrize("count", [4, 40])
def test_a_newcomer_that_nobody_can_audit_comes_to_count_half_and_no_more(count: int) -> None:
    run, stood = History(count), []
    run.round([NEW])
    for _ in range(5 * PATIENCE):
        stood.append(run.of(NEW))
        run.round()
    assert [stood.index(stand) for stand in (PROBATION, HALF + 1, HALF)] == [0, PATIENCE, 2 * PATIENCE]
    assert run.of(NEW) == HALF
    run.round(found={NEW: PASSED})
    assert run.of(NEW) == 0


def test_only_rounds_that_count_its_work_are_waited() -> None:
    run = History(5)
    run.round([NEW])
    for _ in range(3 * PATIENCE):
        run.round(idle=[NEW])
    assert run.of(NEW) == PROBATION


def test_an_audit_passed_on_the_way_costs_nothing_and_one_that_was_not_shown_anything_begins_it_anew() -> None:
    passed, withheld = History(5), History(5)
    for run, finding in ((passed, PASSED), (withheld, WITHHELD)):
        run.round([NEW])
        run.rounds(PATIENCE - 5)
        run.round(found={NEW: finding})
        run.rounds(PATIENCE + 4)
    assert (passed.of(NEW), withheld.of(NEW)) == (HALF, HALF + 1)


def test_who_failed_an_audit_is_let_out_by_audits_alone() -> None:
    run = History(5)
    run.round([NEW])
    run.round()
    run.round(found={NEW: FAILED})
    run.rounds(10 * PATIENCE)
    assert run.of(NEW) == MOST_PROBATION
    for _ in range(MOST_PROBATION - HALF - 1):
        run.round(found={NEW: PASSED})
    run.rounds(10 * PATIENCE)
    assert run.of(NEW) == HALF + 1
    run.round(found={NEW: PASSED})
    assert run.of(NEW) == HALF


@pytest.mark.parametrize("count", [3, 8, 24])
@pytest.mark.parametrize("leaving", [False, True])
def test_keys_that_wait_stay_few_however_many_there_are(count: int, leaving: bool) -> None:
    """They claim all that they can, and come back in turns, as if a leader had dropped them."""
    run, most = History(count), max(1, count // PROVEN_EACH)
    run.round(KEYS)
    for at in range(8 * PATIENCE):
        gone = [KEYS[at % len(KEYS)]] if leaving else []
        run.round(gone=gone)
        run.round(came=gone)
        counting = [key for key in KEYS if key in {m.peer for m in run.tip.members} and run.of(key) <= HALF]
        assert len(counting) <= most
        assert not any(run.of(key) < HALF for key in counting)
    assert len(counting) == most or leaving
    weights = {entry.peer: entry.tokens for entry in weighed(run.tip.roster, True, run.tip.members)}
    assert sum(weights[key] for key in KEYS if key in weights) <= sum(weights.values()) * most / (2 * count)


def test_an_honest_newcomer_gets_past_many_keys_that_fail_their_audits() -> None:
    run, rounds = History(10), 0
    run.round([NEW, *KEYS])
    while run.of(NEW) and rounds < 400:
        drawn = [entry.peer for entry in drawn_work(RULES, run.tip)]
        found = {peer: FAILED if peer in KEYS else PASSED for peer in drawn}
        run.round(gone=failed_too_often(run.tip.members, found), found=found)
        rounds += 1
    assert run.of(NEW) == 0
    assert not any(member.peer in KEYS and member.probation <= HALF for member in run.tip.members)


def test_a_leader_that_hides_what_auditors_say_holds_nobody_up_for_ever() -> None:
    """Every third leader lies: it lists no audit passed, and drops the newcomer whenever it can."""
    run, rounds = History(6), 0
    run.round([NEW])
    while run.of(NEW) and rounds < 400:
        drawn = {entry.peer for entry in drawn_work(RULES, run.tip)}
        if rounds % 3:
            run.round(found=dict.fromkeys(drawn, PASSED))
        else:
            run.round(gone=[NEW])
            run.round(came=[NEW])
        rounds += 1
    assert rounds < 8 * PATIENCE


def test_leaving_or_being_dropped_clears_nothing_and_costs_little() -> None:
    def back(*found: str, rounds: int = 0, which: PeerId = NEW) -> int:
        run = History(8)
        run.round([NEW] if which == NEW else [])
        run.rounds(rounds + 1)
        for finding in found:
            run.round(found={which: finding})
        run.round(gone=[which])
        run.round(came=[which])
        return run.of(which)

    assert back() == PROBATION
    assert back(FAILED) == MOST_PROBATION
    assert back(PASSED, PASSED, PASSED, FAILED) == MOST_PROBATION
    assert back(PASSED, PASSED, PASSED, WITHHELD, rounds=3 * PATIENCE) == PROBATION
    assert back(*[PASSED] * 5, WITHHELD) == 2
    assert back(*[PASSED] * 6, WITHHELD) == HALF
    assert back(PASSED) == 2
    assert back(PASSED, PASSED) == back(PASSED, PASSED, PASSED, PASSED) == HALF
    assert back(rounds=PATIENCE) == 2
    assert back(rounds=2 * PATIENCE) == HALF
    assert back(rounds=2 * PATIENCE, which=peers(8)[0]) == HALF, "one that began with the run, too"
    failed_while_dropped = History(8)
    failed_while_dropped.round([NEW])
    failed_while_dropped.round()
    failed_while_dropped.round(gone=[NEW], found={NEW: FAILED})
    failed_while_dropped.round(came=[NEW])
    assert failed_while_dropped.of(NEW) == MOST_PROBATION


def test_where_fewer_than_three_are_left_who_could_audit_waiting_goes_on_and_failures_are_remembered() -> None:
    run, failed = History(4), PeerId("failed")
    run.round([NEW, failed])
    run.round()
    run.round(found={failed: FAILED})
    run.round(gone=[*peers(4)[1:], failed])
    assert len(able_auditors(run.tip.members)) < FEWEST_AUDITORS
    run.rounds(2 * PATIENCE)
    assert run.of(NEW) == HALF
    run.round(came=[failed, PeerId("other")])
    assert run.of(failed) == MOST_PROBATION
    assert run.of(PeerId("other")) == 0


@pytest.mark.parametrize("seed", range(8))
def test_nothing_that_leaders_choose_makes_a_key_count_that_passed_no_audit(seed: int) -> None:
    """They choose who is named, counted and left out, and which audits of those who fake their work come about."""
    run, fakes, rng = History(8), KEYS[:4], random.Random(seed)
    run.round(fakes)
    half = 0
    for _ in range(150):
        before = {member.peer: member.probation for member in run.tip.members}
        failed = {peer for peer in fakes if run.ledger.of(peer).failed}
        gone, idle = ({peer for peer in fakes if not rng.randrange(8)} for _ in range(2))
        blamed = {entry.peer for entry in run.tip.roster if entry.peer in fakes and not rng.randrange(60)}
        came = {peer for peer in fakes if peer not in before and rng.randrange(2)}
        run.round(came, gone, idle, {peer: rng.choice([FAILED, WITHHELD]) for peer in blamed})
        now = {member.peer: member.probation for member in run.tip.members}
        counting = [peer for peer in fakes if now.get(peer, PROBATION) <= HALF]
        assert [now[peer] for peer in counting] in ([], [HALF])
        assert not failed & {*counting}
        assert all(now[peer] >= before[peer] for peer in failed & now.keys() & before.keys())
        assert all(now[peer] >= MOST_PROBATION for peer in came & failed)
        half += len(counting)
    assert half, "it comes to that"


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
    run = History(8)
    rules = replace(RULES, audited_work=0.0)
    named = (*run.tip.members, Member(NEW, 1, False, 0))
    assert rules.with_standing(run.tip, run.ledger, named) == named


def test_who_weighs_more_than_half_is_not_on_probation_where_too_few_would_be_left_either() -> None:
    members = [Member(p, 1, True, 0, True, {0: 0, 1: 0, 2: 3, 3: HALF}[at]) for at, p in enumerate(peers(4))]
    members = [*members[:2], replace(members[2], probation=2)]
    roster = [Contribution(p, 100, 10, 1) for p in peers(3)]
    assert [entry.tokens for entry in weighed(roster, True, members)] == [100, 100, 50]


def test_a_child_with_another_standing_does_not_follow() -> None:
    run = History(5)
    rules = replace(RULES, leased=False)
    outcome = Outcome((), (), sha256(), run.tip.state_root, None, ledger=run.ledger.root)
    voting = with_votes(run.tip.members, (Member(NEW, 1, False, 0), *run.tip.members), RULES.admission(None))
    members = RULES.with_standing(run.tip, run.ledger, voting)
    wishes = {member.peer: OwnershipRequest(1) for member in members}
    check_child(rules, run.tip, run.ledger, child_manifest(rules, run.tip, outcome, members, wishes))
    for lie in (replace(members[0], probation=0), replace(members[0], probation=2), replace(members[0], waited=5)):
        false = (lie, *members[1:])
        with pytest.raises(RemoteProtocolError, match="votes or probation do not follow"):
            check_child(rules, run.tip, run.ledger, child_manifest(rules, run.tip, outcome, false, wishes))
