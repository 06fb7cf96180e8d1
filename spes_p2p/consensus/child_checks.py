"""Whether a child manifest follows from its parent: what everybody checks who takes one up.

What can be derived is derived again (`rules`) and compared; what its makers have chosen is checked for sense. Whether
it follows from what peers have signed is checked where those statements are at hand (`statements.check_content`). A
plan is checked for everybody of its roster in all that is theirs, and all blocks whose turn it is (`check_plan`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

from spes_p2p.consensus.certificate import CheckSignature, check_certificate
from spes_p2p.consensus.manifest import SHARE, Contribution, Manifest, Slice
from spes_p2p.consensus.membership import (
    LINK_CLASSES,
    electors,
    most_new,
    newest_roll,
    trainers,
    with_votes,
)
from spes_p2p.consensus.messages import RENEWAL, Commit, Plan
from spes_p2p.consensus.rules import Outcome, RunRules, capped_tokens, derived, merge_alpha_for, renewed_manifest
from spes_p2p.consensus.sizes import most_members
from spes_p2p.consensus.turns import Ranges, due_columns
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId


def check_child(rules: RunRules, parent: Manifest, child: Manifest) -> None:
    """Raises RemoteProtocolError, naming the field, where `child` does not follow from `parent` by the rules."""
    if child.round != parent.round + 1:  # first: others reckon with it
        raise RemoteProtocolError(f"manifest of round {child.round}: round does not follow from its parent")
    check_roster(rules, parent, child.roster)  # next: the rest is derived from them
    _check_members(rules, parent, child)
    decay_steps = 0 if child.decay is None else child.decay.steps
    outcome = Outcome(
        child.roster, child.slices, child.wire_root, child.state_root, child.merge, decay_steps, child.roll,
        child.strangers,
    )  # fmt: skip
    expected = derived(rules, parent, outcome, child.members, child.ownership)
    for name in Manifest.__dataclass_fields__:
        if getattr(child, name) != getattr(expected, name):
            raise RemoteProtocolError(f"manifest of round {child.round}: {name} does not follow from its parent")
    check_slices(rules, parent, child.roster, child.slices)
    if rules.exchange and {p for s in child.slices for p in s.contributors} != {entry.peer for entry in child.roster}:
        raise RemoteProtocolError(f"round {child.round}: the roster counts work that went into no slice")
    _check_merge(rules, parent, child)


def check_commit(rules: RunRules, parent: Manifest, commit: Commit, check: CheckSignature) -> None:
    """Raises RemoteProtocolError where `commit` is not one of a child of `parent`: a quorum's, or a renewal."""
    if commit.certificate.kind == RENEWAL:
        check_renewal(rules, parent, commit.manifest)
    else:
        check_child(rules, parent, commit.manifest)
    check_certificate(parent, commit.manifest, commit.certificate, check, rules.seals)


def check_renewal(rules: RunRules, parent: Manifest, child: Manifest) -> None:
    """Raises RemoteProtocolError where `child` differs from `parent` in more than who votes, and the roll."""
    where = f"renewal of round {parent.round}"
    known = {(member.peer, member.incarnation) for member in parent.members}
    new = [member for member in child.members if (member.peer, member.incarnation) not in known]
    chosen = [member.peer for member in electors(child.members)]
    expected = renewed_manifest(rules, parent, chosen, new, child.roll)
    for name in Manifest.__dataclass_fields__:
        if getattr(child, name) != getattr(expected, name):
            raise RemoteProtocolError(f"{where}: {name} is not what it was")
    admission = rules.admission_of(child)
    allowed = all(admission.is_trusted(peer) and not admission.is_banned(peer) for peer in chosen)
    in_order = child.roll is None or child.roll.is_sane()
    too_many = len(child.members) > max(most_members(rules), len(parent.members))
    if not allowed or not in_order or too_many or len(chosen) < rules.fewest_renewed:
        raise RemoteProtocolError(f"{where}: it names {len(chosen)} electors, or some who may not vote")
    if any(member.link_class not in LINK_CLASSES or not member.elector for member in new):
        raise RemoteProtocolError(f"{where}: a new member has an unknown link class, or no vote")


