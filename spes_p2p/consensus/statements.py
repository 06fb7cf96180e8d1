"""A manifest as a function of its parent and of signed statements: leaders make it, and electors make it again.

The roster follows from what members said that they trained, next members, ownership and leases from what peers said
that they want (`Declaration`, for both), the slices from what reducers said that they reduced (`Report`). A leader
chooses whose words it has heard, and nothing else; the roots are checked by computing the state. What the organiser has
signed of the learning rate (`DecayOrder`) is taken up once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set

from spes_p2p.consensus.bounds import MAX_COUNT, is_sane_intent, is_sane_work
from spes_p2p.consensus.content import Content, Statements
from spes_p2p.consensus.electorate import Electorate, Faults
from spes_p2p.consensus.manifest import SHARE, Contribution, Credit, Manifest, Merge, Slice, manifest_hash
from spes_p2p.consensus.membership import (
    EVERYBODY,
    MAX_MEMBERS,
    Admission,
    Member,
    Roll,
    electors,
    next_members,
    rank,
)
from spes_p2p.consensus.messages import DecayOrder, Declaration, Report, Signed
from spes_p2p.consensus.rules import Outcome, RunRules, capped_tokens, child_manifest
from spes_p2p.consensus.sizes import most_members
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import NO_HASH, Hash, PeerId, sha256
from spes_p2p.ownership.assign import OwnershipRequest

MEMORY = 7
"""Times as much as a round's the average before it weighs in that after it (see `Credit`)."""


def contribution(rules: RunRules, parent: Manifest, said: Declaration) -> Contribution | None:
    """What a roster says of this work; None where it is not what a member trained on top of `parent`."""
    work = said.work
    if not work.ready or min(work.tokens, work.steps) <= 0 or not is_sane_work(work):
        return None
    if (said.fingerprint, said.head) != (rules.fingerprint, manifest_hash(parent)):
        return None
    if (said.peer, said.incarnation) not in parent.training:
        return None
    claimed = Contribution(said.peer, work.tokens, work.steps, work.sequences)
    entry = capped_tokens(rules, parent, claimed)
    return entry if min(entry.tokens, entry.steps) > 0 else None


def counted(rules: RunRules, roster: Iterable[Contribution], slices: Iterable[Slice]) -> tuple[Contribution, ...]:
    """Without those whose values went into no slice, though they could have."""
    used = {peer for piece in slices for peer in piece.contributors}
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

    Leavers that are `needed` count as heard. A newcomer has the state of `parent`. `most`: see `most_members`.
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
    if not any(admission.is_trusted(member.peer) for member in (*heard, *newcomers)):
        staying = [m for m in parent.members if m.peer in leavers and admission.is_trusted(m.peer)]
        heard += staying  # the last to leave stay named, so that they can come back and go on
        leavers -= {member.peer for member in staying}
    newcomers.sort(key=lambda member: rank(head, member.peer))  # a low peer id is no privilege
    members = next_members(parent.members, heard, newcomers, leavers, admission, most)
    named = {member.peer for member in members}
    return members, {peer: wish for peer, wish in wishes.items() if peer in named}


def content_of(
    rules: RunRules, parent: Manifest, statements: Statements, state_root: Hash, merge: Merge | None
) -> Content:
    """The child of `parent` that follows from `statements`; those that it does not depend on are left out."""
    slices = tuple(signed.value.piece for signed in statements.reports)
    now = _contributions(rules, parent, statements.declarations)
    entries = now | _contributions(rules, parent, statements.ready)
    roster = counted(rules, sorted(entries.values()), slices)
    needed = owners_ahead(rules, parent, roster, slices)
    newer = statements.roll if is_newer_roll(rules, parent.roll, statements.roll) else None
    roll = parent.roll if newer is None else newer.value
    admission = rules.admission(roll, parent.round + 1)
    said = (signed.value for signed in statements.declarations)
    members, wishes = members_after(parent, said, needed, admission, most_members(rules))
    reports = tuple(signed.value for signed in statements.reports)
    credit = credited(parent, reports, admission.strangers_of(member.peer for member in members))
    wire_root = sha256(*(tile for signed in statements.reports for tile in signed.value.wire_hashes))
    decay = statements.decay if is_due(rules, parent, statements.decay) else None
    decay_steps = 0 if decay is None else decay.value.steps
    outcome = Outcome(roster, slices, wire_root, state_root, merge, decay_steps, roll, credit)
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
        ),
    )


def credited(parent: Manifest, reports: Iterable[Report], strangers: Set[PeerId]) -> tuple[Credit, ...]:
    """How much counted of what these strangers gave, after a round with these reports; by tiles."""
    given, taken = Counter[PeerId](), Counter[PeerId]()
    for report in reports:
        for peer, share in zip(report.contributors, report.shares):
            given[peer] += report.piece.tiles
            taken[peer] += report.piece.tiles * share
    known = {credit.peer: credit for credit in parent.strangers if credit.peer in strangers}
    for peer in strangers & given.keys():
        share = taken[peer] // given[peer]
        average = (MEMORY * known[peer].average + share) // (MEMORY + 1) if peer in known else share
        known[peer] = Credit(peer, share, average)
    return tuple(sorted(known.values()))


