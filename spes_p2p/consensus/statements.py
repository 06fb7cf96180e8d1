"""A manifest as a function of its parent and of signed statements: leaders make it, and electors make it again.

The roster follows from what members said that they trained, next members, ownership and leases from what peers said
that they want (`Declaration`, for both), the slices from what reducers said that they reduced (`Report`). A leader
chooses whose words it has heard, and nothing else; the roots are checked by computing the state. What the organiser has
signed of the learning rate (`DecayOrder`) is taken up once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from spes_p2p.consensus.bounds import MAX_COUNT, is_sane_intent, is_sane_work
from spes_p2p.consensus.content import Content, Equivocation, Statements
from spes_p2p.consensus.electorate import Electorate, Faults
from spes_p2p.consensus.ledger import Ledger
from spes_p2p.consensus.manifest import Audited, Contribution, Manifest, Merge, Slice, manifest_hash
from spes_p2p.consensus.membership import (
    EVERYBODY,
    FAILED,
    MAX_MANIFEST_BANS,
    MAX_MEMBERS,
    MAX_VOUCHED,
    PASSED,
    WITHHELD,
    Admission,
    Member,
    Roll,
    electors,
    next_members,
    rank,
    still_banned,
    weightless,
)
from spes_p2p.consensus.messages import Accusation, DecayOrder, Declaration, Signed, Verdict
from spes_p2p.consensus.probation import drawn_auditors, outcome_of
from spes_p2p.consensus.rules import Outcome, RunRules, capped_tokens, child_manifest
from spes_p2p.consensus.sizes import most_members
from spes_p2p.consensus.standing import failed_too_often, findings_of
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import NO_HASH, Hash, PeerId, sha256
from spes_p2p.ownership.assign import OwnershipRequest


def contribution(rules: RunRules, parent: Manifest, said: Declaration) -> Contribution | None:
    """What a roster says of this work; None where it is not what a member trained on top of `parent`."""
    work = said.work
    if not work.ready or min(work.tokens, work.steps) <= 0 or not is_sane_work(work):
        return None
    if (work.commitment != NO_HASH) != (rules.audited_share > 0):
        return None
    if (said.fingerprint, said.head) != (rules.fingerprint, manifest_hash(parent)):
        return None
    if (said.peer, said.incarnation) not in parent.training:
        return None
    claimed = Contribution(said.peer, work.tokens, work.steps, work.sequences, work.commitment)
    entry = capped_tokens(rules, parent, claimed)
    return entry if min(entry.tokens, entry.steps) > 0 else None


def counted(
    rules: RunRules, parent: Manifest, roster: Iterable[Contribution], slices: Iterable[Slice]
) -> tuple[Contribution, ...]:
    """Without those whose values went into no slice, though they could have."""
    used = {peer for piece in slices for peer in piece.contributors} | weightless(parent.members)
    return tuple(entry for entry in roster if not rules.exchange or entry.peer in used)


def owners_ahead(
    rules: RunRules, parent: Manifest, roster: Iterable[Contribution], slices: Iterable[Slice]
) -> frozenset[PeerId]:
    """Peers with trained columns that this round does not hand out; leavers among them stay for the next."""
    if rules.expert_rounds == 1:
        return frozenset()
    done = {piece.block - 1 for piece in slices}
    owners = {owner for column, some in enumerate(parent.ownership) if column not in done for owner in some}
    return frozenset(owners & {entry.peer for entry in roster})


def members_after(
    parent: Manifest,
    declarations: Iterable[Declaration],
    needed: Collection[PeerId] = (),
    admission: Admission = EVERYBODY,
    most: int = MAX_MEMBERS,
) -> tuple[tuple[Member, ...], dict[PeerId, OwnershipRequest]]:
    """Who is a member after this round, and what they want: everyone who said anything, newcomers too, but no leavers.

    Leavers that are `needed` count as heard. A newcomer has the state of `parent`. Nobody is on probation yet. `most`:
    see `most_members`.
    """
    heard: list[Member] = []
    newcomers: list[Member] = []
    leavers: set[PeerId] = set()
    wishes: dict[PeerId, OwnershipRequest] = {}
    head = manifest_hash(parent)
    known = {member.peer: member for member in parent.members}
    for said in declarations:
        intent, before = said.intent, known.get(said.peer)
        is_known = before is not None and before.incarnation == said.incarnation
        does_train = before.trains if before is not None and is_known else not intent.serving
        member = Member(said.peer, said.incarnation, False, intent.link_class, does_train)
        if intent.leaving and said.peer not in needed:
            leavers.add(said.peer)
        elif is_known:
            heard.append(member)
        elif intent.joining and said.head == head:
            newcomers.append(member)
        wish = OwnershipRequest(intent.max_columns, intent.claims, intent.releases)
        wishes[said.peer] = wish if does_train else OwnershipRequest(0)
    if not any(admission.may_vote(member.peer) for member in (*heard, *newcomers)):
        staying = [m for m in parent.members if m.peer in leavers and admission.may_vote(m.peer)]
        heard += staying  # the last to leave stay named, so that they can come back and go on
        leavers -= {member.peer for member in staying}
    newcomers.sort(key=lambda member: rank(head, member.peer))  # a low peer id is no privilege
    members = next_members(parent.members, heard, newcomers, leavers, admission, most)
    named = {member.peer for member in members}
    return members, {peer: wish for peer, wish in wishes.items() if peer in named}


def content_of(
    rules: RunRules, parent: Manifest, ledger: Ledger, statements: Statements, state_root: Hash, merge: Merge | None
) -> Content:
    """The child of `parent` that follows from `statements`; those that it does not depend on are left out.

    `ledger`: up to `parent`.
    """
    slices = tuple(signed.value.piece for signed in statements.reports)
    now = _contributions(rules, parent, statements.declarations)
    entries = now | _contributions(rules, parent, statements.ready)
    roster = counted(rules, parent, sorted(entries.values()), slices)
    needed = owners_ahead(rules, parent, roster, slices)
    newer = statements.roll if is_newer_roll(rules, parent.roll, statements.roll) else None
    roll = parent.roll if newer is None else newer.value
    audited, verdicts = audited_after(rules, parent, statements.verdicts)
    banned, proven, twice = banned_after(rules, parent, roll, statements, audited)
    vouched = vouched_after(rules, parent, statements.declarations, banned)
    admission = rules.admission(roll, banned, vouched, parent.round + 1)
    said = (signed.value for signed in statements.declarations)
    voting, wishes = members_after(parent, said, needed, admission, most_members(rules))
    members = rules.with_standing(parent, ledger, voting, roster, audited)
    wire_root = sha256(*(tile for signed in statements.reports for tile in signed.value.wire_hashes))
    decay = statements.decay if is_due(rules, parent, statements.decay) else None
    decay_steps = 0 if decay is None else decay.value.steps
    root = ledger.after(roster, audited).root
    outcome = Outcome(roster, slices, wire_root, state_root, merge, decay_steps, roll, banned, root, audited, vouched)
    manifest = child_manifest(rules, parent, outcome, members, wishes)
    named = {member.peer for member in (*parent.members, *members)}
    trained = {entry.peer for entry in roster}
    return Content(
        manifest,
        Statements(
            tuple(s for s in statements.ready if s.author in trained and entries[s.author] != now.get(s.author)),
            statements.reports,
            tuple(signed for signed in statements.declarations if signed.author in named),
            decay,
            newer,
            proven,
            verdicts,
            twice,
        ),
    )


def _contributions(
    rules: RunRules, parent: Manifest, said: Iterable[Signed[Declaration]]
) -> dict[PeerId, Contribution]:
    entries = ((signed.author, contribution(rules, parent, signed.value)) for signed in said)
    return {author: entry for author, entry in entries if entry is not None}


def banned_after(
    rules: RunRules,
    parent: Manifest,
    roll: Roll | None,
    statements: Statements,
    audited: Collection[Audited] = (),
) -> tuple[tuple[PeerId, ...], tuple[Signed[Accusation], ...], tuple[Equivocation, ...]]:
    """(whom the child of `parent` with `roll` bans, by whose word, by which two votes): those before it whom the
    organiser has not let in again, whom a quorum of its electors accuses, who voted twice, and who failed too many
    audits."""
    before = still_banned(parent.banned, parent.roll, roll)
    electorate = Electorate(tuple(member.peer for member in electors(parent.members)), rules.faults)
    known: dict[PeerId, dict[PeerId, Signed[Accusation]]] = {}
    for signed in statements.accusations:
        is_proof = signed.value.fingerprint == rules.fingerprint and not signed.value.loses_many
        if is_proof and signed.author in electorate.order:
            known.setdefault(signed.value.report.author, {})[signed.author] = signed
    proven = {
        peer: [some[author] for author in sorted(some)][: electorate.quorum]
        for peer, some in sorted(known.items())
        if peer not in before and len(some) >= electorate.quorum
    }
    twice = _voted_twice(rules, parent, statements.equivocations)
    room = MAX_MANIFEST_BANS - len(before)
    chosen = [*proven, *sorted(twice.keys() - {*before, *proven})][:room]
    failed = sorted(failed_too_often(parent.members, findings_of(audited)) - {*before, *chosen})
    banned = (*before, *chosen, *failed[: room - len(chosen)])
    accused = tuple(signed for peer in chosen for signed in proven.get(peer, ()))
    return tuple(sorted(banned)), accused, tuple(twice[peer] for peer in chosen if peer not in proven)


def _voted_twice(rules: RunRules, parent: Manifest, said: Iterable[Equivocation]) -> dict[PeerId, Equivocation]:
    """Electors that are proven to lie, by the first proof each. With `crash` they lose records, but do not lie."""
    proofs = [one for one in said if rules.faults is Faults.BYZANTINE and one.is_proof(rules.fingerprint)]
    voting = {member.peer for member in electors(parent.members)}
    return {one.author: one for one in reversed(proofs) if one.author in voting}


def audited_after(
    rules: RunRules, parent: Manifest, verdicts: Iterable[Signed[Verdict]]
) -> tuple[tuple[Audited, ...], tuple[Signed[Verdict], ...]]:
    """(what came of auditing the work that `parent` counts, by whose word)."""
    verdicts = tuple(verdicts)
    said: dict[PeerId, dict[PeerId, Signed[Verdict]]] = {}
    auditors = drawn_auditors(rules, parent) if verdicts else {}
    for signed in verdicts:
        if is_of_auditor(rules, parent, auditors, signed):
            said.setdefault(signed.value.peer, {})[signed.author] = signed
    found: list[Audited] = []
    proven: list[Signed[Verdict]] = []
    for peer, some in sorted(said.items()):
        outcome = outcome_of(parent, peer, {author: signed.value.finding for author, signed in some.items()})
        if outcome is not None:
            found.append(Audited(peer, outcome))
            proven += [signed for _, signed in sorted(some.items())]
    return tuple(found), tuple(proven)


def is_of_auditor(
    rules: RunRules, parent: Manifest, auditors: Mapping[PeerId, Collection[PeerId]], signed: Signed[Verdict]
) -> bool:
    """Whether its author was drawn to say this of work that `parent` counts. `auditors`: by `drawn_auditors`."""
    verdict = signed.value
    fits = (verdict.fingerprint, verdict.parent) == (rules.fingerprint, manifest_hash(parent))
    if not fits or verdict.finding not in (PASSED, FAILED, WITHHELD):
        return False
    return signed.author in auditors.get(verdict.peer, ())


def vouched_after(
    rules: RunRules, parent: Manifest, declarations: Iterable[Signed[Declaration]], banned: Collection[PeerId]
) -> tuple[PeerId, ...]:
    """For whom electors vouch after the child of `parent`: those before, and for whom two thirds of them do now.

    Of an elector counts what it says on top of `parent`: what it has taken back cannot be brought up again.
    """
    if not rules.by_vouch:
        return ()
    head, voters = manifest_hash(parent), {member.peer: member.incarnation for member in electors(parent.members)}
    said = (signed.value for signed in declarations)
    able = (one for one in said if voters.get(one.peer) == one.incarnation and one.head == head)
    votes = Counter(peer for one in able for peer in {*one.intent.vouches})
    needed = Electorate(tuple(voters), Faults.BYZANTINE).quorum
    known = {*parent.vouched} - {*banned}
    new = sorted(peer for peer, count in votes.items() if count >= needed and peer not in {*known, *banned})
    return tuple(sorted({*known, *new[: MAX_VOUCHED - len(known)]}))


def is_due(rules: RunRules, parent: Manifest, order: Signed[DecayOrder] | None) -> bool:
    """Whether the child of `parent` takes it up: it is the organiser's, and the first that this history hears of."""
    if order is None or parent.decay is not None:
        return False
    said = order.value
    return order.author == rules.organiser and said.fingerprint == rules.fingerprint and 0 < said.steps < MAX_COUNT