def check_newcomers(rules: RunRules, parent: Manifest, child: Manifest) -> None:
    """Raises RemoteProtocolError where `child` names more new peers than a round may. Asked before a vote only: what a
    majority has committed is followed as it is. Who is vouched for does not count.
    """
    admission = rules.admission(child.roll, parent.round + 1)
    strangers = {m.peer for m in child.members if not (rules.has_strangers and admission.is_trusted(m.peer))}
    new, most = strangers - {member.peer for member in parent.members}, most_new(len(parent.members))
    if len(new) > most:
        raise RemoteProtocolError(
            f"manifest of round {child.round}: {len(new)} new members, but at most {most} are allowed"
        )


def _check_members(rules: RunRules, parent: Manifest, child: Manifest) -> None:
    admission = rules.admission(child.roll, child.round)
    if newest_roll(parent.roll, child.roll) != child.roll or (child.roll is not None and not child.roll.is_sane()):
        raise RemoteProtocolError(f"manifest of round {child.round}: its roll is older than its parent's, or malformed")
    names = [member.peer for member in child.members]
    if any(map(admission.is_banned, names)):
        raise RemoteProtocolError(f"manifest of round {child.round}: a member is banned")
    if len(names) > (most := most_members(rules)):
        raise RemoteProtocolError(
            f"manifest of round {child.round}: {len(names)} members, but at most {most} are allowed"
        )
    if not names or names != sorted(set(names)):
        raise RemoteProtocolError(
            f"manifest of round {child.round}: there are no members, or they are not sorted, or one is named twice"
        )
    if any(member.link_class not in LINK_CLASSES for member in child.members):  # leaders are chosen by it
        raise RemoteProtocolError(f"manifest of round {child.round}: a member has an unknown link class")
    if with_votes(parent.members, child.members, admission) != child.members:
        raise RemoteProtocolError(f"manifest of round {child.round}: votes do not follow from the parent's members")
    credited = [credit.peer for credit in child.strangers]
    shares = {share for credit in child.strangers for share in (credit.share, credit.average)}
    if credited != sorted(set(credited)) or not set(credited) <= set(names) or not shares <= {*range(SHARE + 1)}:
        raise RemoteProtocolError(f"manifest of round {child.round}: what strangers' values counted for cannot be")
    owners = {owner for column in child.ownership for owner in column}
    if len(child.ownership) != len(parent.ownership) or not owners <= {m.peer for m in trainers(child.members)}:
        raise RemoteProtocolError(f"manifest of round {child.round}: an owner is not a member that trains")
    if any(owners and not any(map(admission.is_trusted, owners)) for owners in child.ownership):
        raise RemoteProtocolError(f"manifest of round {child.round}: a column is owned by strangers only")


def check_roster(rules: RunRules, parent: Manifest, roster: Sequence[Contribution]) -> None:
    where = f"round {parent.round + 1}"
    members = {member.peer for member in trainers(parent.members)}
    names = [entry.peer for entry in roster]
    if names != sorted(set(names)) or not set(names) <= members:
        raise RemoteProtocolError(f"{where}: the roster is not a sorted part of the members that train")
    for entry in roster:
        if min(entry.tokens, entry.steps) <= 0 or entry.sequences < 0 or capped_tokens(rules, parent, entry) != entry:
            raise RemoteProtocolError(f"{where}: {entry.peer} claims more than its lease")