def _contributions(
    rules: RunRules, parent: Manifest, said: Iterable[Signed[Declaration]]
) -> dict[PeerId, Contribution]:
    entries = ((signed.author, contribution(rules, parent, signed.value)) for signed in said)
    return {author: entry for author, entry in entries if entry is not None}


def is_due(rules: RunRules, parent: Manifest, order: Signed[DecayOrder] | None) -> bool:
    """Whether the child of `parent` takes it up: it is the organiser's, and the first that this history hears of."""
    if order is None or parent.decay is not None:
        return False
    said = order.value
    return order.author == rules.organiser and said.fingerprint == rules.fingerprint and 0 < said.steps < MAX_COUNT


def check_content(rules: RunRules, parent: Manifest, content: Content) -> None:
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
        if said.value.fingerprint != rules.fingerprint or not is_sane_intent(said.value.intent, rules.num_columns):
            raise RemoteProtocolError(f"{where}: what {said.author} declared is not of this run, or cannot be")
    _check_reports(manifest_hash(parent), statements, where)
    if missing := missing_quorum(rules, parent, content):
        raise RemoteProtocolError(f"{where}: {missing}")
    again = content_of(rules, parent, statements, child.state_root, child.merge)
    kept = again.statements
    if (len(kept.ready), len(kept.declarations)) != (len(statements.ready), len(statements.declarations)) or any(
        getattr(kept, name) != getattr(statements, name) for name in ("decay", "roll")
    ):
        raise RemoteProtocolError(f"{where}: it comes with statements that nothing in it follows from")
    for name in Manifest.__dataclass_fields__:
        if getattr(child, name) != getattr(again.manifest, name):
            raise RemoteProtocolError(f"{where}: {name} does not follow from the statements beside it")


def missing_quorum(rules: RunRules, parent: Manifest, content: Content) -> str:
    """The one rule about what a leader may leave out, where it may lie; "" where a manifest keeps it, else why not.

    A quorum of the electors has said READY, with what they trained in the plan, and a quorum stays named, but for who
    leaves or is banned.
    """
    if rules.faults is not Faults.BYZANTINE:
        return ""
    child, statements = content.manifest, content.statements
    order = tuple(member.peer for member in electors(parent.members))
    head, voters, quorum = manifest_hash(parent), set(order), Electorate(order, rules.faults).quorum
    planned = {entry.peer for entry in child.roster}
    for report in (signed.value for signed in statements.reports):
        planned |= {*report.contributors, *(peer for peer, _ in report.left_out)}
    said = [signed.value for signed in (*statements.declarations, *statements.ready) if signed.author in voters]
    done = [one for one in said if one.head == head and one.work.ready]
    if statements.reports:
        done = [one for one in done if one.peer in planned or contribution(rules, parent, one) is None]
    stays = {member.peer for member in child.members} | {one.peer for one in said if one.intent.leaving}
    stays |= set(child.roll.banned) if child.roll is not None else set()
    counts = (len({one.peer for one in done}), len(stays & voters))
    if min(counts) >= quorum:
        return ""
    return f"{counts[0]} electors are READY in it and {counts[1]} stay, but a quorum is {quorum}"


def is_newer_roll(rules: RunRules, known: Roll | None, signed: Signed[Roll] | None) -> bool:
    """Whether a roll replaces the `known` one: by the organiser, as far as it shows without its signature."""
    if signed is None or (signed.author, signed.value.fingerprint) != (rules.organiser, rules.fingerprint):
        return False
    return signed.value.is_sane() and (known is None or known.number < signed.value.number)


def are_sane_shares(report: Report) -> bool:
    """Whether they are of its contributors, or of none."""
    fits = len(report.shares) in (0, len(report.contributors))
    return fits and all(0 <= share <= SHARE for share in report.shares)


def _check_reports(parent: Hash, statements: Statements, where: str) -> None:
    for signed in statements.reports:
        report = signed.value
        sizes: Sequence[int] = [len(tile) for tile in report.wire_hashes]
        if signed.author != report.reducer or report.parent != parent:
            raise RemoteProtocolError(f"{where}: slice {report.piece.key} is not by its reducer, or of another parent")
        if len(sizes) != report.piece.tiles or any(size != len(NO_HASH) for size in sizes):
            raise RemoteProtocolError(f"{where}: slice {report.piece.key} has not one hash for each of its tiles")
        if not are_sane_shares(report):
            raise RemoteProtocolError(f"{where}: slice {report.piece.key} does not say what counted of whom")
