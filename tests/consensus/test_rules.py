"""Manifests follow from their parents: what is derived, and that nothing else passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given

from spes_p2p.consensus.certificate import check_certificate
from spes_p2p.consensus.child_checks import (
    check_child,
    check_commit,
    check_newcomers,
    check_plan,
    check_renewal,
    check_slices,
)
from spes_p2p.consensus.columns import lost_columns, tokens_gone
from spes_p2p.consensus.electorate import Faults, SealRule
from spes_p2p.consensus.manifest import (
    Contribution,
    Manifest,
    Merge,
    Slice,
    manifest_hash,
)
from spes_p2p.consensus.membership import LEAST_NEW, Member, Roll, electors, with_votes
from spes_p2p.consensus.messages import (
    QUORUM,
    RENEWAL,
    Commit,
    Plan,
)
from spes_p2p.consensus.place import dislodges, goes_before
from spes_p2p.consensus.renewing import signed_renewal
from spes_p2p.consensus.rules import (
    IDLE_TURNS,
    MOST_ROUNDS,
    Outcome,
    RunRules,
    capped_tokens,
    child_manifest,
    genesis_manifest,
    next_step,
    renewed_manifest,
)
from spes_p2p.consensus.slices import Turn, plan_slices
from spes_p2p.consensus.turns import Vocabulary, due_columns
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import NOBODY, PeerId, sha256
from spes_p2p.ownership.assign import OwnershipRequest, columns_of
from tests.sync.chains import ORGANISER, A, B, MadeRun

RUN = MadeRun()
MEMBERS = (Member(A, 1, True, 0), Member(B, 1, True, 0))
WISHES = {A: OwnershipRequest(4), B: OwnershipRequest(4)}
PARENT = genesis_manifest(RUN.rules, sha256(b"state 0"), MEMBERS, WISHES)
LENGTH = RUN.config.data.sequence_length

entries = st.builds(Contribution, st.just(A), st.integers(1, 10**12), st.integers(1, 10**6), st.integers(0, 10**6))


def child() -> Manifest:
    """One round of both, by the rules."""
    roster = (Contribution(A, 8 * LENGTH, 1, 8), Contribution(B, 16 * LENGTH, 2, 16))
    slices = plan_slices([A, B], PARENT.ownership, {}, RUN.rules.block_tiles, RUN.rules.slice_tiles)
    outcome = Outcome(roster, slices, sha256(b"wire"), sha256(b"state 1"), None)
    return child_manifest(RUN.rules, PARENT, outcome, MEMBERS, WISHES)


CHILD = child()


@given(st.integers(0, 10**9), st.lists(entries, min_size=1, max_size=8))
def test_the_step_grows_by_the_weighted_mean_rounded_half_up(step: int, roster: list[Contribution]) -> None:
    mean = Fraction(sum(e.tokens * e.steps for e in roster), sum(e.tokens for e in roster))
    assert next_step(step, roster) - step == int(mean + Fraction(1, 2))


@given(st.integers(1, 10**6), st.lists(st.integers(1, 10**9), min_size=1, max_size=8))
def test_at_equal_speeds_the_step_grows_by_exactly_h(steps: int, tokens: list[int]) -> None:
    assert next_step(7, [Contribution(A, count, steps, 1) for count in tokens]) == 7 + steps


def test_nobody_trained_no_step() -> None:
    assert next_step(5, []) == 5


def test_claims_are_capped_by_the_lease() -> None:
    leased = sum(stop - start for start, stop in PARENT.leases.of(A))
    claim = capped_tokens(RUN.rules, PARENT, Contribution(A, 10**15, 5, 10**9))
    assert (claim.sequences, claim.tokens) == (leased, leased * LENGTH)
    own_data = capped_tokens(RUN.rules, PARENT, Contribution(A, 10**15, 5, 0))
    assert own_data.tokens == 5 * RUN.rules.batch_sequences * LENGTH


@pytest.mark.parametrize("leased", [True, False])
@pytest.mark.parametrize("sequences", [0, 8, 2**62])
def test_steps_are_capped_by_the_lease_and_by_the_length_of_a_round(leased: bool, sequences: int) -> None:
    rules, huge = replace(RUN.rules, leased=leased), 2**62
    claim = capped_tokens(rules, PARENT, Contribution(A, huge, huge, sequences))
    batches = -(-claim.sequences // rules.batch_sequences)
    most = MOST_ROUNDS * PARENT.steps_per_round
    assert claim.steps == (min(batches, most) if leased and sequences else most)
    assert claim.tokens <= max(claim.sequences, most * rules.batch_sequences) * LENGTH
    assert capped_tokens(rules, PARENT, claim) == claim


def test_a_manifest_that_counts_more_steps_than_a_peer_can_have_made_is_refused() -> None:
    for entry in (Contribution(A, 8 * LENGTH, 2, 8), Contribution(A, 2**62, 2**62, 0), Contribution(A, 1, 2**62, 0)):
        roster = (entry, CHILD.roster[1])
        outcome = Outcome(roster, CHILD.slices, CHILD.wire_root, CHILD.state_root, None)
        with pytest.raises(RemoteProtocolError, match="a claims more than its lease"):
            check_child(RUN.rules, PARENT, child_manifest(RUN.rules, PARENT, outcome, MEMBERS, WISHES))


def test_the_largest_claims_of_a_thousand_rounds_fit_into_the_numbers_of_a_manifest() -> None:
    """Leases, and with them what may be claimed, do not double with each round that used them all."""
    manifest = PARENT
    for _ in range(1000):
        claims = (capped_tokens(RUN.rules, manifest, Contribution(peer, 2**62, 2**62, 2**62)) for peer in (A, B))
        outcome = Outcome(tuple(claims), CHILD.slices, CHILD.wire_root, CHILD.state_root, None)
        made = child_manifest(RUN.rules, manifest, outcome, MEMBERS, WISHES)
        assert made.step - manifest.step <= MOST_ROUNDS * manifest.steps_per_round
        manifest = made
    assert max(manifest.step, manifest.tokens, manifest.leases.cursor) < 2**40


def test_what_the_rules_make_passes() -> None:
    check_child(RUN.rules, PARENT, CHILD)
    assert (CHILD.step, CHILD.tokens) == (2, 24 * LENGTH)  # (8 * 1 + 16 * 2) / 24 = 1.67


TAMPERED: dict[str, Callable[[Manifest], Manifest]] = {
    "round": lambda m: replace(m, round=m.round + 1),
    "round below zero": lambda m: replace(m, round=-1),
    "parent": lambda m: replace(m, parent=sha256(b"another")),
    "fingerprint": lambda m: replace(m, fingerprint=sha256(b"another run")),
    "step": lambda m: replace(m, step=m.step + 1),
    "tokens": lambda m: replace(m, tokens=m.tokens + 1),
    "leases": lambda m: replace(m, leases=PARENT.leases),
    "steps_per_round": lambda m: replace(m, steps_per_round=m.steps_per_round + 1),
    "column_rounds": lambda m: replace(m, column_rounds=(0,) * len(m.column_rounds)),
    "members": lambda m: replace(m, members=m.members[::-1]),
    "votes": lambda m: replace(m, members=(*m.members, Member(PeerId("carl"), 1, True, 0))),
    "link class": lambda m: replace(m, members=(replace(m.members[0], link_class=-1), *m.members[1:])),
    "nobody": lambda m: replace(m, members=(), ownership=((),) * len(m.ownership)),
    "owner": lambda m: replace(m, ownership=((PeerId("carl"),), *m.ownership[1:])),
    "columns": lambda m: replace(m, ownership=m.ownership[:-1]),
    "roster order": lambda m: replace(m, roster=m.roster[::-1]),
    "stranger": lambda m: replace(m, roster=(*m.roster, Contribution(PeerId("carl"), 1, 1, 1))),
    "slices missing": lambda m: replace(m, slices=m.slices[1:]),
    "slices twice": lambda m: replace(m, slices=(m.slices[0], *m.slices)),
    "contributor": lambda m: replace(m, slices=(replace(m.slices[0], contributors=(PeerId("carl"),)), *m.slices[1:])),
    "nobody's": lambda m: replace(m, slices=(replace(m.slices[0], contributors=()), *m.slices[1:])),
    "block": lambda m: replace(m, slices=(replace(m.slices[0], block=99), *m.slices[1:])),
    "merge": lambda m: replace(m, merge=Merge(0.5, ())),
    "merge of nothing": lambda m: replace(m, merge=Merge(0.0, ())),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_what_does_not_follow_is_refused(what: str) -> None:
    with pytest.raises(RemoteProtocolError):
        check_child(RUN.rules, PARENT, TAMPERED[what](CHILD))


@pytest.mark.parametrize(("shift", "is_due"), [(0, True), (1, False), (-1, False)])
def test_only_the_part_of_the_shared_block_that_is_due_may_be_brought(shift: int, is_due: bool) -> None:
    rules = replace(RUN.rules, vocabulary=Vocabulary(3, 3))
    shared = rules.due_shared(PARENT.round + 1 + shift)
    slices = plan_slices([A, B], PARENT.ownership, {}, rules.block_tiles, rules.slice_tiles, turn=Turn(shared=shared))
    outcome = Outcome(CHILD.roster, slices, CHILD.wire_root, CHILD.state_root, None)
    made = child_manifest(rules, PARENT, outcome, MEMBERS, WISHES)
    whole = replace(made, slices=CHILD.slices)
    if is_due:
        check_child(rules, PARENT, made)
    for wrong in [whole] if is_due else [made, whole]:
        with pytest.raises(RemoteProtocolError, match=r"does not fit the plan|covered in part"):
            check_child(rules, PARENT, wrong)


def test_no_slice_reaches_from_vocabulary_into_the_rest() -> None:
    """Not where the part that is due ends just before it, either."""
    rules = replace(RUN.rules, vocabulary=Vocabulary(2, 2), slice_tiles=3)
    vocabulary, rest = rules.due_shared(PARENT.round + 1)
    assert (vocabulary, rest[0]) == ((1, 1), 2)
    turn = Turn(shared=(vocabulary, rest))
    first, second, *others = plan_slices([A, B], PARENT.ownership, {}, rules.block_tiles, rules.slice_tiles, turn=turn)
    roster = tuple(Contribution(peer, 8, 1, 1) for peer in (A, B))
    check_slices(rules, PARENT, roster, (first, second, *others))
    both = replace(first, tiles=first.tiles + second.tiles)
    rules = replace(rules, slice_tiles=both.tiles)
    with pytest.raises(RemoteProtocolError, match="does not fit the plan"):
        check_slices(rules, PARENT, roster, (both, *others))


def test_what_a_slice_has_waited_for_is_known() -> None:
    rules = replace(RUN.rules, expert_rounds=6, vocabulary=Vocabulary(2, 4))
    pieces = [Slice(0, 1, 1, A, (A,)), Slice(0, 2, 1, A, (A,)), Slice(1, rules.block_tiles[0], 1, A, (A,))]
    assert [rules.rounds_between(piece) for piece in pieces] == [4, 1, 6]
    assert RUN.rules.rounds_between(pieces[0]) == 1


def test_a_column_without_owner_in_the_roster_keeps_its_round() -> None:
    slices = tuple(piece for piece in CHILD.slices if piece.block != 1)
    outcome = Outcome(CHILD.roster, slices, CHILD.wire_root, CHILD.state_root, None)
    later = child_manifest(RUN.rules, PARENT, outcome, MEMBERS, WISHES)
    check_child(RUN.rules, PARENT, later)
    assert later.column_rounds[0] == 0
    assert set(later.column_rounds[1:]) == {1}


@pytest.mark.parametrize("block", [0, 1])
def test_a_plan_without_a_block_that_is_due_or_one_of_its_contributors_is_refused(block: int) -> None:
    roster = tuple(Contribution(peer, 8, 1, 1) for peer in (A, B))
    slices = plan_slices([A, B], PARENT.ownership, {}, RUN.rules.block_tiles, RUN.rules.slice_tiles)
    fair = Plan(RUN.rules.fingerprint, manifest_hash(PARENT), 0, A, roster, slices)
    check_plan(RUN.rules, PARENT, fair)
    without = replace(fair, slices=tuple(piece for piece in slices if piece.block != block))
    with pytest.raises(RemoteProtocolError, match=f"block {block} is due, and the plan leaves it out"):
        check_plan(RUN.rules, PARENT, without)
    alone = replace(fair, slices=tuple(replace(piece, contributors=piece.contributors[:1]) for piece in slices))
    with pytest.raises(RemoteProtocolError, match="leaves out a contributor of the roster"):
        check_plan(RUN.rules, PARENT, alone)


def test_certificates_need_good_seals_of_enough_electors() -> None:
    parent = RUN.genesis(sha256(b"state 0")).manifest
    good = RUN.certified(RUN.child(parent, sha256(b"state 1"), sha256(b"wire")))
    check = RUN.keys.verify
    check_certificate(parent, good.manifest, good.certificate, check, RUN.rules.seals)
    (seal,) = good.certificate.seals
    for bad in (
        replace(good.certificate, seals=()),
        replace(good.certificate, seals=(replace(seal, signature=b"forged"),)),
        replace(good.certificate, ballot=1),
        replace(good.certificate, manifest=sha256(b"another")),
        replace(good.certificate, kind=RENEWAL),
        RUN.certified(good.manifest, signer=B).certificate,
    ):
        with pytest.raises(RemoteProtocolError):
            check_certificate(parent, good.manifest, bad, check, RUN.rules.seals)


def rounds_of(roster: Sequence[PeerId], parent: Manifest, count: int, rules: RunRules = RUN.rules) -> list[Manifest]:
    """Rounds that count the work of `roster` alone, while all stay members."""
    made = []
    for _ in range(count):
        work = tuple(Contribution(peer, LENGTH, 1, 1) for peer in roster)
        overdue = {at for at, last in enumerate(parent.column_rounds) if parent.round + 1 - last >= rules.expert_rounds}
        due = due_columns(parent.ownership, parent.round + 1, rules.expert_rounds) | overdue
        slices = plan_slices(roster, parent.ownership, {}, rules.block_tiles, rules.slice_tiles, Turn(due))
        outcome = Outcome(work, slices, sha256(b"wire"), sha256(b"state"), None)
        parent = child_manifest(rules, parent, outcome, MEMBERS, WISHES)
        made.append(parent)
    return made


@pytest.mark.parametrize("turns", [1, 2])
def test_who_trains_nothing_loses_its_columns_and_has_them_back_when_it_trains_again(turns: int) -> None:
    rules = replace(RUN.rules, expert_rounds=turns)
    begun = rounds_of((A, B), PARENT, 2 * turns, rules)[-1]
    theirs = columns_of(begun.ownership, B)
    assert theirs
    rounds = rounds_of((A,), begun, 4 * turns + 4, rules)
    kept = [bool(columns_of(manifest.ownership, B)) for manifest in rounds]
    lost_at = kept.index(False)
    assert 2 * turns <= lost_at < IDLE_TURNS * turns + turns
    assert not any(kept[lost_at:])  # it is given no others in their place
    assert all(A in owners for owners in rounds[-1].ownership)
    assert all(rounds[-1].round - last <= turns for last in rounds[-1].column_rounds)
    assert columns_of(rounds_of((A, B), rounds[-1], 1 + turns, rules)[-1].ownership, B)


def test_where_nobody_trains_everybody_keeps_what_it_has() -> None:
    assert rounds_of((), PARENT, 9)[-1].ownership == PARENT.ownership


def test_a_round_that_was_missed_costs_no_column() -> None:
    chain = rounds_of((A, B), PARENT, 1)
    for roster in ((A,), (A,), (A, B)) * 4:
        chain += rounds_of(roster, chain[-1], 1)
        assert chain[-1].ownership == PARENT.ownership


def test_electors_vote_for_so_many_new_peers_in_a_round() -> None:
    def named(new: int) -> Manifest:
        members = with_votes(MEMBERS, sorted((*MEMBERS, *(Member(PeerId(f"x{at}"), 1, True, 0) for at in range(new)))))
        return replace(CHILD, members=members)

    check_newcomers(RUN.rules, PARENT, named(LEAST_NEW))
    with pytest.raises(RemoteProtocolError, match="5 new members, but at most 4"):
        check_newcomers(RUN.rules, PARENT, named(LEAST_NEW + 1))
    check_newcomers(RUN.rules, PARENT, replace(CHILD, members=tuple(replace(one, incarnation=9) for one in MEMBERS)))


def test_with_turns_nobody_takes_over_what_was_not_handed_out() -> None:
    """Its owner may be rounds ahead, unless it is gone itself."""
    rules = replace(RUN.rules, expert_rounds=4)
    ownership = ((A,), (A,), (A,), (B,))
    parent = replace(PARENT, ownership=ownership)
    first = sum(rules.block_tiles[:2])
    handed = Slice(2, first, rules.block_tiles[2], A, (A,))
    outcome = Outcome((), (handed,), sha256(b"wire"), sha256(b"state 1"), None)
    wishes = {A: OwnershipRequest(1), B: OwnershipRequest(4, releases=(3,))}
    assert child_manifest(rules, parent, outcome, MEMBERS, wishes).ownership == ((A,), (B,), (A,), (B,))
    assert child_manifest(rules, parent, outcome, MEMBERS[1:], {B: OwnershipRequest(4)}).ownership == ((B,),) * 4
    at_once = child_manifest(RUN.rules, parent, outcome, MEMBERS, wishes).ownership
    assert sum(owners == (A,) for owners in at_once) == 1


def test_what_an_owner_had_trained_since_the_last_hand_out_is_counted_when_it_loses_the_column() -> None:
    def manifest(round: int, owners: tuple[PeerId, ...], tokens: dict[PeerId, int], handed_out: int) -> Manifest:
        roster = tuple(Contribution(peer, count, 1, 0) for peer, count in tokens.items())
        return replace(PARENT, round=round, ownership=(owners,), roster=roster, column_rounds=(handed_out,))

    line = [
        manifest(1, (A,), {A: 1, B: 1}, 1),
        manifest(2, (A, B), {A: 10, B: 10}, 1),
        manifest(3, (A, B), {A: 100, B: 100}, 1),
    ]
    with_b = manifest(4, (B,), {A: 1000, B: 1000}, 1)
    assert lost_columns(line[-1], with_b) == (0,)
    assert tokens_gone(line, with_b, (0,)) == {0: 1110}
    nobody = manifest(4, (), {}, 1)
    assert tokens_gone(line, nobody, (0,)) == {0: 210}  # b was no owner yet in round 2
    assert lost_columns(line[-1], manifest(4, (B,), {A: 1000}, 4)) == ()
    assert lost_columns(line[-1], manifest(4, (A, B), {}, 1)) == ()


def renewal(*newcomers: Member, chosen: Sequence[PeerId] = (A,), **wrong: object) -> tuple[Manifest, Commit]:
    """A parent, and a child by which the organiser names who votes."""
    made = renewed_manifest(RUN.rules, CHILD, chosen, newcomers)
    child = replace(made, **wrong)  # type: ignore[arg-type]
    return CHILD, signed_renewal(child, ORGANISER, RUN.sealer(ORGANISER))


SAME = (
    "step", "tokens", "counted", "state_root", "ownership", "column_rounds", "leases", "steps_per_round",
    "decay", "strangers",
)  # fmt: skip


def test_a_renewal_changes_who_votes_and_nothing_else() -> None:
    parent, commit = renewal()
    check_commit(RUN.rules, parent, commit, RUN.keys.verify)
    child = commit.manifest
    assert [(member.peer, member.elector) for member in child.members] == [(A, True), (B, False)]
    assert all(getattr(child, name) == getattr(parent, name) for name in SAME)
    assert (child.roster, child.slices, child.round) == ((), (), parent.round + 1)


def test_trusted_newcomers_may_be_named_where_nobody_else_has_the_state() -> None:
    new = Member(PeerId("z"), 3, True, 0)
    parent, commit = renewal(new, chosen=[PeerId("z")])
    check_commit(RUN.rules, parent, commit, RUN.keys.verify)
    assert [member.peer for member in electors(commit.manifest.members)] == ["z"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", 9), ("counted", 9), ("state_root", sha256(b"x")), ("ownership", ((A,),) * 4), ("step", 9),
        ("roster", (Contribution(A, 5, 1, 1),)), ("round", 9), ("wire_root", sha256(b"x")), ("members", MEMBERS[:1]),
    ],
)  # fmt: skip
def test_a_renewal_that_changes_more_is_refused(name: str, value: object) -> None:
    parent, commit = renewal(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(RemoteProtocolError, match=r"is not what it was|electors"):
        check_commit(RUN.rules, parent, commit, RUN.keys.verify)


def test_a_renewal_names_somebody_who_may_vote() -> None:
    for chosen in ([], [A]):
        roll = Roll(RUN.rules.fingerprint, 1, (), (A,))
        made = renewed_manifest(RUN.rules, CHILD, chosen, roll=roll)
        with pytest.raises(RemoteProtocolError, match="may not vote"):
            check_renewal(RUN.rules, CHILD, made)
    lying = replace(RUN.rules, faults=Faults.BYZANTINE)
    with pytest.raises(RemoteProtocolError, match="names 1 electors"):
        check_renewal(lying, CHILD, renewed_manifest(lying, CHILD, [A]))
    check_renewal(lying, CHILD, renewed_manifest(lying, CHILD, [A, B]))


def test_only_the_organiser_renews() -> None:
    parent, commit = renewal()
    check = RUN.keys.verify
    for organiser in (A, B, NOBODY):
        with pytest.raises(RemoteProtocolError, match="0 valid seals"):
            check_certificate(parent, commit.manifest, commit.certificate, check, SealRule(organiser))
    forged = signed_renewal(commit.manifest, A, RUN.sealer(A))
    with pytest.raises(RemoteProtocolError, match="0 valid seals"):
        check_certificate(parent, forged.manifest, forged.certificate, check, SealRule(ORGANISER))
    with pytest.raises(RemoteProtocolError):
        check_certificate(parent, commit.manifest, replace(commit.certificate, kind=QUORUM), check, SealRule(ORGANISER))


def test_a_sibling_that_needs_a_banned_signature_does_not_count() -> None:
    parent = CHILD
    heavy = RUN.certified(replace(parent, round=parent.round + 1, parent=manifest_hash(parent), counted=10**9))
    for banned, gone in (((A,), True), ((), False)):
        roll = Roll(RUN.rules.fingerprint, 1, (), banned)
        light = signed_renewal(renewed_manifest(RUN.rules, parent, [B], roll=roll), ORGANISER, RUN.sealer(ORGANISER))
        alone = replace(parent, members=tuple(replace(one, elector=one.peer == A) for one in parent.members))
        assert dislodges(light, heavy, alone, Faults.CRASH) == gone
        assert goes_before((light,), (heavy,), alone, Faults.CRASH) == gone
        assert goes_before((heavy,), (light,), alone, Faults.CRASH) != gone