def check_slices(rules: RunRules, parent: Manifest, roster: Sequence[Contribution], slices: Sequence[Slice]) -> None:
    """Slices are in order, do not overlap, stay in their block, and cover what is due of it wholly or not at all."""
    where, peers = f"round {parent.round + 1}", {entry.peer for entry in roster}
    voters = {member.peer for member in electors(parent.members)}
    strangers = rules.admission_of(parent).strangers_of(peers)
    if slices and not rules.exchange:
        raise RemoteProtocolError(f"{where}: a run without exchange must not have slices")
    covered = [0] * len(rules.block_tiles)
    starts = accumulate(rules.block_tiles, initial=0)
    due: list[Ranges] = [((start, tiles),) for start, tiles in zip(starts, rules.block_tiles)]
    due[0] = rules.due_shared(parent.round + 1)
    for piece in slices:
        if not 0 <= piece.block < len(covered) or not 0 < piece.tiles <= rules.slice_tiles:
            raise RemoteProtocolError(f"{where}: slice of block {piece.block} is malformed")
        allowed = peers if piece.block == 0 else peers & set(parent.ownership[piece.block - 1])
        first, left = _next_tiles(due[piece.block], covered[piece.block])
        if piece.first_tile != first or piece.tiles > left or not set(piece.contributors) <= allowed:
            raise RemoteProtocolError(f"{where}: slice {piece.key} does not fit the plan")
        if not piece.contributors or list(piece.contributors) != sorted(set(piece.contributors)):
            raise RemoteProtocolError(f"{where}: slice {piece.key} has no contributors, or not in order")
        if strangers.issuperset(piece.contributors):
            raise RemoteProtocolError(f"{where}: slice {piece.key} has values of strangers only")
        if piece.reducer not in voters and piece.contributors != (piece.reducer,):
            raise RemoteProtocolError(f"{where}: slice {piece.key} was reduced by a peer that is no elector")
        covered[piece.block] += piece.tiles
    wanted = [sum(number for _, number in ranges) for ranges in due]
    if any(have not in (0, tiles) for have, tiles in zip(covered, wanted, strict=True)):
        raise RemoteProtocolError(f"{where}: a block is covered in part")


def _next_tiles(ranges: Ranges, covered: int) -> tuple[int, int]:
    """The first tile after `covered` ones of these, and how many lie together from there on; 0 at their end."""
    for first, number in ranges:
        if covered < number:
            return first + covered, number - covered
        covered -= number
    return 0, 0


def _check_merge(rules: RunRules, parent: Manifest, child: Manifest) -> None:
    alpha = merge_alpha_for(rules, parent.step, child.step)
    if (child.merge.alpha if child.merge else 0.0) != alpha or (child.merge is not None and not alpha):
        raise RemoteProtocolError(f"manifest of round {child.round}: merge alpha is not {alpha}")
    for layer in child.merge.neighbours if child.merge else ():
        bad = len(layer) != rules.num_columns or any(
            not 0 <= other < rules.num_columns or other == expert for expert, near in enumerate(layer) for other in near
        )
        if bad:
            raise RemoteProtocolError(f"manifest of round {child.round}: merge neighbours are out of range")


def check_plan(rules: RunRules, parent: Manifest, plan: Plan) -> None:
    """Raises RemoteProtocolError where a plan for the child of `parent` cannot be carried out."""
    check_roster(rules, parent, plan.roster)
    check_slices(rules, parent, plan.roster, plan.slices)
    where, roster = f"round {parent.round + 1}", {entry.peer for entry in plan.roster}
    for piece in plan.slices:
        owners = roster if piece.block == 0 else parent.ownership[piece.block - 1]
        if set(piece.contributors) != roster & set(owners):
            raise RemoteProtocolError(f"{where}: slice {piece.key} leaves out a contributor of the roster")
    if missing := due_blocks(rules, parent, roster) - {piece.block for piece in plan.slices}:
        raise RemoteProtocolError(f"{where}: block {min(missing)} is due, and the plan leaves it out")


def due_blocks(rules: RunRules, parent: Manifest, roster: Collection[PeerId]) -> frozenset[int]:
    """The blocks that the child of `parent` can bring with values of this roster, and whose turn it is by any account.

    A leader adds columns that an owner is about to lose.
    """
    if not rules.exchange or not roster:
        return frozenset()
    round = parent.round + 1
    columns = {column for column, last in enumerate(parent.column_rounds) if round - last >= rules.expert_rounds}
    columns |= due_columns(parent.ownership, round, rules.expert_rounds)
    owned = {1 + column for column in columns if set(parent.ownership[column]) & set(roster)}
    shared = {0} if rules.due_shared(round) else set()
    return frozenset(block for block in owned | shared if rules.block_tiles[block])
