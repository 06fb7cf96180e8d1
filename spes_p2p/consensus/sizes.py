"""How many bytes what a round decides may take: one call carries a manifest with all that it follows from.

All numbers are upper bounds of what `wire` makes of something, whatever its authors say: so a manifest never names more
members than the next one has room to name again, and a plan never counts more of them than its reports have room for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spes_p2p.consensus.manifest import Manifest, Slice
from spes_p2p.consensus.membership import MAX_MEMBERS
from spes_p2p.consensus.rules import RunRules
from spes_p2p.ownership.assign import MOST_CLAIMANTS
from spes_p2p.wire import pack

MAX_CONTENT_BYTES = 2 * 2**20 - 2**12
"""Of a manifest with its statements. What carries it takes some more."""
ROSTER_BYTES = MAX_CONTENT_BYTES // 4
"""Are left for those whose work is counted, at least."""
NAME_BYTES = 50
HASH_BYTES = 34
DECLARATION_BYTES = 930
"""Signed, but for the columns that it claims or releases."""
MEMBER_BYTES = 220
"""Its entry in the manifest, its lease, and what counted of what it gave."""
ENTRY_BYTES = 120
"""Of a roster."""
SLICE_BYTES = 1000
"""Of a slice, in the manifest and in the signed report of its reducer, but for its tiles and those whose values it is
made of."""
CONTRIBUTOR_BYTES = 2 * NAME_BYTES + 24
"""Of a contributor of a slice: its name in report and manifest, or in the report and why its values were left out."""
OTHER_BYTES = 2**16
"""Of whatever else a manifest says: the merge, the organiser's roll, counts."""


def declaration_bytes(columns: int) -> int:
    """The most that a signed declaration takes in a run with so many columns."""
    each = 1 if columns <= 2**7 else 2 if columns <= 2**8 else 3
    return DECLARATION_BYTES + each * columns


def member_bytes(rules: RunRules) -> int:
    """The most that one more member takes. It may own all columns where that is what the run wants of everybody."""
    owned = NAME_BYTES * rules.num_columns if rules.target_replicas > MOST_CLAIMANTS else 0
    return declaration_bytes(rules.num_columns) + MEMBER_BYTES + owned


def state_bytes(rules: RunRules) -> int:
    """The least that the slices of a round take, with nobody's name in them."""
    slices = sum(-(-tiles // rules.slice_tiles) for tiles in rules.block_tiles)
    return HASH_BYTES * sum(rules.block_tiles) + SLICE_BYTES * slices


def most_members(rules: RunRules) -> int:
    """How many members a manifest of this run may name."""
    room = MAX_CONTENT_BYTES - _fixed_bytes(rules) - ROSTER_BYTES - state_bytes(rules)
    return min(MAX_MEMBERS, max(0, room) // member_bytes(rules))


def plan_fits(rules: RunRules, parent: Manifest, roster: Sequence[object], slices: Iterable[Slice]) -> bool:
    """Whether there is room for what comes of a plan beside all members of `parent`, whatever anybody says or does."""
    members = len(parent.members) * member_bytes(rules)
    counted = len(roster) * (ENTRY_BYTES + declaration_bytes(rules.num_columns))
    reports = sum(
        SLICE_BYTES + HASH_BYTES * piece.tiles + CONTRIBUTOR_BYTES * len(piece.contributors) for piece in slices
    )
    return _fixed_bytes(rules) + members + counted + reports <= MAX_CONTENT_BYTES


def most_named(rules: RunRules, parent: Manifest, *counted: object) -> int:
    """How many members the child of `parent` has room for beside what was `counted` and reduced for it."""
    room = MAX_CONTENT_BYTES - _fixed_bytes(rules) - sum(len(pack(one)) for one in counted)
    return max(len(parent.members), room // member_bytes(rules))


def _fixed_bytes(rules: RunRules) -> int:
    """What does not hang on how many there are."""
    owners = NAME_BYTES * MOST_CLAIMANTS * rules.num_columns
    return OTHER_BYTES + owners