def is_sane_declaration(rules: RunRules, parent: Manifest, said: Declaration) -> bool:
    """Whether a manifest may follow from it: only who votes on it has a reason to name others (see `vouched_after`)."""
    is_voter = any(member.peer == said.peer for member in electors(parent.members))
    return is_sane_intent(said.intent, rules.num_columns) and (is_voter or not said.intent.vouches)


def check_content(rules: RunRules, parent: Manifest, ledger: Ledger, content: Content) -> None:
    """Raises RemoteProtocolError, saying what, where a manifest does not follow from the statements beside it.

    Signatures were checked before, and so was the manifest itself (see `check_child`).
    """
    statements, child = content.statements, content.manifest
    where = f"manifest of round {child.round}"
    for kind, signed in (("ready", statements.ready), ("declarations", statements.declarations)):
        authors = [one.author for one in signed]
        if len(set(authors)) != len(authors) or authors != [one.value.peer for one in signed]:
            raise RemoteProtocolError(f"{where}: its statements ({kind}) are not by those of whom they speak, one each")
    if any(contribution(rules, parent, signed.value) is None for signed in statements.ready):
        raise RemoteProtocolError(f"{where}: it counts work that is not of a member on top of its parent")
    for said in statements.declarations:
        if said.value.fingerprint != rules.fingerprint or not is_sane_declaration(rules, parent, said.value):
            raise RemoteProtocolError(f"{where}: what {said.author} declared is not of this run, or cannot be")
    _check_reports(manifest_hash(parent), statements, where)
    again = content_of(rules, parent, ledger, statements, child.state_root, child.merge)
    kept = again.statements
    if (len(kept.ready), len(kept.declarations)) != (len(statements.ready), len(statements.declarations)) or any(
        getattr(kept, name) != getattr(statements, name)
        for name in ("decay", "roll", "accusations", "verdicts", "equivocations")
    ):
        raise RemoteProtocolError(f"{where}: it comes with statements that nothing in it follows from")
    for name in Manifest.__dataclass_fields__:
        if getattr(child, name) != getattr(again.manifest, name):
            raise RemoteProtocolError(f"{where}: {name} does not follow from the statements beside it")


def is_newer_roll(rules: RunRules, known: Roll | None, signed: Signed[Roll] | None) -> bool:
    """Whether a roll replaces the `known` one: by the organiser, as far as it shows without its signature."""
    if signed is None or (signed.author, signed.value.fingerprint) != (rules.organiser, rules.fingerprint):
        return False
    return signed.value.is_sane() and (known is None or known.number < signed.value.number)


def _check_reports(parent: Hash, statements: Statements, where: str) -> None:
    for signed in statements.reports:
        report = signed.value
        sizes: Sequence[int] = [len(tile) for tile in report.wire_hashes]
        if signed.author != report.reducer or report.parent != parent:
            raise RemoteProtocolError(f"{where}: slice {report.piece.key} is not by its reducer, or of another parent")
        if len(sizes) != report.piece.tiles or any(size != len(NO_HASH) for size in sizes):
            raise RemoteProtocolError(f"{where}: slice {report.piece.key} has not one hash for each of its tiles")
