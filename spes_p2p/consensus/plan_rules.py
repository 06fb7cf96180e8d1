"""What a plan must have: everybody of its roster in all that is theirs, and all blocks whose turn it is. Pure."""

from __future__ import annotations

from collections.abc import Collection

from spes_p2p.consensus.child_checks import check_roster, check_slices
from spes_p2p.consensus.fragments import due_columns, due_tiles
from spes_p2p.consensus.manifest import Manifest
from spes_p2p.consensus.membership import weightless
from spes_p2p.consensus.messages import Plan
from spes_p2p.consensus.rules import RunRules
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId


def check_plan(rules: RunRules, parent: Manifest, plan: Plan) -> None:
    """Raises RemoteProtocolError where a plan for the child of `parent` cannot be carried out."""
    check_roster(rules, parent, plan.roster)
    check_slices(rules, parent, plan.roster, plan.slices)
    where, roster = f"round {parent.round + 1}", {entry.peer for entry in plan.roster} - weightless(parent.members)
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
    counting = set(roster) - weightless(parent.members)
    if not rules.exchange or not counting:
        return frozenset()
    round = parent.round + 1
    columns = {column for column, last in enumerate(parent.column_rounds) if round - last >= rules.expert_rounds}
    columns |= due_columns(parent.ownership, round, rules.expert_rounds)
    owned = {1 + column for column in columns if set(parent.ownership[column]) & counting}
    shared = {0} if due_tiles(rules.block_tiles[0], round, rules.fragments)[1] else set()
    return frozenset(block for block in owned | shared if rules.block_tiles[block])
